"""Engines under test, each opened as `rollout_subjects` says; shared ones once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session")
def shared_subject() -> Iterator[Callable[[str], Subject]]:
    """Gives the session's engine of a name, opened at the first call."""
    opened: dict[str, Subject] = {}
    with ExitStack() as stack:

        def get(name: str) -> Subject:
            if name not in opened:
                opened[name] = stack.enter_context(rollout_subjects.entry(name).open())
            return opened[name]

        yield get


@pytest.fixture
def vllm_subject(shared_subject: Callable[[str], Subject]) -> Subject:
    """vLLM in process on the trainer's storage, shared by all rollout tests."""
    return shared_subject("vllm")


@pytest.fixture(params=rollout_subjects.parameters())
def subject(
    request: pytest.FixtureRequest, shared_subject: Callable[[str], Subject]
) -> Iterator[Subject]:
    """Each engine of the suite, over each model shape that it is there for."""
    entry = rollout_subjects.entry(request.param)
    if entry.shared:
        yield shared_subject(entry.name)
        return
    with entry.open() as subject:
        yield subject
