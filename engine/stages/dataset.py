"""Stage `preprocess`: a source becomes validated Parquet splits and a tokenizer.

Artifact `dataset`: `sft_train`, `sft_validation`, `train`, `validation`, `test` (`.parquet`, in the
data contract of `engine.data.contract`), `test_<name>.parquet` of each evaluation set, `tokenizer/`
(Hugging Face), `dataset.json` (lengths in tokens), `README.md` (the card).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from engine.config import DataConfig
from engine.console import say
from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint
from engine.data.decontamination import without_held_out
from engine.data.prepare import CARD, SplitCard, card_html, card_markdown
from engine.data.rows import row_numbers
from engine.data.sources import Splits, load_splits, splits_are_disjoint
from engine.data.templates import (
    encode_short_prompts,
    rows_spelling_control_tokens,
    with_template_variables,
)
from engine.data.tokenizer import load_tokenizer, train_tokenizer
from engine.errors import DataError
from engine.models import check_context, check_vocabulary, vocabulary_and_context
from engine.stages.settings import DatasetSettings, RunContext
from engine.stages.stage import Artifact, Stage, host, stage
from engine.storage.artifacts import Parent
from engine.storage.digests import hash_file

SPLITS = ("sft_train", "sft_validation", "train", "validation", "test")


def preprocess(run: RunContext, settings: DatasetSettings) -> Artifact:
    """Read, check and write the data; train a tokenizer where `model_path` is empty."""
    data, seed = settings.data, settings.seed
    recorded = settings.model_dump(mode="json", include={"data", "model_path", "seed"})
    with stage("dataset", run, recorded) as this:
        splits = load_splits(data, seed)
        if not splits_are_disjoint(data):
            splits = without_held_out(splits, data)
        for note in splits.notes:
            say(f"dataset: {note}")
        check_contract(splits)
        tokenizer = choose_tokenizer(splits, data, settings.model_path)
        facts = write_splits(this, splits, tokenizer, data, settings.context)
        say(
            f"dataset: {data.source}, "
            + ", ".join(f"{name} {facts[f'rows_{name}']:.0f}" for name in splits.tables())
            + f" rows; longest prompt {facts['max_prompt_length']:.0f} tokens"
        )
        return this.publish(facts)


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
    splits, spelled = apply_control_tokens(splits, tokenizer, data.control_tokens)
    splits, tokens = fit_to_context(splits, tokenizer, data, context)
    tables, digest, uri = splits.tables(), splits.source_digest, splits.source_uri
    longest = max(max(tokens[name]) for name in SPLITS)
    for name, frame in tables.items():
        write_split(frame, this.folder / f"{name}.parquet")
    write_card(this.folder, data.source, digest, tables, tokens, splits.notes)
    tokenizer.save_pretrained(this.folder / "tokenizer")
    (this.folder / "dataset.json").write_text(json.dumps({"max_prompt_length": longest}, indent=2))
    this.parents.append(Parent(name="source", kind="source", digest=digest, uri=uri))
    this.log_splits(this.folder, list(tables), uri)
    rows = {f"rows_{name}": float(len(frame)) for name, frame in tables.items()}
    return rows | {"control_token_rows": float(spelled), "max_prompt_length": float(longest)}


def write_card(
    folder: Path,
    source: str,
    made_of: str,
    tables: Mapping[str, pd.DataFrame],
    tokens: Mapping[str, Sequence[int]],
    notes: Sequence[str],
) -> None:
    """Write and show the card of a folder with `<name>.parquet` of each table.

    source: kind or address of what the rows are from, not its place, so that equal data make an
    equal artifact; `made_of` is its digest.
    tokens: lengths of each table's prompts. notes: what was left out.
    """
    cards = []
    for name, frame in tables.items():
        card = SplitCard(name, "tokens", digest=hash_file(folder / f"{name}.parquet"))
        for row, length in zip(frame.to_dict("records"), tokens[name], strict=True):
            card.add({str(column): cell for column, cell in row.items()}, length)
        cards.append(card)
    markdown = card_markdown(source, made_of, cards, notes)
    (folder / CARD).write_text(markdown, encoding="utf-8")
    host().show("Data", card_html(markdown))


def write_split(frame: pd.DataFrame, path: Path) -> None:
    """Write a split as Parquet; DataError where a column is not of one type in all rows."""
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
    for name, frame in splits.tables().items():
        check(frame, SFT_PAIRS if name.startswith("sft_") else RL_PROMPTS, name)
    check_disjoint(splits.frames())


def choose_tokenizer(splits: Splits, data: DataConfig, model_path: str) -> PreTrainedTokenizerBase:
    """Return the start model's tokenizer, checked against its vocabulary, or one trained here.

    Its chat template has the variables of `data.apply_chat_template_kwargs`.
    """
    if model_path:
        tokenizer = load_tokenizer(model_path)
        check_vocabulary(vocabulary_and_context(model_path)[0], tokenizer, model_path)
    else:
        rows = splits.sft_train
        prompts = [message["content"] for prompt in rows["prompt"] for message in prompt]
        tokenizer = train_tokenizer([*prompts, *rows["response"]], data.vocab_size)
    return with_template_variables(tokenizer, data.apply_chat_template_kwargs)


def apply_control_tokens(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, policy: str
) -> tuple[Splits, int]:
    """Keep, leave out or refuse rows that spell control tokens (`data.control_tokens`).

    Returns the splits and how many such rows there were. Raises DataError with policy "fail", and
    when a split loses all its rows.
    """
    total, tables = 0, dict[str, Any]()
    for name, frame in splits.tables().items():
        rows = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        spelling = rows_spelling_control_tokens(rows, tokenizer, policy, name)
        total += len(spelling)
        if policy == "drop" and len(spelling) == len(frame):
            raise DataError(
                f"data.control_tokens=drop leaves no row of {name}: all {len(frame)} spell control "
                "tokens of the model; correct them, or set it to escape"
            )
        if spelling:
            done = "left out" if policy == "drop" else "kept as plain text"
            say(f"dataset: {name}: {len(spelling)} rows spell control tokens of the model; {done}")
        if spelling and policy == "drop":
            frame = frame.reset_index(drop=True).drop(index=spelling).reset_index(drop=True)
        tables[name] = frame
    return splits.with_tables(tables), total


def fit_to_context(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, data: DataConfig, context: int
) -> tuple[Splits, dict[str, list[int]]]:
    """Drop rows whose prompt is over `data.max_prompt_length` (if set), then check the context.

    Returns the splits and the lengths of their prompts in tokens. Raises ModelError when prompt and
    response don't fit the context, DataError when a prompt alone doesn't, when the chat template
    refuses one, and when a split loses all its rows.
    """
    limit = data.max_prompt_length or context
    tables, tokens = {}, dict[str, list[int]]()
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
            say(f"dataset: {note}")
        tables[name] = frame[[ids is not None for ids in encoded]].reset_index(drop=True)
        tokens[name] = [len(ids) for ids in encoded if ids is not None]
    check_context(max(map(max, tokens.values())), data.max_response_length, context)
    return splits.with_tables(tables), tokens
