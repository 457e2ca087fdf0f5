"""The registry of engines that the conformance suite runs on.

A module `subjects_*.py` beside this file adds its engines with `@subject(name)`: a function that
opens one and closes it (a generator that yields a `Subject`). `conftest.py` imports all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollout_models import Subject

Opener = Callable[[], Iterator[Subject]]


@dataclass(frozen=True)
class Entry:
    """How one engine of the suite is made."""

    name: str
    open: Callable[[], AbstractContextManager[Subject]]
    shared: bool  # one for the whole session; costly engines are, and are updated between tests
    marks: tuple[pytest.MarkDecorator, ...]


_ENTRIES: dict[str, Entry] = {}


def subject(
    name: str, *, shared: bool = False, marks: tuple[pytest.MarkDecorator, ...] = ()
) -> Callable[[Opener], Opener]:
    """Add an engine to the suite under `name`; `pytest.skip` in the opener skips its tests."""

    def add(opener: Opener) -> Opener:
        assert name not in _ENTRIES, name
        _ENTRIES[name] = Entry(name, contextmanager(opener), shared, marks)
        return opener

    return add


def entry(name: str) -> Entry:
    return _ENTRIES[name]


def parameters() -> list[object]:
    """All entries as pytest parameters, in order of their modules' names."""
    for file in sorted(Path(__file__).parent.glob("subjects_*.py")):
        importlib.import_module(file.stem)
    return [pytest.param(e.name, marks=e.marks) for e in _ENTRIES.values()]
