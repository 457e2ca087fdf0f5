"""Engines under test, each opened as `rollout_subjects` says; shared ones once a session."""

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


class SharedSubjects:
    """The session's engines, each opened when it is first asked for."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[Subject, ExitStack]] = {}

    def get(self, name: str) -> Subject:
        if name not in self._opened:
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


@pytest.fixture(params=rollout_subjects.parameters())
def subject(request: pytest.FixtureRequest, shared_subjects: SharedSubjects) -> Iterator[Subject]:
    """Each engine of the suite, over each model shape that it is there for."""
    entry = rollout_subjects.entry(request.param)
    if entry.shared:
        yield shared_subjects.get(entry.name)
        return
    with entry.open() as subject:
        yield subject
