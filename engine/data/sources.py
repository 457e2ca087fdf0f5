"""Where rows come from: the registry of sources, the source `files`, and evaluation sets.

The sources `gsm8k` and `math` are in `math_problems`, the default one in `word_problems`.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from engine.config import DataConfig, EvaluationSetConfig
from engine.data.contract import uniform_columns
from engine.data.row_files import BadRows, RowMapper, address_digest, mapped_rows, split_addresses
from engine.data.rows import EXTRA, RULE, TRUTH, as_text, normalise, prompt_text
from engine.errors import ConfigError, DataError
from engine.registry import Registry, import_plugins
from engine.storage.digests import modules_digest
from engine.storage.json_rows import Row

# Where rows come from: the registry of sources and the splits that every source gives.
#
# A source is a class with `@register_source("x")`, in a module of this package or one of yours
# (`data.source: my_module:MySource`). Reading files is in `engine.storage.readers`.

OF_ONE_FORM = ("arithmetic", "gsm8k")  # sources with a question and an answer in each row


@dataclass(frozen=True, slots=True)
class Splits:
    """All rows of a run. SFT rows have prompt, response, extra_info; the others are RL rows."""

    sft_train: pd.DataFrame  # what the warm start learns, e.g. 8192 rows
    sft_validation: pd.DataFrame  # for the warm start's validation loss, e.g. 256 rows
    train: pd.DataFrame  # prompts of RL, e.g. 4096 rows
    validation: pd.DataFrame  # prompts for validation while RL runs, e.g. 256 rows
    test: pd.DataFrame  # held out from all of the above, e.g. 512 rows
    source_digest: str  # SHA-256 (hex) of what was read
    source_uri: str  # where it was read from, e.g. "s3://bucket/gsm8k"
    notes: tuple[str, ...] = ()  # what was left out, a sentence each
    evaluation: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # further test sets

    def frames(self) -> dict[str, pd.DataFrame]:
        """Return the five tables by name."""
        names = ("sft_train", "sft_validation", "train", "validation", "test")
        return {name: getattr(self, name) for name in names}

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the five tables and, as `test_<name>`, the evaluation sets."""
        return self.frames() | {f"test_{name}": frame for name, frame in self.evaluation.items()}

    def with_tables(self, tables: Mapping[str, pd.DataFrame]) -> Splits:
        """Return these splits with other tables, all of them."""
        five: dict[str, Any] = {name: tables[name] for name in self.frames()}
        return replace(self, **five, evaluation={n: tables[f"test_{n}"] for n in self.evaluation})


class Source(Protocol):
    """What a source does; DataError where it can't be read, StorageError where S3 is away."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """Return the SHA-256 of what `load` would read, without building rows."""
        ...

    def load(self, config: DataConfig, seed: int) -> Splits: ...


_registry: Registry[Callable[..., Source]] = Registry(
    "data source",
    "data.source",
    ("engine.data.word_problems", "engine.data.math_problems"),
    "@register_source(name)",
)
register_source = _registry.register
"""Class decorator: make a source selectable as `data.source=<name>`.

Keyword-only parameters of its constructor that have defaults are its options (`data.options`).
"""


def load_splits(config: DataConfig, seed: int) -> Splits:
    """Read the rows of `config.source` and of `config.evaluation_sets`.

    Equal settings, seed and content give equal rows.
    """

    source = _source(config)
    splits = _worded(source.load(config, seed), config)
    sets, notes = read_evaluation_sets(config, seed)
    return replace(
        splits,
        source_digest=_with_more(config, source, splits.source_digest),
        evaluation=sets,
        notes=(*splits.notes, *notes),
    )


def source_digest(config: DataConfig, seed: int) -> str:
    """Return the SHA-256 (hex) of what `load_splits` would read; for cache keys.

    The code of a source from outside the package is part of it, and so are the evaluation sets.
    """
    source = _source(config)
    return _with_more(config, source, source.digest(config, seed))


def splits_are_disjoint(config: DataConfig) -> bool:
    """Whether the source divides its prompts among the splits by itself, by names or numbers."""
    import_plugins(config.plugins)
    return bool(getattr(_registry.get(config.source), "disjoint_splits", False))


def _with_more(config: DataConfig, source: Source, digest: str) -> str:

    more = modules_digest([type(source).__module__]), evaluation_sets_digest(config)
    named = "\0".join([digest, *filter(None, more)])
    return hashlib.sha256(named.encode()).hexdigest() if any(more) else digest


def _worded(splits: Splits, config: DataConfig) -> Splits:
    """Questions of one form as `data.templates.prompt` and `data.system_prompt` put them."""
    if config.source not in OF_ONE_FORM or not (config.templates or config.system_prompt):
        return splits
    mapper = RowMapper(config)
    frames = dict[str, Any]()
    for name, frame in splits.frames().items():
        rows = [{"question": prompt_text(prompt), "prompt": prompt} for prompt in frame["prompt"]]
        prompts = [mapper(row, f"{name}, row {i}")["prompt"] for i, row in enumerate(rows)]
        frames[name] = frame.assign(prompt=prompts)
    return replace(splits, **frames)


def _check_read(config: DataConfig) -> None:
    """Raise ConfigError for a setting that the sources with rows of one form don't read."""
    if config.source not in OF_ONE_FORM:
        return
    unread = [name for name in ("columns", "data_source", "splits") if getattr(config, name)]
    unread += [f"templates.{column}" for column in config.templates if column != "prompt"]
    if unread:
        raise ConfigError(
            f"data.{unread[0]} has no effect with data.source={config.source}; remove it, or set "
            "data.source=files"
        )
    for name in ("sft_size", "train_size"):
        if not getattr(config, name):
            raise ConfigError(
                f"data.{name}=0 (all rows) needs data.source=files; {config.source} takes a number "
                "above 0"
            )


def _source(config: DataConfig) -> Source:
    _check_read(config)
    import_plugins(config.plugins)
    options = _registry.options(config.source).parse(config.options, "data.options")
    return _registry.get(config.source)(**options)


# The source `files`: any JSONL, JSON, CSV or Parquet file, folder, s3:// prefix or hub dataset.
#
# Splits are found by the names of files (or of the hub's splits); a validation or test split that
# is
# not there is taken from the training rows, by seed. What a row becomes is in `mapping`. Memory is
# bounded by the sizes of the splits (`data.train_size`, …), not by the files.

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


# Evaluation sets: problems of files of their own, which models are judged on besides `test`.
#
# They are read as training files are, each with its own columns (`data.evaluation_sets`).


def read_evaluation_sets(
    config: DataConfig, seed: int
) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """The rows of every set by name, and what was left out, a sentence each.

    Raises DataError for a set without a row, and for bad rows where `data.bad_rows` is "fail".
    """
    frames, notes = {}, list[str]()
    for one in config.evaluation_sets:
        rows = _rows(one, config, notes)
        if one.size and len(rows) > one.size:
            notes.append(f"{one.split}: {one.size} of {len(rows)} rows, by seed")
            rows = [rows[place] for place in _drawn(len(rows), one, seed)]
        frames[one.name] = uniform_columns(pd.DataFrame(rows, dtype=object))
    return frames, tuple(notes)


def evaluation_sets_digest(config: DataConfig) -> str:
    """SHA-256 (hex) of the files of all sets; empty without sets."""
    parts = [
        f"{one.name}\0{address_digest(address)}"
        for one in config.evaluation_sets
        for address in _addresses(one)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def _rows(one: EvaluationSetConfig, config: DataConfig, notes: list[str]) -> list[Row]:
    own = {"columns": one.columns, "templates": one.templates}
    given = own if one.columns or one.templates or config.source in OF_ONE_FORM else {}
    source = one.data_source or one.name
    settings = config.model_copy(update={"data_source": source, **given})
    rows: list[Row] = []
    for address in _addresses(one):
        bad = BadRows(address, config.bad_rows)
        for number, row in mapped_rows(address, settings, bad, need_truth=True):
            rows.append(rl_columns(row, number, one.split))
        bad.check()
        notes += filter(None, [bad.sentence()])
    if not rows:
        raise DataError(f"data.evaluation_sets.{one.name}: no row of {one.path} is left; {notes}")
    return rows


def _addresses(one: EvaluationSetConfig) -> Sequence[str]:
    """Those of its test split; of a place without one, of validation, or all there is."""
    places = split_addresses(one.path, {}, need_train=False)
    return places.get("test") or places.get("validation") or places["train"]


def _drawn(count: int, one: EvaluationSetConfig, seed: int) -> list[int]:
    """Places of `one.size` rows of `count`, in order."""

    def rank(place: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{one.name}/{place}".encode(), digest_size=8).digest()

    return sorted(sorted(range(count), key=rank)[: one.size])


def evaluation_files(dataset: Path) -> dict[str, Path]:
    """The tables of a dataset's folder that models are judged on, by set: `test` first."""
    more = sorted(dataset.glob("test_*.parquet"))
    own = {path.stem.removeprefix("test_"): path for path in more}
    return {"test": dataset / "test.parquet"} | own
