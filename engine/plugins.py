"""Code from outside the package: modules whose import registers entries, in every process."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from engine.errors import ConfigError


def import_plugins(modules: Iterable[str]) -> None:
    """Import each module, once a process; raise ConfigError for one that can't be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may fail in any way
            raise ConfigError(
                f"plugins: module {name!r} can't be imported ({type(error).__name__}: {error}); it "
                "must be on the Python path of every process and import cleanly"
            ) from error
