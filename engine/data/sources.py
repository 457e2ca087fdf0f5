"""Where rows come from: the registry of sources and the splits that every source gives.

The source that `data.source` names `x` is a class in the module `engine.data.x`, with
`@register_source("x")`. Reading files is in `readers`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pandas as pd

import engine.data
from engine.config import DataConfig
from engine.errors import ConfigError


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

    def frames(self) -> dict[str, pd.DataFrame]:
        """Return the five tables by name."""
        names = ("sft_train", "sft_validation", "train", "validation", "test")
        return {name: getattr(self, name) for name in names}


class Source(Protocol):
    """What a source does; DataError where it can't be read, StorageError where S3 is away."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """Return the SHA-256 of what `load` would read, without building rows."""
        ...

    def load(self, config: DataConfig, seed: int) -> Splits: ...


_SOURCES: dict[str, Source] = {}
_S = TypeVar("_S", bound=Callable[[], Source])


def register_source(name: str) -> Callable[[_S], _S]:
    """Class decorator: make a source selectable as `data.source=<name>`."""

    def add(source: _S) -> _S:
        _SOURCES[name] = source()
        return source

    return add


def load_splits(config: DataConfig, seed: int) -> Splits:
    """Read the rows of `config.source`; equal settings, seed and content give equal rows."""
    return _find(config.source).load(config, seed)


def source_digest(config: DataConfig, seed: int) -> str:
    """Return the SHA-256 (hex) of what `load_splits` would read; for cache keys."""
    return _find(config.source).digest(config, seed)


def _find(name: str) -> Source:
    modules = [module.name for module in pkgutil.iter_modules(engine.data.__path__)]
    if name not in _SOURCES and name in modules:
        importlib.import_module(f"engine.data.{name}")  # that one only: others import transformers
    if name not in _SOURCES:
        for module in modules:
            importlib.import_module(f"engine.data.{module}")
        raise ConfigError(f"data.source={name!r} is unknown; choose one of {sorted(_SOURCES)}")
    return _SOURCES[name]
