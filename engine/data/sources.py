"""Where rows come from: the registry of sources, the source `files`, and evaluation sets.

A source is a class with `@register_source("x")`, here or in a module of yours (`data.source:
my_module:MySource`). `files` finds splits by the names of files, and takes a validation or test
split that is missing from the training rows; the sizes of the splits bound its memory.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

import pandas as pd

from engine.config import DataConfig, EvaluationSetConfig
from engine.data.cells import as_text
from engine.data.contract import uniform_columns
from engine.data.messages import row_tools
from engine.data.row_files import MappedRows, RowMapper, address_digest, split_addresses
from engine.data.rows import EXTRA, RULE, TRUTH, normalise, prompt_text
from engine.errors import ConfigError, DataError, counted
from engine.registry import Registry, import_plugins
from engine.storage.digests import modules_digest
from engine.storage.json_rows import Row

ARITHMETIC = "arithmetic"  # the source that reads nothing


SPLITS = ("sft_train", "sft_validation", "train", "validation", "test")


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
        return {name: getattr(self, name) for name in SPLITS}

    def tables(self) -> dict[str, pd.DataFrame]:
        """The five tables and, as `test_<name>`, the evaluation sets."""
        return self.frames() | {f"test_{name}": frame for name, frame in self.evaluation.items()}

    def with_tables(self, tables: Mapping[str, pd.DataFrame]) -> Self:
        """These splits with other tables, all of them."""
        five: dict[str, Any] = {name: tables[name] for name in self.frames()}
        return replace(self, **five, evaluation={n: tables[f"test_{n}"] for n in self.evaluation})


class Source(Protocol):
    """What a source does; DataError where it can't be read, StorageError where S3 is away."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """The SHA-256 of what `load` would read, without building rows."""

    def load(self, config: DataConfig, seed: int) -> Splits: ...


_BUILT_IN = ("engine.data.word_problems", "engine.data.math_problems")
_registry: Registry[Callable[..., Source]] = Registry(
    "data source", "data.source", _BUILT_IN, "@register_source(name)"
)
register_source = _registry.register
"""Class decorator: make a source selectable as `data.source=<name>`.

Keyword-only parameters of its constructor that have defaults are its options (`data.options`).
"""


def load_splits(config: DataConfig, seed: int) -> Splits:
    """Read the rows of `config.source` and of `config.evaluation_sets`; the same for each seed."""
    source = _source(config)
    splits = _with_templates(source.load(config, seed), config)
    sets, notes = read_evaluation_sets(config, seed)
    return replace(
        splits,
        source_digest=_complete_digest(config, source, splits.source_digest),
        evaluation=sets,
        notes=(*splits.notes, *notes),
    )


def source_digest(config: DataConfig, seed: int) -> str:
    """SHA-256 (hex) of what `load_splits` would read, and of code from outside the package."""
    source = _source(config)
    return _complete_digest(config, source, source.digest(config, seed))


def splits_are_disjoint(config: DataConfig) -> bool:
    """Whether the source divides its prompts among the splits by itself, by names or numbers."""
    import_plugins(config.plugins)
    return bool(getattr(_registry.get(config.source), "disjoint_splits", False))


def _complete_digest(config: DataConfig, source: Source, digest: str) -> str:
    sets = [
        f"{settings.name}\0{address_digest(address)}"
        for settings in config.evaluation_sets
        for address in _addresses(settings)
    ]
    sets_digest = hashlib.sha256("\n".join(sets).encode()).hexdigest() if sets else ""
    more = [part for part in (modules_digest([type(source).__module__]), sets_digest) if part]
    return hashlib.sha256("\0".join([digest, *more]).encode()).hexdigest() if more else digest


def _with_templates(splits: Splits, config: DataConfig) -> Splits:
    """The default source's questions as `data.templates.prompt` and `data.system_prompt` say."""
    if config.source != ARITHMETIC or not (config.templates or config.system_prompt):
        return splits
    mapper = RowMapper(config)
    tables = splits.tables()
    for name, frame in splits.frames().items():
        rows = [{"question": prompt_text(prompt), "prompt": prompt} for prompt in frame["prompt"]]
        prompts = [mapper(row, f"{name}, row {i}")["prompt"] for i, row in enumerate(rows)]
        tables[name] = frame.assign(prompt=prompts)
    return splits.with_tables(tables)


def _source(config: DataConfig) -> Source:
    """The source with its options; ConfigError for a setting that it doesn't read."""
    import_plugins(config.plugins)
    if config.source == ARITHMETIC:
        unread = [name for name in ("columns", "data_source", "splits") if getattr(config, name)]
        unread += [f"templates.{column}" for column in config.templates if column != "prompt"]
        if unread:
            raise ConfigError(
                f"data.{unread[0]} has no effect with data.source={config.source}; remove it, or "
                "set data.source=files"
            )
        if empty := [name for name in ("sft_size", "train_size") if not getattr(config, name)]:
            raise ConfigError(
                f"data.{empty[0]}=0 (all rows) needs data.source=files; {config.source} takes a "
                "number above 0"
            )
    options = _registry.options(config.source).parse(config.options, "data.options")
    return _registry.get(config.source)(**options)


LARGEST_SHARE = 5  # at most one training row in so many goes to a split that is taken from them


@register_source("files")
class Files:
    """`data.source=files`, read from `data.path`."""

    def settings(self, config: DataConfig) -> DataConfig:
        """The settings to read with; sources of one form add theirs, and keep those they made."""
        return config

    def digest(self, config: DataConfig, seed: int) -> str:
        """SHA-256 of the content of all files, or the commits of hub datasets, by split."""
        config = self.settings(config)
        parts = [
            f"{split}\0{address_digest(address)}"
            for split, addresses in split_addresses(config.path, config.splits).items()
            for address in addresses
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def load(self, config: DataConfig, seed: int) -> Splits:
        """Read all splits; each prompt is in one of them, once."""
        uri, config = config.path, self.settings(config)
        addresses = split_addresses(config.path, config.splits)
        pool = _Pool(config, seed)
        sizes = {"test": config.test_size, "validation": config.validation_size}
        rows = {name: pool.read(name, addresses.get(name, []), sizes[name]) for name in sizes}
        missing = [name for name in sizes if not rows[name]]
        limit = 0  # all
        if config.sft_size and config.train_size:
            limit = max(config.sft_size, config.train_size) + sum(sizes[name] for name in missing)
        train = pool.read("train", addresses["train"], limit)
        share = pool.distinct // LARGEST_SHARE
        for name in missing:
            if not share:
                few = counted(pool.distinct, "distinct training row")
                raise DataError(
                    f"{config.path}: {few} can't give a {name} split; give at least "
                    f"{LARGEST_SHARE}, or a {name} file"
                )
            count = min(sizes[name], share)
            rows[name], train = train[:count], train[count:]
            pool.notes.append(f"{name}: {count} rows, taken from the training rows")
        return Splits(
            sft_train=_sft_frame(train[: config.sft_size or None], "sft_train"),
            sft_validation=_sft_frame(rows["validation"], "sft_validation"),
            train=_rl_frame(train[: config.train_size or None], "train"),
            validation=_rl_frame(rows["validation"], "validation"),
            test=_rl_frame(rows["test"], "test"),
            source_digest=self.digest(config, seed),
            source_uri=uri or config.path,
            notes=tuple(pool.notes),
        )


_Read = tuple[int, Row]  # a row's number in its file, from 1, and the row


@dataclass
class _Pool:
    """Reads splits one after the other; a prompt that an earlier one has is left out."""

    config: DataConfig
    seed: int
    notes: list[str] = field(default_factory=list)
    total: int = 0  # good rows of the split that was read last
    distinct: int = 0  # prompts of it
    _seen: set[bytes] = field(default_factory=set)

    def read(self, split: str, addresses: Sequence[str], limit: int) -> list[_Read]:
        """The rows of a split in an order drawn from the seed, `limit` of them at most (0: all)."""
        self.total = self.distinct = 0
        drawn = self._draw(split, addresses)
        picked = heapq.nsmallest(limit, drawn) if limit else sorted(drawn)
        repeated = self.total - self.distinct
        if addresses and not picked:
            raise DataError(
                f"{split}: no row of {', '.join(addresses)} is left: {self.total} good rows, "
                f"{repeated} of them repeated; give others"
            )
        if repeated:
            self.notes.append(f"{split}: {repeated} rows repeat a prompt and are left out")
        if limit and self.distinct > limit:
            taken = f"{split}: {limit} of {self.distinct} rows, by seed (data.{split}_size)"
            self.notes.append(taken)
        rows = [read for *_, read in picked]
        self._seen.update(prompt_key(row) for _, row in rows)
        return rows

    def _draw(self, split: str, addresses: Sequence[str]) -> Iterator[tuple[bytes, int, _Read]]:
        """Rows with other prompts, behind what orders them."""
        keys: set[bytes] = set()
        for address in addresses:
            mapped = MappedRows(address, self.config, need_truth=True)
            for number, row in mapped:
                self.total += 1
                key = prompt_key(row)
                if key not in keys and key not in self._seen:
                    keys.add(key)
                    self.distinct += 1
                    rank = draw_key(f"{self.seed}/{split}/{self.distinct}")
                    yield rank, self.distinct, (number, row)
            self.notes += mapped.notes()


def prompt_key(row: Row) -> bytes:
    """16 bytes that are equal for prompts that count as the same."""
    text = normalise(prompt_text(row["prompt"]))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def draw_key(name: str) -> bytes:
    """8 bytes that look random, the same for a name, by which rows are ordered."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def rl_columns(row: Row, number: int, split: str) -> Row:
    """The contract's columns of a canonical row; the file's other columns go to `extra_info`."""
    names = ("data_source", "prompt", "ability", RULE)
    others = {c: value for c, value in row.items() if c not in (*names, EXTRA, "response")}
    extra = {**others, **row[EXTRA], "index": number - 1, "split": split}
    return {**{name: row[name] for name in names}, EXTRA: extra}


def _rl_frame(rows: Sequence[_Read], split: str) -> pd.DataFrame:
    columns = [rl_columns(row, number, split) for number, row in rows]
    return uniform_columns(pd.DataFrame(columns, dtype=object))


def _sft_frame(rows: Sequence[_Read], split: str) -> pd.DataFrame:
    """What the warm start learns: the response, or the ground truth where there is none."""
    columns = []
    for number, row in rows:
        if row_tools(row.get("tools"), f"{split}, row {number}"):
            raise DataError(
                f"{split}, row {number}: column 'tools' is not shown in a workflow's warm "
                "start; fine-tune with python -m engine.main_sft, or name the column otherwise"
            )
        response = row.get("response")
        if not isinstance(response, str) or not response.strip():
            response = as_text(row[RULE][TRUTH])
        extra = {"index": number - 1, "split": split}
        columns.append({"prompt": row["prompt"], "response": response, EXTRA: extra})
    return pd.DataFrame(columns, dtype=object)


def read_evaluation_sets(
    config: DataConfig, seed: int
) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """The rows of every set by name, at least one each, and what was left out, a sentence each."""
    frames, notes = {}, list[str]()
    for settings in config.evaluation_sets:
        rows, size = _evaluation_rows(settings, config, notes), settings.size
        if size and len(rows) > size:
            notes.append(f"{settings.split}: {size} of {len(rows)} rows, by seed")
            order = sorted(range(len(rows)), key=lambda i: draw_key(f"{seed}/{settings.name}/{i}"))
            rows = [rows[i] for i in sorted(order[:size])]
        frames[settings.name] = uniform_columns(pd.DataFrame(rows, dtype=object))
    return frames, tuple(notes)


def _evaluation_rows(
    settings: EvaluationSetConfig, config: DataConfig, notes: list[str]
) -> list[Row]:
    update: dict[str, Any] = {"data_source": settings.data_source or settings.name}
    if settings.columns or settings.templates or config.source == ARITHMETIC:
        update |= {"columns": settings.columns, "templates": settings.templates}
    rows, config = list[Row](), config.model_copy(update=update)
    for address in _addresses(settings):
        mapped = MappedRows(address, config, need_truth=True)
        rows += [rl_columns(row, number, settings.split) for number, row in mapped]
        notes += mapped.notes()
    if not rows:
        raise DataError(
            f"data.evaluation_sets.{settings.name}: no row of {settings.path} is left; {notes}"
        )
    return rows


def _addresses(settings: EvaluationSetConfig) -> Sequence[str]:
    """The files of a set's test split; without one, of validation, or all there is."""
    splits = split_addresses(settings.path, {}, need_train=False)
    return splits.get("test") or splits.get("validation") or splits["train"]


def evaluation_files(dataset: Path) -> dict[str, Path]:
    """The tables of a dataset's folder that models are judged on, by set: `test` first."""
    sets = {p.stem.removeprefix("test_"): p for p in sorted(dataset.glob("test_*.parquet"))}
    return {"test": dataset / "test.parquet"} | sets
