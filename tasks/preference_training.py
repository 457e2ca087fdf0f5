"""Tasks that make preferences and learn from them, once or in rounds.

Reward models are in `learned_reward`.
"""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flytekit import Deck, dynamic
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, LoRAConfig, PairsConfig, PreferenceTrainingConfig
from tasks.context import IMAGE, LARGE, SMALL, RunContext, echo
from tasks.flytekit_setup import of_registration
from tasks.policy_training import open_loggers, train_on_rows
from tasks.preprocess import log_splits
from tasks.profiles import Profile
from tasks.stage import DECK, Stage, stage, stage_cache
from tasks.variants import LOCAL_OBJECT_STORE_BYTES, on_profiles, ray_cluster_of_gpus

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase

    from engine.data.training_examples import PreferenceExample
    from engine.trainers.preference_learning import PreferenceTrainer


# Task `pairs`: preferences, from rollouts of a policy that a reward ranks, or from files.
#
# Artifact `pairs`: `train.parquet` and `validation.parquet` in the data contract of
# `engine.data.contract`, which `python -m engine.main_preference` reads too, and `README.md` (the
# card, also the task's Deck). Its parents are the dataset that prompts are from and, of rollouts,
# the
# policy that wrote them.

SPLITS = ("train", "validation")


@on_profiles(
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=6),
    **DECK,
)
def pairs(
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    data: DataConfig,
    config: PairsConfig,
    source_digest: str,
    kind: str,
    seed: int,
) -> FlyteDirectory:
    """Make the preferences that are learned from.

    source_digest: what `config.path` holds now. kind: `pairs`, or `labels` for KTO.
    """
    from engine.controller.launch import ray_session
    from engine.evaluation.decode import uses_ranks
    from engine.preferences import layout_of

    ranks = not config.path and uses_ranks(layout_of(config))
    ray = ray_session("ray" if ranks else "local", LOCAL_OBJECT_STORE_BYTES)
    settings = {"pairs": config.model_dump(mode="json"), "kind": kind, "seed": seed}
    if not config.path:
        settings["max_response_length"] = data.max_response_length
    with stage("pairs", run, settings) as this, ray:
        folder = this.load_parent("dataset", dataset)
        if config.path:
            tables, notes = read_files(this, folder, data, config, source_digest, kind, seed)
            metrics: dict[str, float] = {}
        else:
            model = this.load_parent("policy", policy)
            tables, metrics = sample_tables(folder, model, data, config, kind, seed)
            notes = [
                f"{metrics['prompts_without_pair']:.0f} of {metrics['prompts']:.0f} prompts, none "
                f"of whose {config.n} completions is better than another",
                f"{metrics['completions_unusable']:.0f} completions, which were cut off, are empty "
                "or could not be scored",
            ]
        write_tables(this, folder, tables, source_digest, notes, config)
        rows = {f"rows_{name}": float(len(frame)) for name, frame in tables.items()}
        made = f"{rows['rows_train']:.0f} to learn from, {rows['rows_validation']:.0f} held out"
        echo(f"pairs: {made}" + "".join(f"; left out: {note}" for note in notes))
        return this.publish(rows | metrics)


def sample_tables(
    dataset: Path, policy: Path, data: DataConfig, config: PairsConfig, kind: str, seed: int
) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
    """The rows of both splits, and metrics of the rollouts that training pairs are made of."""
    import pandas as pd

    from engine.console import Progress, progress
    from engine.errors import DataError
    from engine.preferences import rank_rollouts

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

            found = rank_rollouts(
                policy,
                frame,
                config,
                kind_of_rows(kind),
                max_response_length=data.max_response_length,
                seed=seed,
                on_progress=report,
            )
            before += len(frame) * config.n
            tables[name] = found.rows
            metrics = metrics or found.metrics()
    if tables["train"].empty:
        raise DataError(
            f"no prompt of {len(frames['train'])} has two completions whose rewards differ by more "
            f"than pairs.margin={config.margin}: the policy gets {metrics['correct']:.1%} of them "
            "right; take more completions (pairs.n), another reward, or easier or harder problems"
        )
    return tables, metrics


def read_files(
    this: Stage,
    dataset: Path,
    data: DataConfig,
    config: PairsConfig,
    source_digest: str,
    kind: str,
    seed: int,
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """The preferences of files, without prompts of the dataset's test sets; what was left out."""
    import pandas as pd

    from engine.data.sources import evaluation_files
    from engine.preferences import read_preference_tables
    from engine.storage.artifacts import Parent

    tests = evaluation_files(dataset).values()
    held_out = [prompt for path in tests for prompt in pd.read_parquet(path)["prompt"]]
    found = read_preference_tables(config, data, kind_of_rows(kind), held_out, seed)
    this.parents.append(
        Parent(name="preferences", kind="source", digest=source_digest, uri=config.path)
    )
    return {"train": found.train, "validation": found.validation}, list(found.notes)


def kind_of_rows(kind: str) -> Literal["pairs", "labels"]:
    """The same as a type."""
    return "labels" if kind == "labels" else "pairs"


def write_tables(
    this: Stage,
    dataset: Path,
    tables: dict[str, pd.DataFrame],
    source_digest: str,
    notes: list[str],
    config: PairsConfig,
) -> None:
    """Check the tables, write them with their card, and record them as dataset inputs."""
    from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
    from engine.data.prepare import CARD, SplitCard, card_html, card_markdown
    from engine.data.templates import encode_prompts
    from engine.data.tokenizer import load_tokenizer
    from engine.storage.digests import hash_file

    tokenizer = load_tokenizer(dataset / "tokenizer")
    cards = []
    columns = tables["train"].columns  # of an empty table, too
    for name, frame in tables.items():
        file = this.folder / f"{name}.parquet"
        if not frame.empty:
            check(frame, KTO_ROWS if "label" in frame else PREFERENCE_PAIRS, f"pairs, {name}")
        frame.reindex(columns=columns).to_parquet(file, index=False)
        card = SplitCard(name, "tokens", digest=hash_file(file))
        prompts = encode_prompts(tokenizer, frame["prompt"], name) if len(frame) else []
        for row, ids in zip(frame.to_dict("records"), prompts, strict=True):
            card.add({str(column): cell for column, cell in row.items()}, len(ids))
        cards.append(card)
    source = config.path or f"rollouts of the policy, ranked by {config.scorer.name}"
    made_of = source_digest or this.parent("policy").digest
    markdown = card_markdown(source, made_of, cards, notes)
    (this.folder / CARD).write_text(markdown, encoding="utf-8")
    Deck("Data", card_html(markdown))
    log_splits(this, this.folder, SPLITS, config.path or this.parent("policy").uri)


def read_examples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, loss: str, max_length: int, too_long: str
) -> tuple[list[PreferenceExample], list[PreferenceExample]]:
    """Encode both splits of the artifact for preference learning; the second may be empty."""
    from engine.data.training_examples import read_preferences

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
    """Whether a split of the artifact has any."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(folder / f"{split}.parquet").num_rows) > 0


# Tasks `reference_log_probs` and `preference_training`: a policy learns from pairs or labels.
#
# Artifact `reference`: the start model's log-probs of the responses, by its weights and the rows;
# it
# is keyed by these alone, so that runs with other losses, β or learning rates share it. Artifact
# `preference`: a Hugging Face model folder with its tokenizer, and `metrics.parquet`, a row a
# step.
# On a profile with several GPUs both are Ray jobs, whose ranks share the model
# (`preference.parallel`).

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
    from engine.controller.launch import ray_session, require_shared
    from engine.trainers.offline import is_on_ray
    from engine.workers.supervised import uses_reference

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
    from engine.controller.launch import ray_session, require_shared
    from engine.evaluation.policy_steps import FILE
    from engine.trainers.offline import is_on_ray

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
    from engine.workers.supervised import uses_reference

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
    from engine.runtime.policy_runtime import StartModel
    from engine.trainers.preference_learning import PreferenceTrainer

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


# Task `learn_in_rounds`: preferences → reference → update, as often as `pairs.rounds` says.
#
# Of one round it is the offline pipeline. Of several it is iterative: each round's pairs are made
# by
# the policy that the round before left, which is its reference as well. How many there are is
# known
# only when a run starts, so the stages' nodes are written then.


@dynamic(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    retries=2,  # of its own pod, as in `tasks.variants`
    timeout=timedelta(days=18),  # holds for all stages of all rounds
    environment=of_registration(),
)
def learn_in_rounds(
    profile: Profile,
    run: RunContext,
    dataset: FlyteDirectory,
    start: FlyteDirectory,
    data: DataConfig,
    pairs_config: PairsConfig,
    pairs_digest: str,
    kind: str,
    reference: PreferenceTrainingConfig,
    config: PreferenceTrainingConfig,
    lora: LoRAConfig,
    dtype: str,
    seed: int,
) -> FlyteDirectory:
    """Preferences → reference → update, `pairs.rounds` times, each on the policy before it."""
    policy = start
    once = pairs_config.model_copy(update={"rounds": 1})  # a round's pairs don't depend on others
    for number in range(pairs_config.rounds):
        made = pairs(
            profile,
            run=run,
            dataset=dataset,
            policy=policy,
            data=data,
            config=once,
            source_digest=pairs_digest,
            kind=kind,
            seed=seed + number,
        )
        known = reference_log_probs(
            profile,
            run=run,
            pairs=made,
            policy=policy,
            config=reference,
            lora=lora,
            dtype=dtype,
            too_long=pairs_config.too_long,
            seed=seed,
        )
        policy = preference_training(
            profile,
            run=run,
            pairs=made,
            policy=policy,
            reference=known,
            config=config,
            lora=lora,
            dtype=dtype,
            too_long=pairs_config.too_long,
            seed=seed + number,
        )
    return policy
