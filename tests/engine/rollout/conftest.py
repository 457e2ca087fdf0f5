"""Engines under test, each opened as `rollout_subjects` says; a few shared ones stay open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import rollout_subjects
import torch
from rollout_models import Subject


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_OPEN_AT_ONCE = 2  # vLLM in processes of its own takes 3 GB, and each of pytest's has its engines


class SharedSubjects:
    """The session's engines, opened when they are asked for; the one not used longest is closed."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[Subject, ExitStack]] = {}  # the last used is last

    def get(self, name: str) -> Subject:
        if name in self._opened:
            self._opened[name] = self._opened.pop(name)
            return self._opened[name][0]
        while len(self._opened) >= _OPEN_AT_ONCE:
            self.discard(next(iter(self._opened)))
        stack = ExitStack()
        self._opened[name] = stack.enter_context(rollout_subjects.entry(name).open()), stack
        return self._opened[name][0]

    def discard(self, name: str) -> None:
        """Close an engine that a test has ruined; the next that asks gets a new one."""
        self._opened.pop(name)[1].close()

    def close(self) -> None:
        for name in list(self._opened):
            self.discard(name)


@pytest.fixture(scope="session")
def shared_subjects() -> Iterator[SharedSubjects]:
    subjects = SharedSubjects()
    yield subjects
    subjects.close()


@pytest.fixture
def vllm_subject(shared_subjects: SharedSubjects) -> Subject:
    """vLLM in process on the trainer's storage, shared by all rollout tests."""
    return shared_subjects.get("vllm")


@pytest.fixture(scope="module", params=rollout_subjects.parameters())
def subject_name(request: pytest.FixtureRequest) -> str:
    """Of a module's scope, so that the tests of one engine follow each other."""
    return str(request.param)


@pytest.fixture
def subject(subject_name: str, shared_subjects: SharedSubjects) -> Iterator[Subject]:
    """Each engine of the suite, over each model shape that it is there for."""
    entry = rollout_subjects.entry(subject_name)
    if entry.shared:
        yield shared_subjects.get(entry.name)
        return
    with entry.open() as subject:
        yield subject
