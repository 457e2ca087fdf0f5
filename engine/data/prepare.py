"""From files to verl-compatible Parquet with a card, in bounded memory: `prepare`.

Test rows come first, then validation, then training rows, each without the prompts that a split
before it has. What stays in memory is 16 bytes of each prompt, and the runs of words of held-out
rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import DataConfig
from engine.data.bad_rows import BadRows, mapped_rows
from engine.data.card import CARD, SplitCard, card_markdown
from engine.data.decontamination import HeldOut, hold_out_files, question_text
from engine.data.files import prompt_key, rl_columns
from engine.data.parquet_writer import ParquetWriter
from engine.data.rows import prompt_text
from engine.data.seen_prompts import SeenPrompts
from engine.data.split_names import address_digest, split_addresses
from engine.data.templates import encode_short_prompts
from engine.errors import DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 1024  # encoded at once
_NO_LIMIT = 1 << 40


@dataclass
class _Preparation:
    config: DataConfig
    folder: Path
    tokenizer: PreTrainedTokenizerBase | None
    held_out: HeldOut
    notes: list[str] = field(default_factory=list)

    def write(self, split: str, addresses: Sequence[str], *, check: bool) -> SplitCard:
        """Write a split's file; its prompts are held out of the next one."""
        card = SplitCard(split, "tokens" if self.tokenizer else "characters")
        path = self.folder / f"{split}.parquet"
        texts: list[str] = []
        with ParquetWriter(path) as writer:
            new = self._new_rows(split, addresses, card, check)
            for number, row, length in self._measured(new, card, split):
                row = rl_columns(row, number, split)
                writer.add(row)
                card.add(row, length)
                if split != "train":
                    texts.append(question_text(row["prompt"]))
            if not writer.rows:
                raise DataError(f"{split}: no row is left; {self._why(card)}")
        for text in texts:
            self.held_out.add(text)
        with path.open("rb") as file:
            card.digest = hashlib.file_digest(file, "sha256").hexdigest()
        return card

    def _new_rows(
        self, split: str, addresses: Sequence[str], card: SplitCard, check: bool
    ) -> Iterator[tuple[int, Row]]:
        """Good rows whose prompts are neither repeated nor, with `check`, held out."""
        seen = SeenPrompts()
        for address in addresses:
            bad = BadRows(address, self.config.bad_rows)
            for number, row in mapped_rows(address, self.config, bad, need_truth=True):
                if not seen.add(prompt_key(row)):
                    card.leave_out("repeated")
                    continue
                match = self.held_out.find(question_text(row["prompt"])) if check else ""
                if match:
                    card.leave_out(f"held out, {match}")
                else:
                    yield number, row
            bad.check()
            if bad.count:
                card.leave_out("bad", bad.count)
                self.notes.append(bad.sentence())

    def _measured(
        self, rows: Iterator[tuple[int, Row]], card: SplitCard, split: str
    ) -> Iterator[tuple[int, Row, int]]:
        """Rows with their prompts' lengths; those over `data.max_prompt_length` are left out."""
        limit = self.config.max_prompt_length or _NO_LIMIT
        while batch := list(islice(rows, _BATCH_ROWS)):
            for (number, row), length in zip(
                batch, self._lengths(batch, limit, split), strict=True
            ):
                if length > limit:
                    card.leave_out("too long")
                else:
                    yield number, row, length

    def _lengths(self, batch: Sequence[tuple[int, Row]], limit: int, split: str) -> list[int]:
        prompts = [row["prompt"] for _, row in batch]
        if self.tokenizer is None:
            return [len(prompt_text(prompt)) for prompt in prompts]
        numbers = [number for number, _ in batch]
        encoded = encode_short_prompts(self.tokenizer, prompts, limit, split, numbers)
        return [limit + 1 if ids is None else len(ids) for ids in encoded]

    def _why(self, card: SplitCard) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in card.left_out.items())
        return "; ".join([counts or "there was none", *self.notes])


def prepare(
    config: DataConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[SplitCard]:
    """Write `train.parquet`, `test.parquet`, … and a card into `folder`; return what it says.

    The splits are those that `config.path` has. Lengths are in tokens with a tokenizer, else in
    characters, and so is `config.max_prompt_length`. Raises DataError for bad rows where
    `config.bad_rows` is "fail", and for a split that loses all its rows.
    """
    places = split_addresses(config.path, config.splits)
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.decontaminate
    work = _Preparation(config, folder, tokenizer, HeldOut(settings.ngram, settings.overlap))
    hold_out_files(config, work.held_out)
    # Test rows may well be those of an evaluation set; they are only held out of the others.
    order = [split for split in ("test", "validation", "train") if split in places]
    cards = [work.write(split, places[split], check=split != "test") for split in order]
    digests = [address_digest(address) for split in places for address in places[split]]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    markdown = card_markdown(config.path, digest, cards, work.notes)
    (folder / CARD).write_text(markdown, encoding="utf-8")
    return cards
