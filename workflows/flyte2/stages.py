"""A task of Flyte 2 for each stage: `engine.stages` with types that Flyte knows.

Where a task runs and what is retried and cached is in `engine.stages.pods`, by its name. Its body
is the function of the same name in `engine.stages`, which gets the task's inputs by name. The
modules there are loaded when a task runs.
"""

from __future__ import annotations

import inspect
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from flyte.io import Dir, File

from engine import stages
from engine.stages import settings as of
from engine.stages.settings import RunContext
from workflows.flyte2 import host
from workflows.flyte2.environments import stage_task
from workflows.flyte2.host import Settings


def task_of(body: str, gives: Any = Dir, **inputs: Any) -> Any:
    """Return the task of a stage, `module.function` of `engine.stages`.

    gives: `Dir` for an artifact, `File` for a file, or another type of the function's result.
    inputs: their types; `None` is the default of those that may be.
    """
    module, name = body.split(".")
    calls: dict[Any, Any] = {Dir: host.folder, File: host.file}
    call = calls.get(gives, host.run_body)

    def run_stage(**given: Any) -> Any:
        return call(getattr(getattr(stages, module), name), **given)

    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=kind,
            default=None if type(None) in get_args(kind) else inspect.Parameter.empty,
        )
        for key, kind in inputs.items()
    ]
    run_stage.__name__ = run_stage.__qualname__ = name
    run_stage.__doc__ = f"Run `engine.stages.{body}`."
    run_stage.__annotations__ = {**inputs, "return": gives}
    signature = inspect.Signature(parameters, return_annotation=gives)
    run_stage.__signature__ = signature  # type: ignore[attr-defined]
    return stage_task(run_stage)


def on_settings(settings: Any, **inputs: Any) -> dict[str, Any]:
    return {"run": RunContext, "settings": settings, **inputs}


ASKED: dict[str, Any] = {"config": Settings, "path": str, "seed": int, "profile": str}
COMPARED = {"dataset": Dir, "warm_start": Dir, "policy": Dir}
LEARNED = {"pairs": Dir, "policy": Dir}

plan = task_of("plan.plan", of.Plan, **ASKED, source=str, model=str, preferences=str, workflow=str)
trigger_retraining = task_of("dataset.trigger_retraining", of.RetrainingPlan, **ASKED, at=datetime)
preprocess = task_of("dataset.preprocess", **on_settings(of.DatasetSettings))
ingest = task_of("dataset.ingest", **on_settings(of.IngestSettings, champion=Dir))
fetch = task_of("fetch.fetch", run=RunContext, reference=str, name=str)
reward_audit = task_of(
    "reward_audit.reward_audit", **on_settings(of.RewardAuditSettings, dataset=Dir)
)
sft = task_of("training.sft", **on_settings(of.SFTSettings, dataset=Dir))
STARTS = {"dataset": Dir, "warm_start": Dir, "reward_model": Dir | None}
rl = task_of("training.rl", **on_settings(of.RLSettings, **STARTS))
pairs = task_of("preferences.pairs", **on_settings(of.PairsSettings, dataset=Dir, policy=Dir))
reference_log_probs = task_of(
    "preferences.reference_log_probs", **on_settings(of.PreferenceSettings, **LEARNED)
)
preference_training = task_of(
    "preferences.preference_training",
    **on_settings(of.PreferenceSettings, **LEARNED, reference=Dir),
)
reward_model_training = task_of(
    "preferences.reward_model_training", **on_settings(of.RewardModelSettings, **LEARNED)
)
reward_model_promotion = task_of(
    "promotion.reward_model_promotion",
    **on_settings(of.RewardModelGateSettings, pairs=Dir, reward_model=Dir),
)
evaluate = task_of(
    "evaluation.evaluate",
    **on_settings(of.EvaluationSettings, **COMPARED, audit=Dir | None, parts=list[File] | None),
)
JUDGED = {"dataset": Dir, "policy": Dir, "evaluation": Dir, "approved_by": str}
promote = task_of("promotion.promote", **on_settings(of.PromotionSettings, **JUDGED))
ENDED = {"evaluation": Dir, "promotion": Dir}
report = task_of("evaluation.report", File, run=RunContext, config_digest=str, **COMPARED, **ENDED)
finalize = task_of("evaluation.finalize", run=RunContext, artifact=Dir)
finalize_skipped = task_of("evaluation.finalize_skipped", File, run=RunContext, reason=str)


@stage_task
def evaluate_part(
    part: int,
    run: RunContext,
    settings: of.EvaluationSettings,
    dataset: Dir,
    warm_start: Dir,
    policy: Dir,
) -> File:
    """Write both models' rows of one share of the problems, `part` of `evaluate.map_parts`."""
    inputs = locals()

    def write(**inputs: Any) -> Path:
        path = stages.stage.run_folder(run, "parts") / f"{part}.parquet"
        stages.evaluation.evaluate_part(**inputs).to_parquet(path, index=False)
        return path

    return host.file(write, **inputs)


@stage_task
def approval_request(promotion: Dir) -> str:
    """Return what a person is asked to approve; empty where approval is not all that is missing."""
    waits = host.run_body(stages.promotion.read_decision, promotion=promotion)["waits_for_approval"]
    return host.run_body(stages.promotion.approval_request, promotion=promotion) if waits else ""
