"""Task `preprocess`: a source becomes validated Parquet splits and a tokenizer.

Artifact `dataset`: `sft_train`, `sft_validation`, `train`, `validation`, `test` (`.parquet`, in
the
data contract of `engine.data.contract`), `test_<name>.parquet` of each evaluation set,
`tokenizer/`
(Hugging Face), `dataset.json` (lengths in tokens), `README.md` (the card).

`python -m tasks.preprocess --help` writes files of a data set without the rest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from pydantic import ValidationError

from engine.config import DataConfig, explain
from engine.console import say
from engine.errors import ConfigError, EngineError
from tasks.context import IMAGE, SMALL, RunContext, echo
from tasks.flytekit_setup import with_secrets
from tasks.stage import DECK, RLPrompts, SFTPairs, Stage, stage, stage_cache

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedTokenizerBase

    from engine.data.sources import Splits


# `python -m tasks.preprocess`: a data set as verl-compatible Parquet files with a card.

_ABOUT = """\
Write a data set as Parquet files in verl's schema (train.parquet, test.parquet, …), with a card
(README.md: rows, lengths, digests, samples, what was left out).

  python -m tasks.preprocess --dataset gsm8k --source ../shared/data/gsm8k --local_dir data/gsm8k
  python -m tasks.preprocess --dataset problems.csv --local_dir data/mine \\
      columns.prompt=question columns.ground_truth=answer bad_rows=drop

Settings are those of a workflow's `data` section: columns, templates, system_prompt, data_source,
splits, bad_rows, max_prompt_length, decontaminate.overlap, decontaminate.against, …
A million rows fit into the memory that their keys take, 16 bytes a prompt.
Exit status: 0; 2 for wrong input.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; what is wrong with the input is one sentence."""
    parser = argparse.ArgumentParser(
        "python -m tasks.preprocess",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dataset", required=True, help="gsm8k, math, or a file, a folder, s3://… or hf://ID"
    )
    parser.add_argument(
        "--source", default="", help="where gsm8k or math lies; empty: the Hugging Face hub"
    )
    parser.add_argument("--local_dir", required=True, help="folder of the files to write")
    parser.add_argument(
        "--tokenizer", default="", help="model folder or hub id; lengths are then in tokens"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the data section")
    given = parser.parse_intermixed_args(arguments)
    try:
        _run(given)
    except EngineError as error:
        say(f"error: {error}")
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    from engine.data.math_problems import PRESETS, with_preset
    from engine.data.prepare import CARD, prepare
    from engine.data.tokenizer import load_tokenizer

    known = given.dataset in PRESETS
    if given.source and not known:
        raise ConfigError(
            f"--source goes with {' or '.join(PRESETS)}; give {given.dataset!r} alone"
        )
    config = data_config(given.settings, given.source if known else given.dataset)
    config = with_preset(config, given.dataset) if known else config
    tokenizer = load_tokenizer(given.tokenizer) if given.tokenizer else None
    folder = Path(given.local_dir)
    cards = prepare(config, folder, tokenizer)
    for card in cards:
        out = ", ".join(f"{count:,} {reason}" for reason, count in card.left_out.items())
        say(f"{card.name}: {len(card.lengths):,} rows" + (f"; left out: {out}" if out else ""))
    say(f"card: {folder / CARD}")


def data_config(settings: Sequence[str], path: str) -> DataConfig:
    """The `data` section of `key=value` arguments, for the source `files` at `path`.

    Raises ConfigError for an unknown or wrong setting.
    """
    values: dict[str, Any] = {"source": "files", "path": path}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} is not of the form key=value")
        *sections, name = key.removeprefix("data.").split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {section} is a value, not a section")
        try:
            place[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"{key}: the value {text!r} is not valid YAML; quote it") from None
    try:
        return DataConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


# Task `preprocess`: a source becomes validated Parquet splits and a tokenizer.
#
# Artifact `dataset`: `sft_train`, `sft_validation`, `train`, `validation`, `test` (`.parquet`, in
# the
# data contract of `engine.data.contract`), `test_<name>.parquet` of each evaluation set,
# `tokenizer/`
# (Hugging Face), `dataset.json` (lengths in tokens), `README.md` (the card).
#
# `python -m tasks.preprocess --help` writes files of a data set without the rest.

DATASET_TASK: dict[str, Any] = {
    "cache": stage_cache(),
    "requests": SMALL,
    "container_image": IMAGE,
    **with_secrets("hub"),
    "retries": 3,
    "interruptible": True,
    "timeout": timedelta(hours=2),
    **DECK,
}
SPLITS = ("sft_train", "sft_validation", "train", "validation", "test")


class Dataset(NamedTuple):
    """The artifact, which stages read, and its splits, which people look at in Flyte's console."""

    dataset: FlyteDirectory
    sft_train: SFTPairs
    sft_validation: SFTPairs
    train: RLPrompts
    validation: RLPrompts
    test: RLPrompts


@task(**DATASET_TASK)
def preprocess(
    run: RunContext,
    data: DataConfig,
    source_digest: str,
    model_path: str,
    model_digest: str,
    context: int,
    seed: int,
) -> Dataset:
    """Read, check and write the data; train a tokenizer where `model_path` is empty.

    `context` is the model's limit in tokens that the longest prompt and response must fit.
    """
    from engine.data.decontamination import without_held_out
    from engine.data.sources import load_splits, splits_are_disjoint

    config = {"data": data.model_dump(mode="json"), "model_path": model_path, "seed": seed}
    with stage("dataset", run, config) as this:
        splits = load_splits(data, seed)
        if not splits_are_disjoint(data):
            splits = without_held_out(splits, data)
        for note in splits.notes:
            echo(f"dataset: {note}")
        check_contract(splits)
        tokenizer = choose_tokenizer(splits, data, model_path)
        facts = write_splits(this, splits, tokenizer, data, context)
        echo(
            f"dataset: {data.source}, "
            + ", ".join(f"{name} {facts[f'rows_{name}']:.0f}" for name in splits.tables())
            + f" rows; longest prompt {facts['max_prompt_length']:.0f} tokens"
        )
        return publish_dataset(this, facts)


def publish_dataset(this: Stage, facts: Mapping[str, float]) -> Dataset:
    """Publish the stage's folder with its splits."""
    return Dataset(this.publish(facts), *(this.table(f"{name}.parquet") for name in SPLITS))


def write_splits(
    this: Stage,
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    context: int,
) -> dict[str, float]:
    """Write checked splits, their tokenizer and their card into the stage's folder.

    The card is the task's Deck as well. Returns metrics: rows per split, rows that spell control
    tokens, longest prompt in tokens. Raises as `apply_control_tokens`, `fit_to_context` and
    `write_split` do.
    """
    from engine.storage.artifacts import Parent

    splits, spelled = apply_control_tokens(splits, tokenizer, data.control_tokens)
    splits, tokens = fit_to_context(splits, tokenizer, data, context)
    lengths = {"max_prompt_length": max(max(tokens[name]) for name in SPLITS)}
    for name, frame in splits.tables().items():
        write_split(frame, this.folder / f"{name}.parquet")
    write_card(this.folder, data.source, splits, tokens)
    tokenizer.save_pretrained(this.folder / "tokenizer")
    (this.folder / "dataset.json").write_text(json.dumps(lengths, indent=2))
    this.parents.append(
        Parent(name="source", kind="source", digest=splits.source_digest, uri=splits.source_uri)
    )
    log_splits(this, this.folder, list(splits.tables()), splits.source_uri)
    rows = {f"rows_{name}": float(len(frame)) for name, frame in splits.tables().items()}
    rows["control_token_rows"] = float(spelled)
    return rows | {name: float(length) for name, length in lengths.items()}


def write_card(
    folder: Path, source: str, splits: Splits, tokens: Mapping[str, Sequence[int]]
) -> None:
    """Write the card of a dataset's folder; `tokens` are the lengths of each split's prompts.

    It names the source, not its place, so that equal data make an equal artifact.
    """
    from engine.data.prepare import CARD, SplitCard, card_html, card_markdown
    from engine.storage.digests import hash_file

    cards = []
    for name, frame in splits.tables().items():
        card = SplitCard(name, "tokens", digest=hash_file(folder / f"{name}.parquet"))
        for row, length in zip(frame.to_dict("records"), tokens[name], strict=True):
            card.add({str(column): cell for column, cell in row.items()}, length)
        cards.append(card)
    markdown = card_markdown(source, splits.source_digest, cards, splits.notes)
    (folder / CARD).write_text(markdown, encoding="utf-8")
    Deck("Data", card_html(markdown))


def write_split(frame: pd.DataFrame, path: Path) -> None:
    """Write a split as Parquet; DataError where a column is not of one type in all rows."""
    import pyarrow as pa

    from engine.errors import DataError

    try:
        frame.to_parquet(path, index=False)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        words = str(error).splitlines()[0]
        raise DataError(
            f"{path.stem} can't be written as Parquet ({words}); give each column, and each field "
            "of its dictionaries, values of one type in all rows"
        ) from error


def check_contract(splits: Splits) -> None:
    """Check every table's schema and that splits are disjoint; DataError names rows and columns."""
    from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint

    for name, frame in splits.tables().items():
        check(frame, SFT_PAIRS if name.startswith("sft_") else RL_PROMPTS, name)
    check_disjoint(splits.frames())


def choose_tokenizer(splits: Splits, data: DataConfig, model_path: str) -> PreTrainedTokenizerBase:
    """The start model's tokenizer, checked against its vocabulary, or one trained here.

    Its chat template has the variables of `data.apply_chat_template_kwargs`.
    """
    from engine.data.templates import with_template_variables
    from engine.data.tokenizer import load_tokenizer, train_tokenizer
    from engine.models import check_vocabulary, vocabulary_and_context

    if model_path:
        tokenizer = load_tokenizer(model_path)
        check_vocabulary(vocabulary_and_context(model_path)[0], tokenizer, model_path)
        return with_template_variables(tokenizer, data.apply_chat_template_kwargs)
    prompts = [message["content"] for prompt in splits.sft_train["prompt"] for message in prompt]
    tokenizer = train_tokenizer([*prompts, *splits.sft_train["response"]], data.vocab_size)
    return with_template_variables(tokenizer, data.apply_chat_template_kwargs)


def apply_control_tokens(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, policy: str
) -> tuple[Splits, int]:
    """Keep, leave out or refuse rows that spell control tokens (`data.control_tokens`).

    Returns the splits and how many such rows there were. Raises DataError with policy "fail", and
    when a split loses all its rows.
    """
    from engine.data.templates import rows_spelling_control_tokens
    from engine.errors import DataError

    total, kept = 0, dict[str, Any]()
    for name, frame in splits.tables().items():
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        found = rows_spelling_control_tokens(rows, tokenizer, policy, name)
        total += len(found)
        if policy == "drop" and len(found) == len(frame):
            raise DataError(
                f"data.control_tokens=drop leaves no row of {name}: all {len(frame)} spell control "
                "tokens of the model; correct them, or set it to escape"
            )
        if found:
            done = "left out" if policy == "drop" else "kept as plain text"
            echo(f"dataset: {name}: {len(found)} rows spell control tokens of the model; {done}")
        if found and policy == "drop":
            frame = frame.reset_index(drop=True).drop(index=found).reset_index(drop=True)
        kept[name] = frame
    return splits.with_tables(kept), total


def fit_to_context(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, data: DataConfig, context: int
) -> tuple[Splits, dict[str, list[int]]]:
    """Drop rows whose prompt is over `data.max_prompt_length` (if set), then check the context.

    Returns the splits and the lengths of their prompts in tokens. Raises ModelError when prompt and
    response don't fit the context, DataError when a prompt alone doesn't, when the chat template
    refuses one, and when a split loses all its rows.
    """
    from dataclasses import replace

    from engine.data.rows import row_numbers
    from engine.data.templates import encode_short_prompts
    from engine.errors import DataError
    from engine.models import check_context

    limit = data.max_prompt_length or context
    kept, tokens = {}, dict[str, list[int]]()
    for name, frame in splits.tables().items():
        encoded = encode_short_prompts(tokenizer, frame["prompt"], limit, name)
        long = [row for row, ids in enumerate(encoded) if ids is None]
        if long and not data.max_prompt_length:
            raise DataError(
                f"{name}: {len(long)} prompts are longer than the model's context of {context} "
                f"tokens ({row_numbers(long)}); set data.max_prompt_length to leave them out"
            )
        if len(long) == len(frame):
            raise DataError(
                f"data.max_prompt_length={limit} leaves no row of {name}: all its prompts are "
                "longer; raise it"
            )
        if long:
            note = f"{name}: {len(long)} prompts over {limit} tokens left out"
            splits = replace(splits, notes=(*splits.notes, note))
            echo(f"dataset: {note}")
        kept[name] = frame[[ids is not None for ids in encoded]].reset_index(drop=True)
        tokens[name] = [len(ids) for ids in encoded if ids is not None]
    check_context(max(map(max, tokens.values())), data.max_response_length, context)
    return splits.with_tables(kept), tokens


def log_splits(this: Stage, dataset: Path, names: Sequence[str], uri: str = "") -> None:
    """Record splits of a dataset's folder as MLflow dataset inputs, each by its file's digest.

    uri: where their rows come from; empty: the artifact that the folder is, a parent of the stage.
    """
    from engine.storage.digests import hash_file

    for name in names:
        file = dataset / f"{name}.parquet"
        source = uri or f"{this.parent('dataset').uri}/{file.name}"
        this.tracked.log_dataset(file, name, hash_file(file)[:32], context=name, uri=source)


if __name__ == "__main__":
    raise SystemExit(main())
