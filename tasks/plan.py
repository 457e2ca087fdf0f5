"""Task `plan`: checks everything that can be checked before compute, and opens the run.

It resolves the inputs (data and model to digests, so that changed files miss the cache), asks
MLflow whether it answers, and hands each stage its own section of the configuration. Not cached.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import NamedTuple

from flytekit import task

from engine.config import (
    DataConfig,
    EvaluateConfig,
    LoRAConfig,
    ModelConfig,
    PromoteConfig,
    RLConfig,
    SFTConfig,
    digest,
)
from tasks.content_pinning import model_digest, with_commit
from tasks.context import (
    IMAGE,
    SMALL,
    RunContext,
    execution_tags,
    failures_as_sentences,
    say,
)
from tasks.failure import note_opened
from tasks.inputs import RLHFConfig
from tasks.placement import fit
from tasks.profiles import ProfileName


class Plan(NamedTuple):
    """Each stage's share of the configuration."""

    run: RunContext
    data: DataConfig
    source_digest: str  # what the source holds now
    start: ModelConfig
    model_path: str  # the start model's folder, or owner/name@commit; empty for one from scratch
    start_digest: str  # content of that folder, or owner/name@commit
    context: int  # the model's limit in tokens
    sft: SFTConfig
    rl: RLConfig
    lora: LoRAConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    config_digest: str
    profile: str
    needs_approval: bool


@task(cache=False, requests=SMALL, container_image=IMAGE, retries=2, timeout=timedelta(minutes=30))
def plan(
    config: RLHFConfig,
    source: str,
    path: str,
    model: str,
    seed: int,
    profile: ProfileName,
    workflow: str = "rlhf",
) -> Plan:
    """Check the inputs, open the MLflow parent run, and split the configuration by stage.

    `source`, `path`, `model` (empty: as configured) and `seed` (negative: as configured) win over
    the configuration; `profile` fills in layout and GPUs where it leaves them open. `workflow`
    names the run.
    """
    from tasks.local_cache import forget_lost

    with failures_as_sentences():
        note_opened(None)
        if lost := forget_lost():
            say(f"plan: results that were deleted from the disk are made again ({lost})")
        merged = with_commit(fit(merge(config, source, path, model, seed), profile.value))
        digests = check(merged)
        context = context_of(merged.model)
        run = open_run(merged, digests, workflow)
        note_opened(run)
    say(f"run {run.run_id}: config {digest(merged)[:12]}, data {digests[0][:12]}")
    return Plan(
        run,
        merged.data,
        digests[0],
        merged.model,
        merged.model.path,
        digests[1],
        context,
        merged.sft,
        merged.rl,
        adapters(merged.model),
        merged.evaluate,
        merged.promote,
        merged.seed,
        digest(merged),
        profile.value,
        merged.promote.approval == "required",
    )


def merge(config: RLHFConfig, source: str, path: str, model: str, seed: int) -> RLHFConfig:
    """Return the configuration with the command line's scalars put in; ConfigError if wrong."""
    from pydantic import ValidationError

    from engine.config import explain
    from engine.errors import ConfigError

    values = config.model_dump()
    values["data"] |= {k: v for k, v in {"source": source, "path": path}.items() if v}
    if model:
        values["model"]["path"] = model
    if seed >= 0:
        values["seed"] = seed
    try:
        return RLHFConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def adapters(model: ModelConfig) -> LoRAConfig:
    """RL's adapters: new ones, of the warm start's shape, on the merged model that it leaves."""
    from engine.models import resolve_lora

    lora = resolve_lora(model.path, model.lora) if model.lora.from_folder else model.lora
    return lora.model_copy(update={"from_folder": False})


def check_settings(config: RLHFConfig) -> None:
    """Raise ConfigError for settings that can't work, whatever the data and the model are."""
    from engine.rollout.protocol import check_engine
    from engine.trainers.rl_checks import check_config
    from engine.trainers.rl_setup import check_lora

    check_config(config.rl, config.data.max_response_length)
    check_lora(config.model.lora, config.rl)
    check_engine(config.evaluate.engine)


def check(config: RLHFConfig) -> tuple[str, str]:
    """Check names, files and the tracking server; return the digests of data and start model."""
    from engine.data.sources import source_digest
    from engine.models import require_model_folder
    from engine.tracking import Tracker

    check_settings(config)
    data = source_digest(config.data, config.seed)
    model = ""
    if config.model.path:
        require_model_folder(config.model.path)
        model = model_digest(config.model.path)
    Tracker(experiment=config.tracking.experiment).check()
    return data, model


def context_of(model: ModelConfig) -> int:
    """Longest prompt plus completion that the model can read, in tokens."""
    from engine.models import vocabulary_and_context

    return vocabulary_and_context(model.path)[1] if model.path else model.max_position_embeddings


def open_run(config: RLHFConfig, digests: tuple[str, str], workflow: str = "rlhf") -> RunContext:
    """Start the parent run in MLflow."""
    from engine.storage.code_version import code_version
    from engine.tracking import Tracker

    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID", run_id)
    tracker = Tracker(experiment=config.tracking.experiment)
    parent = tracker.start_pipeline(
        f"{workflow}-{run_id}",
        config.model_dump(mode="json"),
        {
            "hybridflyte.run": run_id,
            **execution_tags(execution),
            "code_version": code_version(),
            "config_digest": digest(config),
            "data_digest": digests[0],
        },
        key=execution,
    )
    return RunContext(
        run_id=run_id,
        mlflow_run=parent,
        experiment=config.tracking.experiment,
        started_at=time.time(),
        mlflow_url=tracker.run_url(parent),
    )
