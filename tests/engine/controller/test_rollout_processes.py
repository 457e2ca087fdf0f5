"""Rollout workers' processes: whatever starts is closed, however busy the closing is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
from probe_worker import Probe

from engine.controller.async_rollout import RolloutProcesses
from engine.controller.groups import Roles
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.errors import WorkerError


def probe(name: str) -> Roles:
    return launch(Placement((Pool((name,)),), "local"), [RoleSpec(name, Probe)])


class Starts:
    """Starts roles, and has each close wait for `may_close`, and attempt 1 for `may_start`."""

    def __init__(self) -> None:
        self.may_start, self.may_close = threading.Event(), threading.Event()
        self.started: list[str] = []
        self.closed: list[str] = []

    def __call__(self, name: str, attempt: int) -> Roles:
        if attempt:
            self.may_start.wait(30)
        roles = probe(name)
        self.started.append(name)
        close = roles.close

        def slowly() -> None:
            self.may_close.wait(30)
            close()
            self.closed.append(name)

        roles.close = slowly  # type: ignore[method-assign]
        return roles


@pytest.fixture
def starts() -> Starts:
    return Starts()


def running(start: Callable[[str, int], Roles], names: list[str]) -> RolloutProcesses:
    processes = RolloutProcesses(start, 1)
    for name in names:
        processes.start(name, 0)
    deadline = time.monotonic() + 30
    while len(processes.running) < len(names) and time.monotonic() < deadline:
        for name, attempt, roles in processes.poll_started():
            assert isinstance(roles, Roles)
            processes.accept(name, attempt, roles)
    return processes


def wait_for_all_closed(starts: Starts) -> None:
    deadline = time.monotonic() + 30
    while sorted(starts.closed) != sorted(starts.started) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(starts.closed) == sorted(starts.started)


def test_processes_that_are_given_up_are_closed_though_the_rollout_ends(starts: Starts) -> None:
    names = [f"sampler{i}" for i in range(4)]
    processes = running(starts, names)
    for name in names[:3]:  # one more than there are threads
        processes.kill(name)
    processes.close(timeout_s=0.1)
    assert not processes.running
    assert not starts.closed
    starts.may_close.set()
    wait_for_all_closed(starts)
    assert len(starts.closed) == 4


def test_starts_do_not_hold_up_closing_and_are_closed_when_they_are_over(starts: Starts) -> None:
    starts.may_close.set()
    processes = running(starts, ["sampler0"])
    for number in (1, 2, 3):  # the third never begins
        processes.start("sampler0", number)
    processes.close(timeout_s=20)
    assert starts.closed == ["sampler0"]
    starts.may_start.set()
    wait_for_all_closed(starts)
    assert len(starts.closed) <= 3


def test_a_process_that_can_t_be_closed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise WorkerError("its actor does not answer")

    def start(name: str, attempt: int) -> Roles:
        roles = probe(name)
        closes.append(roles.close)
        roles.close = fail  # type: ignore[method-assign]
        return roles

    closes: list[Callable[[], None]] = []
    processes = running(start, ["sampler0"])
    with caplog.at_level(logging.WARNING):
        processes.close(timeout_s=20)
    closes[0]()
    assert "was not closed: its actor does not answer" in caplog.text
