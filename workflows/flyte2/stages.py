"""A task of Flyte 2 for each stage: `engine.stages` with types that Flyte knows.

Where a task runs and what is retried and cached is in `engine.stages.pods`, by its name. Its body,
whose inputs it has, is the function of that name in `engine.stages`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flyte.io import Dir, File

from engine import stages
from engine.stages import interfaces
from engine.stages.stage import Artifact
from workflows.flyte2 import host
from workflows.flyte2.environments import stage_task
from workflows.flyte2.host import Settings

TYPES = {"Artifact": Dir, "Path": File, "PipelineConfig": Settings}
CALLS: Mapping[Any, Callable[..., Any]] = {Dir: host.folder, File: host.file}


def task_of(
    body: str, call: Callable[..., Any] | None = None, gives: object = None, **inputs: object
) -> Any:
    """Return the task of a stage; arguments are those of `tasks.stages.function_of`."""
    signature = interfaces.signature_of(body, TYPES, gives, **inputs)
    call = call or CALLS.get(signature.return_annotation, host.run_body)
    return stage_task(interfaces.function_of(body, call, __name__, signature))


def table_of(body: Callable[..., Any], **inputs: object) -> File:
    """Call a stage's body that makes a part of a table; return its file in the run's folder."""

    def write(part: int, **inputs: Any) -> Path:
        path = stages.stage.run_folder(inputs["run"], "parts") / f"{part}.parquet"
        body(part=part, **inputs).to_parquet(path, index=False)
        return path

    return host.file(write, **inputs)


def request_of(body: Callable[[Artifact], str], promotion: Dir) -> str:
    """Return what a person is asked to approve; empty where approval is not all that is missing."""
    waits = host.run_body(stages.promotion.waits_for_approval, promotion=promotion)
    return host.run_body(body, promotion=promotion) if waits else ""


plan = task_of("plan.plan")
trigger_retraining = task_of("dataset.trigger_retraining")
preprocess = task_of("dataset.preprocess")
ingest = task_of("dataset.ingest")
fetch = task_of("fetch.fetch")
reward_audit = task_of("reward_audit.reward_audit")
sft = task_of("training.sft")
rl = task_of("training.rl")
pairs = task_of("preferences.pairs")
reference_log_probs = task_of("preferences.reference_log_probs")
preference_training = task_of("preferences.preference_training")
reward_model_training = task_of("preferences.reward_model_training")
reward_model_promotion = task_of("promotion.reward_model_promotion")
evaluate_part = task_of("evaluation.evaluate_part", table_of, File)
evaluate = task_of("evaluation.evaluate", parts=list[File] | None)
promote = task_of("promotion.promote")
approval_request = task_of("promotion.approval_request", request_of)
report = task_of("evaluation.report")
finalize = task_of("evaluation.finalize")
finalize_skipped = task_of("evaluation.finalize_skipped")
