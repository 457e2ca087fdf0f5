"""From files to verl-compatible Parquet with a card, in bounded memory: `prepare`.

Test rows come first, then validation, then training rows, each without the prompts that a split
before it has. Memory holds the runs of words of held-out rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.config import DataConfig
from engine.data import contract, sources
from engine.data.cells import as_text, is_missing
from engine.data.decontamination import HeldOut, SeenPrompts, question_text, without_held_out
from engine.data.messages import FIELDS
from engine.data.row_files import MappedRows, address_digest, split_addresses
from engine.data.rows import EXTRA, RULE, TRUTH, prompt_text
from engine.data.sources import Splits, prompt_key, rl_columns
from engine.data.templates import encode_short_prompts
from engine.errors import DataError
from engine.storage.digests import hash_file
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GROUP_ROWS = 4096  # of a Parquet file
BATCH_ROWS = 1024  # encoded at once
_KINDS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


class ParquetWriter(AbstractContextManager["ParquetWriter"]):
    """Writes RL rows in verl's schema, in bounded memory; the file is there after a clean exit.

    Rows wait in a temporary file until the type of each field of `extra_info` is known. A field
    with values of several types becomes text, lists and dictionaries become JSON.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spool = tempfile.TemporaryFile("w+", encoding="utf-8", dir=path.parent)  # noqa: SIM115
        self._kinds: dict[str, pa.DataType] = {}
        self._fields: set[str] = set()  # of messages

    def __exit__(self, kind: object, *error: object) -> None:
        with self._spool:
            if kind is None:
                self._write()

    def add(self, row: dict[str, Any]) -> None:
        rule = {name: as_text(value) for name, value in row[RULE].items() if not is_missing(value)}
        extra = {name: _plain(value) for name, value in row[EXTRA].items()}
        self._fields.update(*row["prompt"])
        for name, value in extra.items():
            if value is not None:
                kind = _KINDS[type(value)]
                kinds = {self._kinds.get(name, kind), kind}
                mixed = pa.float64() if kinds <= {pa.int64(), pa.float64()} else pa.string()
                self._kinds[name] = kind if len(kinds) == 1 else mixed
        json.dump({**row, RULE: rule, EXTRA: extra}, self._spool, ensure_ascii=False)
        self._spool.write("\n")

    def _write(self) -> None:
        text = pa.string()
        function = pa.struct({"name": text, "arguments": text})
        call = pa.struct({"id": text, "type": text, "function": function})
        kinds = dict.fromkeys(("role", *FIELDS), text) | {"tool_calls": pa.list_(call)}
        message = {name: kind for name, kind in kinds.items() if name in self._fields}
        columns = {
            "data_source": text,
            "prompt": pa.list_(pa.struct(message)),
            "ability": text,
            RULE: pa.struct({"style": text, TRUTH: text}),
        }
        if self._kinds:
            columns[EXTRA] = pa.struct(self._kinds)
        schema = pa.schema(columns)
        partial = self._path.with_suffix(".partial")
        self._spool.seek(0)
        with pq.ParquetWriter(partial, schema) as writer:
            while rows := list(map(json.loads, islice(self._spool, GROUP_ROWS))):
                for extra in (row[EXTRA] for row in rows):
                    for name, value in extra.items():
                        if value is not None and self._kinds[name] == text:
                            extra[name] = as_text(value)
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        partial.rename(self._path)


def _plain(value: object) -> object:
    """A value with a type that Parquet has for all rows: lists and dictionaries as JSON."""
    if is_missing(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return str(value)
    return value if type(value) in _KINDS else as_text(value)


CARD = "README.md"  # where the hub looks for it
SAMPLES, SHOWN_CHARACTERS, BINS, BAR = 3, 400, 12, 40


@dataclass
class SplitCard:
    """What a card says of one split. Lengths are of prompts."""

    name: str  # e.g. "train"
    unit: str  # of the lengths: "tokens" or "characters"
    lengths: array[int] = field(default_factory=lambda: array("L"))
    samples: list[str] = field(default_factory=list)  # the first rows, as JSON
    left_out: Counter[str] = field(default_factory=Counter)  # rows by reason, e.g. "repeated"
    digest: str = ""  # SHA-256 of the split's file

    def add(self, row: Mapping[str, Any], length: int) -> None:
        self.lengths.append(length)
        if len(self.samples) < SAMPLES:
            shown = {"prompt": prompt_text(row["prompt"])}
            for column in ("response", "chosen", "rejected", "completion"):
                if column in row:
                    shown[column] = str(row[column])
            if RULE in row:
                shown[TRUTH] = str(row[RULE].get(TRUTH))
            shown = {name: text[:SHOWN_CHARACTERS] for name, text in shown.items()}
            self.samples.append(json.dumps(shown, ensure_ascii=False))


def card_markdown(
    source: str, digest: str, splits: Sequence[SplitCard], notes: Sequence[str] = ()
) -> str:
    """The card as Markdown: `digest` is the source's, `notes` end it, and all splits have rows."""
    reasons = list(dict.fromkeys(reason for card in splits for reason in card.left_out))
    figures = ["rows", "least", "median", "mean", "95 %", "most"]
    head = ["split", *figures, *(f"left out: {reason}" for reason in reasons), "SHA-256"]
    table = [head, ["---"] * len(head), *(_figures(card, reasons) for card in splits)]
    units = " and ".join(dict.fromkeys(card.unit for card in splits))
    lines = [
        f"# Data: {' '.join(source.split())}",
        "",
        f"Source digest `{digest[:16]}`. Lengths, least to most, are those of prompts, in {units}.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
    ]
    for card in splits:
        samples = (f"\n    {sample}" for sample in card.samples)
        lines += ["", f"## {card.name}", *_histogram(card), "", "First rows, as text:", *samples]
    if notes:
        lines += ["", "## Left out", "", *(f"- {' '.join(note.split())}" for note in notes)]
    return "\n".join(lines) + "\n"


def card_html(markdown: str) -> str:
    """The card as a page's body; HTML that the data contain stays text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)


def _figures(card: SplitCard, reasons: Sequence[str]) -> list[str]:
    lengths = np.asarray(card.lengths)
    median, high = np.percentile(lengths, [50, 95])
    figures = (len(lengths), lengths.min(), median, lengths.mean(), high, lengths.max())
    counts = (card.left_out[reason] for reason in reasons)
    cells = [f"{figure:,.0f}" for figure in (*figures, *counts)]
    return [card.name, *cells, f"`{card.digest[:16]}`"]


def _histogram(card: SplitCard) -> list[str]:
    lengths = np.asarray(card.lengths, dtype=np.int64)
    least, width = lengths.min(), np.ptp(lengths) // BINS + 1
    counts = np.bincount((lengths - least) // width)
    bars = [
        f"{least + n * width:>10,} {'█' * math.ceil(count * BAR / counts.max())} {count:,}"
        for n, count in enumerate(counts)
    ]
    return ["", f"Rows by the prompt's {card.unit}, from:", "", "```", *bars, "```"]


@dataclass
class _Preparation:
    config: DataConfig
    folder: Path
    tokenizer: PreTrainedTokenizerBase | None
    held_out: HeldOut
    notes: list[str] = field(default_factory=list)

    def write(self, split: str, addresses: Sequence[str]) -> SplitCard:
        """Write a split's file; its prompts are held out of the next one."""
        card = SplitCard(split, "tokens" if self.tokenizer else "characters")
        path = self.folder / f"{split}.parquet"
        texts: list[str] = []
        with ParquetWriter(path) as writer:
            for number, row, length in self._measured(self._new_rows(addresses, card), card):
                writer.add(rl_columns(row, number, split))
                card.add(row, length)
                if split != "train":
                    texts.append(question_text(row["prompt"]))
            if not card.lengths:
                counts = ", ".join(f"{count} {reason}" for reason, count in card.left_out.items())
                reasons = "; ".join([counts or "there was none", *self.notes])
                raise DataError(f"{split}: no row is left; {reasons}")
        for text in texts:
            self.held_out.add(text)
        card.digest = hash_file(path)
        return card

    def _new_rows(self, addresses: Sequence[str], card: SplitCard) -> Iterator[tuple[int, Row]]:
        """Good rows whose prompts are neither repeated nor, but for test rows, held out."""
        seen = SeenPrompts()
        for address in addresses:
            rows = MappedRows(address, self.config, need_truth=True)
            for number, row in rows:
                if not seen.add(prompt_key(row)):
                    card.left_out["repeated"] += 1
                    continue
                # Test rows may well be those of an evaluation set.
                is_test = card.name == "test"
                if match := "" if is_test else self.held_out.find(question_text(row["prompt"])):
                    card.left_out[f"held out, {match}"] += 1
                else:
                    yield number, row
            card.left_out += Counter(bad=rows.bad)
            self.notes += rows.notes()

    def _measured(
        self, rows: Iterator[tuple[int, Row]], card: SplitCard
    ) -> Iterator[tuple[int, Row, int]]:
        """Rows with their prompts' lengths; those over `data.max_prompt_length` are left out."""
        limit = self.config.max_prompt_length or 1 << 40
        while batch := list(islice(rows, BATCH_ROWS)):
            numbers, prompts = [number for number, _ in batch], [row["prompt"] for _, row in batch]
            if self.tokenizer is None:
                lengths = [len(prompt_text(prompt)) for prompt in prompts]
            else:
                encoded = encode_short_prompts(self.tokenizer, prompts, limit, card.name, numbers)
                lengths = [limit + 1 if ids is None else len(ids) for ids in encoded]
            for (number, row), length in zip(batch, lengths, strict=True):
                if length > limit:
                    card.left_out["too long"] += 1
                else:
                    yield number, row, length


def prepare(
    config: DataConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[SplitCard]:
    """Write `train.parquet`, `test.parquet`, … and a card into `folder`; return what it says.

    Lengths, and `config.max_prompt_length`, are in tokens with a tokenizer, else in characters.
    Raises DataError for bad rows unless they are dropped, and for a split that loses all its rows.
    """
    addresses = split_addresses(config.path, config.splits)
    folder.mkdir(parents=True, exist_ok=True)
    work = _Preparation(config, folder, tokenizer, HeldOut.of(config))
    order = [split for split in ("test", "validation", "train") if split in addresses]
    cards = [work.write(split, addresses[split]) for split in order]
    digests = [address_digest(address) for split in addresses for address in addresses[split]]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    markdown = card_markdown(config.path, digest, cards, work.notes)
    (folder / CARD).write_text(markdown, encoding="utf-8")
    return cards


def read_splits(data: DataConfig, seed: int, say: Callable[[str], None]) -> Splits:
    """Read the rows and check them; DataError names split, column and rows. `say` gets notes."""
    splits = sources.load_splits(data, seed)
    if not sources.splits_are_disjoint(data):
        splits = without_held_out(splits, data)
    for note in splits.notes:
        say(f"dataset: {note}")
    check_contract(splits)
    return splits


def check_contract(splits: Splits) -> None:
    """Check every table's schema and that splits are disjoint; DataError names rows and columns."""
    for name, frame in splits.tables().items():
        schema = contract.SFT_PAIRS if name.startswith("sft_") else contract.RL_PROMPTS
        contract.check(frame, schema, name)
    contract.check_disjoint(splits.frames())
