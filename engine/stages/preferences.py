"""Stages that make preferences and learn from them: a policy, or a reward model."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from engine.config import OfflineConfig, PreferenceTrainingConfig
from engine.console import Progress, say
from engine.controller.launch import require_shared
from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
from engine.data.preference_rows import Kind
from engine.data.sources import evaluation_files
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import AnyExample, read_preferences, read_reward_pairs
from engine.errors import DataError
from engine.evaluation.decode import uses_ranks
from engine.models import saved_dtype, vocabulary_and_context
from engine.preferences import layout_of, rank_rollouts, read_preference_tables
from engine.runtime.policy_runtime import StartModel, open_tokenizer
from engine.stages.dataset import write_card
from engine.stages.evaluation import ranking
from engine.stages.profiles import Profile
from engine.stages.settings import (
    PairsSettings,
    PreferenceSettings,
    RewardModelSettings,
    RunContext,
)
from engine.stages.stage import Artifact, Stage, stage
from engine.stages.training import SCRATCH, train_on_rows, weights_recorded
from engine.storage.artifacts import Parent, read_manifest
from engine.trainers.offline import OfflineTrainer, is_on_ray
from engine.trainers.preference_learning import (
    LikelihoodRewardTrainer,
    PreferenceTrainer,
    RewardModelTrainer,
)
from engine.workers.supervised import uses_reference

SPLITS = ("train", "validation")
Example = TypeVar("Example", bound=AnyExample)


def pairs(
    run: RunContext, settings: PairsSettings, dataset: Artifact, policy: Artifact
) -> Artifact:
    """Make preferences, from rollouts of the policy that a reward ranks, or from files.

    Artifact `pairs`: `train.parquet` and `validation.parquet` in the data contract of
    `engine.data.contract`, as `python -m engine.main_preference` reads them, and `README.md`.
    """
    config, metrics = settings.config, dict[str, float]()
    recorded: dict[str, Any] = {"pairs": config.model_dump(mode="json")}
    recorded |= settings.model_dump(include={"kind", "seed"})
    if not config.path:
        recorded["max_response_length"] = settings.data.max_response_length
    on_ray = not config.path and uses_ranks(layout_of(config))
    with stage("pairs", run, recorded, on_ray=on_ray) as this:
        folder = this.load_parent("dataset", dataset)
        if config.path:
            origin, made_of = config.path, settings.source_digest
            parent = Parent(name="preferences", kind="source", digest=made_of, uri=origin)
            this.parents.append(parent)
            tests = map(pd.read_parquet, evaluation_files(folder).values())
            held_out = [prompt for test in tests for prompt in test["prompt"]]
            kind, seed = settings.kind, settings.seed
            rows = read_preference_tables(config, settings.data, kind, held_out, seed)
            tables = {"train": rows.train, "validation": rows.validation}
            source, notes = config.path, list(rows.notes)
        else:
            model = this.load_parent("policy", policy)
            tables, metrics = sample_tables(folder, model, settings)
            origin, made_of = this.parent("policy").uri, this.parent("policy").digest
            source = f"rollouts of the policy, ranked by {config.scorer.name}"
            notes = [
                f"{metrics['prompts_without_pair']:.0f} of {metrics['prompts']:.0f} prompts, none "
                f"of whose {config.n} completions is better than another",
                f"{metrics['completions_unusable']:.0f} completions, which were cut off, are empty "
                "or could not be scored",
            ]
        tokens = write_tables(this.folder, load_tokenizer(folder / "tokenizer"), tables)
        write_card(this.folder, source, made_of, tables, tokens, notes)
        this.log_splits(this.folder, SPLITS, origin)
        counts = {f"rows_{name}": float(len(frame)) for name, frame in tables.items()}
        say(
            f"pairs: {len(tables['train'])} to learn from, {len(tables['validation'])} held out"
            + "".join(f"; left out: {note}" for note in notes)
        )
        return this.publish(counts | metrics)


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
    with Progress(completions, "pairs", "completion") as bar:
        for name, frame in frames.items():

            def report(done: int, start: int = before) -> None:
                bar.update(start + done - bar.count)

            tables[name], measured = rank_rollouts(
                policy,
                frame,
                config,
                settings.kind,
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


def write_tables(
    folder: Path, tokenizer: PreTrainedTokenizerBase, tables: dict[str, pd.DataFrame]
) -> dict[str, list[int]]:
    """Check and write the tables; return the lengths of their prompts in tokens."""
    columns = tables["train"].columns  # of an empty table, too
    tokens: dict[str, list[int]] = {}
    for name, frame in tables.items():
        if not frame.empty:
            check(frame, KTO_ROWS if "label" in frame else PREFERENCE_PAIRS, f"pairs, {name}")
        frame.reindex(columns=columns).to_parquet(folder / f"{name}.parquet", index=False)
        prompts = encode_prompts(tokenizer, frame["prompt"], name) if len(frame) else []
        tokens[name] = [len(ids) for ids in prompts]
    return tokens


def read_examples(
    this: Stage, read: Callable[..., list[Example]], too_long: str
) -> tuple[list[Example], list[Example]]:
    """Encode both splits of `pairs`, the second may be empty, as the policy's tokens."""
    pairs, model = this.inputs["pairs"], this.inputs["policy"]
    tokenizer, context = open_tokenizer(model), vocabulary_and_context(model)[1]
    files = (pairs / f"{split}.parquet" for split in SPLITS)
    train, validation = (
        read(str(file), tokenizer, max_length=context, too_long=too_long)
        if pq.read_metadata(file).num_rows
        else []
        for file in files
    )
    return train, validation


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
    with stage("reference", run, recorded_settings(settings), on_ray=on_ray) as this:
        this.load_parent("pairs", pairs)
        model = this.load_parent("policy", policy)
        if on_ray:
            require_shared([str(this.folder), str(model)])
        (this.folder / "reference.json").write_text(json.dumps({"precomputed": needed}) + "\n")
        if needed:
            read = partial(read_preferences, kind=kind_of(config))
            examples = read_examples(this, read, settings.too_long)
            with open_trainer(PreferenceTrainer, this, config, settings) as trainer:
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
    config, recorded = settings.config, recorded_settings(settings)
    with stage("preference", run, recorded, on_ray=is_on_ray(config)) as this:
        this.load_parent("pairs", pairs)
        this.load_parent("policy", policy)
        # A copy, as reading a log-prob that is missing writes it there.
        scratch = this.folder / SCRATCH
        shutil.copytree(this.load_parent("reference", reference), scratch)
        config = config.model_copy(update={"reference_cache": str(scratch)})
        read = partial(read_preferences, kind=kind_of(config))
        return train_on_pairs(this, run, PreferenceTrainer, read, config, settings)


def reward_model_training(
    run: RunContext, settings: RewardModelSettings, pairs: Artifact, policy: Artifact
) -> Artifact:
    """Train a reward model from pairs by Bradley-Terry's loss, from the policy's backbone.

    Artifact `reward_model`: a sequence-classification folder with one label and its tokenizer,
    which the reward `reward_model` loads, or with `head=likelihood` a language model's, for the
    reward `likelihood`; PPO's critic starts from either. And `metrics.parquet`, a row a step. Its
    metrics are accuracy on held-out pairs with its interval, and calibration error.
    """
    config = settings.config
    recorded: dict[str, object] = {"reward_model": config.model_dump(mode="json")}
    recorded |= settings.model_dump(include={"seed", "dtype"} if settings.dtype else {"seed"})
    with stage("reward_model", run, recorded, on_ray=is_on_ray(config)) as this:
        this.load_parent("pairs", pairs)
        this.load_parent("policy", policy)
        kind: tuple[Any, Any] = (RewardModelTrainer, read_reward_pairs)
        if config.head == "likelihood":
            kind = (LikelihoodRewardTrainer, read_preferences)
        trained = train_on_pairs(this, run, *kind, config, settings)
        say(f"reward_model: {ranking(read_manifest(trained.local()).metrics)}")
        return trained


def train_on_pairs(
    this: Stage,
    run: RunContext,
    kind: type[OfflineTrainer[Example, Any]],
    read: Callable[..., list[Example]],
    config: OfflineConfig,
    settings: PreferenceSettings | RewardModelSettings,
) -> Artifact:
    """Train the stage's parent `policy` on its parent `pairs`, and publish what comes of it."""
    model = this.inputs["policy"]
    this.log_splits(this.inputs["pairs"], SPLITS, this.parent("pairs").uri)
    if is_on_ray(config):
        require_shared([str(this.folder), str(model)])
    train, validation = read_examples(this, read, settings.too_long)
    make = partial(open_trainer, kind, this, config, settings)
    return train_on_rows(this, run, config, make, train, validation, model)


Trainer = TypeVar("Trainer", bound=OfflineTrainer[Any, Any])


def open_trainer(
    kind: type[Trainer],
    this: Stage,
    config: OfflineConfig,
    settings: PreferenceSettings | RewardModelSettings,
) -> Trainer:
    """Open a trainer that starts from the policy's folder."""
    lora, model = getattr(settings, "lora", None), this.inputs["policy"]  # none in a reward model
    start = StartModel(str(model), settings.dtype or saved_dtype(model), lora, settings.seed)
    pad = int(load_tokenizer(model).pad_token_id or 0)
    return kind(start, pad, config, seed=settings.seed, start=this.parent("policy").digest)


def learn_in_rounds(
    profile: Profile,
    run: RunContext,
    pairs_settings: PairsSettings,
    settings: PreferenceSettings,
    dataset: Artifact,
    start: Artifact,
    *,
    front: Any,
) -> Artifact:
    """Make preferences, their reference and an update by a front's tasks, `pairs.rounds` times.

    One round is the offline pipeline; in several the policy of the round before makes the pairs and
    is the reference. Artifacts are as the front's tasks take and give them.
    """
    # A round's pairs don't depend on how many others there are.
    config = pairs_settings.config.model_copy(update={"rounds": 1})
    reference = settings.model_copy(update={"config": reference_settings(settings.config)})
    policy = start
    for number in range(pairs_settings.config.rounds):
        seed = {"seed": settings.seed + number}
        sampled = pairs_settings.model_copy(update={"config": config, **seed})
        made = front.pairs(profile, run=run, settings=sampled, dataset=dataset, policy=policy)
        inputs = {"run": run, "pairs": made, "policy": policy}
        log_probs = front.reference_log_probs(profile, settings=reference, **inputs)
        inputs |= {"settings": settings.model_copy(update=seed), "reference": log_probs}
        policy = front.preference_training(profile, **inputs)
    return policy


def reference_settings(config: PreferenceTrainingConfig) -> PreferenceTrainingConfig:
    """Return what the reference's log-probs depend on: how they are computed, on which rows."""
    loss = config.loss if config.loss == "kto" or not uses_reference(config) else "sigmoid"
    fields = {"reference", "parallel", "placement", "pools", "threads", "packing"}
    fields |= {"max_tokens_per_micro_batch", "start_timeout_s", "step_timeout_s"}
    values = config.model_dump(include=fields)
    return PreferenceTrainingConfig.model_validate({"loss": loss} | values)


def recorded_settings(settings: PreferenceSettings) -> dict[str, object]:
    """Return what both stages record in their manifests."""
    preference = settings.config.model_dump(mode="json")
    return {"preference": preference, "seed": settings.seed} | weights_recorded(settings)


def kind_of(config: PreferenceTrainingConfig) -> Kind:
    """Return the kind of rows that the loss learns from."""
    return "labels" if config.loss == "kto" else "pairs"
