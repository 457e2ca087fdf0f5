"""Tasks `reference_log_probs` and `preference_training`: a policy learns from pairs or labels.

Artifact `reference`: the start model's log-probs of the responses, by its weights and the rows; it
is keyed by these alone, so that runs with other losses, β or learning rates share it. Artifact
`preference`: a Hugging Face model folder with its tokenizer, and `metrics.parquet`, a row a step.
On a profile with several GPUs both are Ray jobs, whose ranks share the model
(`preference.parallel`).
"""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit.types.directory import FlyteDirectory

from engine.config import LoRAConfig, PreferenceTrainingConfig
from tasks.context import LARGE, RunContext, echo
from tasks.decks import DECK
from tasks.loggers import open_loggers
from tasks.offline_training import train_on_rows
from tasks.pairs import SPLITS, read_examples
from tasks.preprocess import log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES, ray_cluster_of_gpus
from tasks.stage import Stage, stage, stage_cache
from tasks.variants import on_profiles

if TYPE_CHECKING:
    from engine.data.preference_examples import PreferenceExample
    from engine.trainers.preference import PreferenceTrainer

FACTS = "reference.json"


@on_profiles(
    task_config=ray_cluster_of_gpus,
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=6),
    needs=("hub", "loggers"),
    **DECK,
)
def reference_log_probs(
    run: RunContext,
    pairs: FlyteDirectory,
    policy: FlyteDirectory,
    config: PreferenceTrainingConfig,
    lora: LoRAConfig,
    dtype: str,
    too_long: str,
    seed: int,
) -> FlyteDirectory:
    """Compute the reference's log-probs, unless the loss has none or they are computed live.

    config: as `reference_settings` gives it. dtype: of the weights; empty: the folder's.
    """
    from engine.controller.ray_session import ray_session, require_shared
    from engine.trainers.offline_ranks import is_on_ray
    from engine.workers.preference import uses_reference

    settings = model_settings(config, lora, dtype, seed)
    needed = uses_reference(config) and config.reference == "precomputed"
    on_ray = needed and is_on_ray(config)
    ray = ray_session("ray" if on_ray else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("reference", run, settings) as this, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        if on_ray:
            require_shared([str(this.folder), str(model)])
        (this.folder / FACTS).write_text(json.dumps({"precomputed": needed}) + "\n")
        if needed:
            examples = encoded(rows, model, config.loss, too_long)
            with open_trainer(this, model, config, lora, dtype, seed) as trainer:
                trainer.precompute_reference([split for split in examples if split], this.folder)
        else:
            echo(f"reference: none is precomputed ({config.loss}, {config.reference})")
        return this.publish({})


@on_profiles(
    task_config=ray_cluster_of_gpus,
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=12),
    needs=("hub", "loggers"),
    **DECK,
)
def preference_training(
    run: RunContext,
    pairs: FlyteDirectory,
    policy: FlyteDirectory,
    reference: FlyteDirectory,
    config: PreferenceTrainingConfig,
    lora: LoRAConfig,
    dtype: str,
    too_long: str,
    seed: int,
) -> FlyteDirectory:
    """Train the policy, which is the reference as well, on the artifact's preferences."""
    from engine.controller.ray_session import ray_session, require_shared
    from engine.evaluation.policy_steps import FILE
    from engine.trainers.offline_ranks import is_on_ray

    settings = model_settings(config, lora, dtype, seed)
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("preference", run, settings) as this, open_loggers(run, this) as logs, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        known = this.load_parent("reference", reference)
        log_splits(this, rows, SPLITS, this.parent("pairs").uri)
        if is_on_ray(config):
            require_shared([str(this.folder), str(model)])
        train, validation = encoded(rows, model, config.loss, too_long)
        # A copy: what is looked for there and missing is written there.
        scratch = this.folder / "scratch"
        shutil.copytree(known, scratch)
        settled = config.model_copy(update={"reference_cache": str(scratch)})

        def make() -> PreferenceTrainer:
            return open_trainer(this, model, settled, lora, dtype, seed)

        trained = train_on_rows(this, logs, settled, make, train, validation, model)
        shutil.rmtree(scratch, ignore_errors=True)
        trained.write_history(this.folder / FILE)
        this.tracked.log_folder(this.folder, "checkpoint")
        published = this.publish(trained.metrics, step=trained.steps)
        this.delete_local_checkpoints()
        return published


def reference_settings(config: PreferenceTrainingConfig) -> PreferenceTrainingConfig:
    """What the reference's log-probs depend on: how they are computed, and on which kind of rows.

    A loss without a reference keeps its name, since there is nothing to compute for it.
    """
    from engine.workers.preference import uses_reference

    loss = config.loss if config.loss == "kto" or not uses_reference(config) else "sigmoid"
    kept = {"reference", "parallel", "placement", "pools", "threads", "packing"}
    kept |= {"max_tokens_per_micro_batch", "start_timeout_s", "step_timeout_s"}
    values = config.model_dump(include=kept)
    return PreferenceTrainingConfig.model_validate({"loss": loss} | values)


def model_settings(
    config: PreferenceTrainingConfig, lora: LoRAConfig, dtype: str, seed: int
) -> dict[str, object]:
    """What both stages record."""
    settings: dict[str, object] = {"preference": config.model_dump(mode="json"), "seed": seed}
    if lora.rank or lora.from_folder:
        settings["lora"] = lora.model_dump(mode="json")
    return settings | ({"dtype": dtype} if dtype else {})


def open_trainer(
    this: Stage,
    model: Path,
    config: PreferenceTrainingConfig,
    lora: LoRAConfig,
    dtype: str,
    seed: int,
) -> PreferenceTrainer:
    """A trainer that starts from the policy's folder."""
    from engine.data.tokenizer import load_tokenizer
    from engine.models import saved_dtype
    from engine.runtime.save_policy import StartModel
    from engine.trainers.preference import PreferenceTrainer

    start = StartModel(str(model), dtype or saved_dtype(model), lora, seed)
    pad = int(load_tokenizer(model).pad_token_id or 0)
    digest = this.parent("policy").digest
    return PreferenceTrainer(start, pad, config, seed=seed, start=digest)


def encoded(
    rows: Path, model: Path, loss: str, too_long: str
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    """Both splits of the artifact `pairs` as tokens of the policy, within its context."""
    from engine.data.tokenizer import load_tokenizer
    from engine.models import vocabulary_and_context

    context = vocabulary_and_context(model)[1]
    return read_examples(rows, load_tokenizer(model), loss, context, too_long)
