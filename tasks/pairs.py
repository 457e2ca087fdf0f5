"""Task `pairs`: preferences, from rollouts of a policy that a reward ranks, or from files.

Artifact `pairs`: `train.parquet` and `validation.parquet` in the data contract of
`engine.data.contract`, which `python -m engine.main_preference` reads too, and `README.md` (the
card, also the task's Deck). Its parents are the dataset that prompts are from and, of rollouts, the
policy that wrote them.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flytekit import Deck
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, PairsConfig
from tasks.context import LARGE, RunContext, echo
from tasks.decks import DECK
from tasks.preprocess import log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES
from tasks.stage import Stage, stage, stage_cache
from tasks.variants import on_profiles

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase

    from engine.data.preference_examples import PreferenceExample

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
    from engine.controller.ray_session import ray_session
    from engine.evaluation.layout import uses_ranks
    from engine.preferences.from_rollouts import layout_of

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
    from engine.preferences.from_rollouts import rank_rollouts

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

    from engine.data.evaluation_sets import evaluation_files
    from engine.preferences.from_files import read_preference_tables
    from engine.storage.manifest import Parent

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
    from engine.data.card import CARD, SplitCard, card_html, card_markdown
    from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
    from engine.data.templates import encode_prompts
    from engine.data.tokenizer import load_tokenizer
    from engine.storage.hashing import hash_file

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
    from engine.data.preference_examples import read_preferences

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
