"""The source `files`: any JSONL, JSON, CSV or Parquet file, folder, s3:// prefix or hub dataset.

Splits are found by the names of files (or of the hub's splits); a validation or test split that is
not there is taken from the training rows, by seed. What a row becomes is in `mapping`. Memory is
bounded by the sizes of the splits (`data.train_size`, …), not by the files.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd

from engine.config import DataConfig
from engine.data.bad_rows import BadRows, mapped_rows
from engine.data.columns import uniform_columns
from engine.data.rows import EXTRA, RULE, TRUTH, as_text, normalise, prompt_text
from engine.data.sources import Splits, register_source
from engine.data.split_names import address_digest, split_addresses
from engine.errors import DataError
from engine.storage.json_rows import Row

CARVED = 5  # at most one row in so many goes to a split that is taken from the training rows


@register_source("files")
class Files:
    """`data.source=files`, read from `data.path`."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """SHA-256 of the content of all files, or the commits of hub datasets, by split."""
        parts = [
            f"{split}\0{address_digest(address)}"
            for split, addresses in split_addresses(config.path, config.splits).items()
            for address in addresses
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def load(self, config: DataConfig, seed: int) -> Splits:
        """Read all splits; each prompt is in one of them, once.

        Raises DataError for bad rows where `data.bad_rows` is "fail", and where no row is left.
        """
        places = split_addresses(config.path, config.splits)
        pool = _Pool(config, seed)
        test = pool.read("test", places.get("test", []), config.test_size)
        validation = pool.read("validation", places.get("validation", []), config.validation_size)
        wanted = max(config.sft_size, config.train_size)
        missing = [
            (name, size)
            for name, rows, size in (
                ("test", test, config.test_size),
                ("validation", validation, config.validation_size),
            )
            if not rows
        ]
        both = config.sft_size and config.train_size  # 0: all
        limit = wanted + sum(size for _, size in missing) if both else 0
        train = pool.read("train", places["train"], limit)
        carved: dict[str, list[_Read]] = {}
        share = len(train) // CARVED
        for name, size in missing:
            if not share:
                raise DataError(
                    f"{config.path}: {len(train)} distinct training rows are too few to take a "
                    f"{name} split from; give at least {CARVED}, or a {name} file"
                )
            count = min(size, share)
            carved[name], train = train[:count], train[count:]
            pool.notes.append(f"{name}: {count} rows, taken from the training rows")
        test, validation = carved.get("test", test), carved.get("validation", validation)
        return Splits(
            sft_train=_sft_frame(train[: config.sft_size or None], "sft_train"),
            sft_validation=_sft_frame(validation, "sft_validation"),
            train=_rl_frame(train[: config.train_size or None], "train"),
            validation=_rl_frame(validation, "validation"),
            test=_rl_frame(test, "test"),
            source_digest=self.digest(config, seed),
            source_uri=config.path,
            notes=tuple(pool.notes),
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """A row that was read, and where from."""

    row: Row
    number: int  # in its file, from 1


@dataclass
class _Pool:
    """Reads splits one after the other; a prompt that an earlier one has is left out."""

    config: DataConfig
    seed: int
    notes: list[str] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)

    def read(self, split: str, addresses: Sequence[str], limit: int) -> list[_Read]:
        """The rows of a split in an order drawn from the seed, `limit` of them at most (0: all)."""
        kept: list[tuple[int, int, _Read]] = []  # a heap, the last in order on top
        total, repeated, order = 0, 0, 0
        own: set[bytes] = set()
        for address in addresses:
            bad = BadRows(address, self.config.bad_rows)
            for number, row in mapped_rows(address, self.config, bad, need_truth=True):
                total += 1
                key = prompt_key(row)
                if key in own or key in self._seen:
                    repeated += 1
                    continue
                own.add(key)
                order += 1
                entry = (-_rank(self.seed, split, order), order, _Read(row, number))
                if limit and len(kept) == limit:
                    heapq.heappushpop(kept, entry)
                else:
                    heapq.heappush(kept, entry)
            bad.check()
            self.notes += filter(None, [bad.sentence()])
        if addresses and not kept:
            raise DataError(
                f"{split}: no row of {', '.join(addresses)} is left: {total} good rows, {repeated} "
                "of them repeated; give others"
            )
        if repeated:
            self.notes.append(f"{split}: {repeated} rows repeat a prompt and are left out")
        if limit and order > limit:
            self.notes.append(f"{split}: {limit} of {order} rows, by seed (data.{split}_size)")
        rows = [entry[2] for entry in sorted(kept, key=lambda entry: -entry[0])]
        self._seen.update(prompt_key(read.row) for read in rows)
        return rows


def prompt_key(row: Row) -> bytes:
    """16 bytes that are equal for prompts that count as the same."""
    text = normalise(prompt_text(row["prompt"]))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _rank(seed: int, split: str, order: int) -> int:
    drawn = hashlib.blake2b(f"{seed}/{split}/{order}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn, "big")


def rl_columns(row: Row, number: int, split: str) -> Row:
    """The contract's columns of a canonical row; the file's other columns go to `extra_info`."""
    own = ("prompt", "data_source", "ability", RULE, EXTRA, "response")
    others = {column: value for column, value in row.items() if column not in own}
    place = {"index": number - 1, "split": split}
    return {
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "ability": row["ability"],
        RULE: row[RULE],
        EXTRA: {**others, **row[EXTRA], **place},
    }


def _rl_frame(rows: Sequence[_Read], split: str) -> pd.DataFrame:
    return uniform_columns(_frame(rl_columns(read.row, read.number, split) for read in rows))


def _sft_frame(rows: Sequence[_Read], split: str) -> pd.DataFrame:
    return _frame(
        {
            "prompt": read.row["prompt"],
            "response": _response(read.row),
            EXTRA: {"index": read.number - 1, "split": split},
        }
        for read in rows
    )


def _response(row: Row) -> str:
    """What the warm start learns: the response, or the ground truth where there is none."""
    response = row.get("response")
    if isinstance(response, str) and response.strip():
        return response
    return as_text(row[RULE][TRUTH])


def _frame(rows: Iterator[Row]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), dtype=object)
