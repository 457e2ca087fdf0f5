"""Stages that make preferences and learn from them.

Reward models are in `reward_model`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from engine.config import PreferenceTrainingConfig
from engine.console import progress, say
from engine.controller.launch import ray_session, require_shared
from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
from engine.data.sources import evaluation_files
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import PreferenceExample, read_preferences
from engine.errors import DataError
from engine.evaluation.decode import uses_ranks
from engine.evaluation.policy_steps import FILE
from engine.models import saved_dtype, vocabulary_and_context
from engine.preferences import layout_of, rank_rollouts, read_preference_tables
from engine.runtime.policy_runtime import StartModel
from engine.stages.dataset import write_card
from engine.stages.settings import PairsSettings, PreferenceSettings, RunContext
from engine.stages.stage import LOCAL_OBJECT_STORE_BYTES, Artifact, Stage, stage
from engine.stages.training import open_loggers, publish_trained, train_on_rows
from engine.storage.artifacts import Parent
from engine.trainers.offline import is_on_ray
from engine.trainers.preference_learning import PreferenceTrainer
from engine.workers.supervised import uses_reference

if TYPE_CHECKING:
    from engine.console import Progress

SPLITS = ("train", "validation")
FACTS = "reference.json"


def pairs(
    run: RunContext, settings: PairsSettings, dataset: Artifact, policy: Artifact
) -> Artifact:
    """Make preferences, from rollouts of the policy that a reward ranks, or from files.

    Artifact `pairs`: `train.parquet` and `validation.parquet` in the data contract of
    `engine.data.contract`, which `python -m engine.main_preference` reads too, and `README.md` (the
    card). Its parents are the dataset that prompts are from and, of rollouts, the policy.
    """
    data, config = settings.data, settings.config
    ranks = not config.path and uses_ranks(layout_of(config))
    ray = ray_session("ray" if ranks else "local", LOCAL_OBJECT_STORE_BYTES)
    recorded = {
        "pairs": config.model_dump(mode="json"),
        "kind": settings.kind,
        "seed": settings.seed,
    }
    if not config.path:
        recorded["max_response_length"] = data.max_response_length
    with stage("pairs", run, recorded) as this, ray:
        folder = this.load_parent("dataset", dataset)
        metrics: dict[str, float] = {}
        if config.path:
            tables, notes = read_files(this, folder, settings)
        else:
            model = this.load_parent("policy", policy)
            tables, metrics = sample_tables(folder, model, settings)
            notes = [
                f"{metrics['prompts_without_pair']:.0f} of {metrics['prompts']:.0f} prompts, none "
                f"of whose {config.n} completions is better than another",
                f"{metrics['completions_unusable']:.0f} completions, which were cut off, are empty "
                "or could not be scored",
            ]
        write_tables(this, folder, tables, settings, notes)
        rows = {f"rows_{name}": float(len(frame)) for name, frame in tables.items()}
        summary = f"{rows['rows_train']:.0f} to learn from, {rows['rows_validation']:.0f} held out"
        say(f"pairs: {summary}" + "".join(f"; left out: {note}" for note in notes))
        return this.publish(rows | metrics)


def sample_tables(
    dataset: Path, policy: Path, settings: PairsSettings
) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
    """Return the rows of both splits, and metrics of the rollouts behind the training pairs."""
    config = settings.config
    frames = {name: pd.read_parquet(dataset / f"{name}.parquet") for name in SPLITS}
    if config.prompts:
        frames["train"] = frames["train"][: config.prompts].reset_index(drop=True)
    tables, metrics, before = {}, dict[str, float](), 0
    completions = config.n * sum(map(len, frames.values()))
    bar: Progress[None] = progress(completions, "pairs", "completion")
    with bar:
        for name, frame in frames.items():

            def report(done: int, start: int = before) -> None:
                bar.update(start + done - bar.count)

            tables[name], measured = rank_rollouts(
                policy,
                frame,
                config,
                kind_of_rows(settings.kind),
                max_response_length=settings.data.max_response_length,
                seed=settings.seed,
                on_progress=report,
            )
            before += len(frame) * config.n
            metrics = metrics or measured
    if tables["train"].empty:
        raise DataError(
            f"no prompt of {len(frames['train'])} has two completions whose rewards differ by more "
            f"than pairs.margin={config.margin}: the policy gets {metrics['correct']:.1%} of them "
            "right; take more completions (pairs.n), another reward, or easier or harder problems"
        )
    return tables, metrics


def read_files(
    this: Stage, dataset: Path, settings: PairsSettings
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Return the preferences of files, without test prompts, and what was left out."""
    config, tests = settings.config, evaluation_files(dataset).values()
    held_out = [prompt for path in tests for prompt in pd.read_parquet(path)["prompt"]]
    rows = read_preference_tables(
        config, settings.data, kind_of_rows(settings.kind), held_out, settings.seed
    )
    digest = settings.source_digest
    this.parents.append(Parent(name="preferences", kind="source", digest=digest, uri=config.path))
    return {"train": rows.train, "validation": rows.validation}, list(rows.notes)


def kind_of_rows(kind: str) -> Literal["pairs", "labels"]:
    """Return the same as a type."""
    return "labels" if kind == "labels" else "pairs"


def write_tables(
    this: Stage,
    dataset: Path,
    tables: dict[str, pd.DataFrame],
    settings: PairsSettings,
    notes: list[str],
) -> None:
    """Check the tables, write them with their card, and record them as dataset inputs."""
    config, tokenizer = settings.config, load_tokenizer(dataset / "tokenizer")
    columns = tables["train"].columns  # of an empty table, too
    tokens: dict[str, list[int]] = {}
    for name, frame in tables.items():
        if not frame.empty:
            check(frame, KTO_ROWS if "label" in frame else PREFERENCE_PAIRS, f"pairs, {name}")
        frame.reindex(columns=columns).to_parquet(this.folder / f"{name}.parquet", index=False)
        prompts = encode_prompts(tokenizer, frame["prompt"], name) if len(frame) else []
        tokens[name] = [len(ids) for ids in prompts]
    source = config.path or f"rollouts of the policy, ranked by {config.scorer.name}"
    made_of = settings.source_digest or this.parent("policy").digest
    write_card(this.folder, source, made_of, tables, tokens, notes)
    this.log_splits(this.folder, SPLITS, config.path or this.parent("policy").uri)


def read_examples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, loss: str, max_length: int, too_long: str
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    """Encode both splits of the artifact for preference learning; the second may be empty."""
    kind = kind_of_rows("labels" if loss == "kto" else "pairs")
    options: dict[str, Any] = {"max_length": max_length, "too_long": too_long}
    train, validation = (
        read_preferences(str(folder / f"{name}.parquet"), tokenizer, kind, **options)
        if has_rows(folder, name)
        else []
        for name in SPLITS
    )
    return train, validation


def has_rows(folder: Path, split: str) -> bool:
    """Return whether a split of the artifact has any rows."""
    return int(pq.read_metadata(folder / f"{split}.parquet").num_rows) > 0


def reference_log_probs(
    run: RunContext, settings: PreferenceSettings, pairs: Artifact, policy: Artifact
) -> Artifact:
    """Compute the reference's log-probs, unless the loss has none or they are computed live.

    Artifact `reference`: the start model's log-probs of the responses. It is keyed by the model's
    weights and the rows alone (`reference_settings`), so that runs with other losses, β or learning
    rates share it. On a profile with several GPUs ranks share the model (`preference.parallel`).
    """
    config = settings.config
    needed = uses_reference(config) and config.reference == "precomputed"
    on_ray = needed and is_on_ray(config)
    ray = ray_session("ray" if on_ray else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("reference", run, recorded_settings(settings)) as this, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        if on_ray:
            require_shared([str(this.folder), str(model)])
        (this.folder / FACTS).write_text(json.dumps({"precomputed": needed}) + "\n")
        if needed:
            examples = encoded(rows, model, config.loss, settings.too_long)
            with open_trainer(this, model, config, settings) as trainer:
                trainer.precompute_reference([split for split in examples if split], this.folder)
        else:
            say(f"reference: none is precomputed ({config.loss}, {config.reference})")
        return this.publish({})


def preference_training(
    run: RunContext,
    settings: PreferenceSettings,
    pairs: Artifact,
    policy: Artifact,
    reference: Artifact,
) -> Artifact:
    """Train the policy, which is the reference as well, on the artifact's preferences.

    Artifact `preference`: a Hugging Face model folder with its tokenizer, and `metrics.parquet`, a
    row a step.
    """
    config = settings.config
    ray = ray_session("ray" if is_on_ray(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    recorded = recorded_settings(settings)
    with stage("preference", run, recorded) as this, open_loggers(run, this) as logs, ray:
        rows = this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        log_probs = this.load_parent("reference", reference)
        this.log_splits(rows, SPLITS, this.parent("pairs").uri)
        if is_on_ray(config):
            require_shared([str(this.folder), str(model)])
        train, validation = encoded(rows, model, config.loss, settings.too_long)
        # A copy, as reading a log-prob that is missing writes it there.
        scratch = this.folder / "scratch"
        shutil.copytree(log_probs, scratch)
        config = config.model_copy(update={"reference_cache": str(scratch)})

        def make() -> PreferenceTrainer:
            return open_trainer(this, model, config, settings)

        trained = train_on_rows(this, logs, config, make, train, validation, model)
        shutil.rmtree(scratch, ignore_errors=True)
        trained.write_history(this.folder / FILE)
        return publish_trained(this, trained)


def reference_settings(config: PreferenceTrainingConfig) -> PreferenceTrainingConfig:
    """Return what the reference's log-probs depend on: how they are computed, and on which rows.

    A loss without a reference keeps its name, since there is nothing to compute for it.
    """
    loss = config.loss if config.loss == "kto" or not uses_reference(config) else "sigmoid"
    fields = {"reference", "parallel", "placement", "pools", "threads", "packing"}
    fields |= {"max_tokens_per_micro_batch", "start_timeout_s", "step_timeout_s"}
    values = config.model_dump(include=fields)
    return PreferenceTrainingConfig.model_validate({"loss": loss} | values)


def recorded_settings(settings: PreferenceSettings) -> dict[str, object]:
    """Return what both stages record in their manifests."""
    recorded: dict[str, object] = {
        "preference": settings.config.model_dump(mode="json"),
        "seed": settings.seed,
    }
    if settings.lora.rank or settings.lora.from_folder:
        recorded["lora"] = settings.lora.model_dump(mode="json")
    return recorded | ({"dtype": settings.dtype} if settings.dtype else {})


def open_trainer(
    this: Stage, model: Path, config: PreferenceTrainingConfig, settings: PreferenceSettings
) -> PreferenceTrainer:
    """Open a trainer that starts from the policy's folder."""
    seed, dtype = settings.seed, settings.dtype or saved_dtype(model)
    start = StartModel(str(model), dtype, settings.lora, seed)
    pad = int(load_tokenizer(model).pad_token_id or 0)
    digest = this.parent("policy").digest
    return PreferenceTrainer(start, pad, config, seed=seed, start=digest)


def encoded(
    rows: Path, model: Path, loss: str, too_long: str
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    """Encode both splits of the artifact `pairs` as tokens of the policy, within its context."""
    context = vocabulary_and_context(model)[1]
    return read_examples(rows, load_tokenizer(model), loss, context, too_long)
