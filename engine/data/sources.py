"""Where rows come from: the registry of sources and the splits that every source gives.

A source is a class with `@register_source("x")`, in a module of this package or one of yours
(`data.source: my_module:MySource`). Reading files is in `engine.storage.readers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pandas as pd

from engine.config import DataConfig
from engine.data.mapping import RowMapper
from engine.data.rows import prompt_text
from engine.errors import ConfigError
from engine.registry import Registry
from engine.storage.code_version import modules_digest

OF_ONE_FORM = ("arithmetic", "gsm8k")  # sources with a question and an answer in each row
# Sources whose prompts differ by numbers or names, and are dealt to splits apart.
DEALT_APART = ("arithmetic", "guessing", "products", "python_tasks")


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
    "data source", "data.source", "engine.data", "@register_source(name)"
)
register_source = _registry.register
"""Class decorator: make a source selectable as `data.source=<name>`.

Keyword-only parameters of its constructor that have defaults are its options (`data.options`).
"""


def load_splits(config: DataConfig, seed: int) -> Splits:
    """Read the rows of `config.source` and of `config.evaluation_sets`.

    Equal settings, seed and content give equal rows.
    """
    from engine.data.evaluation_sets import read_evaluation_sets

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


def _with_more(config: DataConfig, source: Source, digest: str) -> str:
    from engine.data.evaluation_sets import evaluation_sets_digest

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
    options = _registry.options(config.source).parse(config.options, "data.options")
    return _registry.get(config.source)(**options)
