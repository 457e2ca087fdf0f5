"""Worker groups on Ray: sessions, failures, processes."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from probe_worker import Probe
from ray.util.placement_group import placement_group, remove_placement_group
from thorough import and_slow

from engine.batch import Batch, LazyBatch
from engine.checkpoint.state_dict import process_rng, set_process_rng
from engine.controller.async_rollout import RolloutProcesses
from engine.controller.groups import Roles
from engine.controller.launch import launch, ray_session
from engine.controller.placement import Placement, Pool
from engine.controller.ray_groups import RayHost
from engine.controller.worker_host import RemoteCall, RoleSpec
from engine.errors import DataError, PlacementError, WorkerError
from engine.storage.filesystem import process_start
from engine.workers.role import Worker

# Of Ray 2.5x, `ray._private.node`; it is raised as an Exception and no more.
TIMED_OUT = "The current node timed out during startup. This could happen because of many things."


class Seeded(Probe):
    def __init__(self, context: Any, *, seed: int) -> None:
        super().__init__(context)


def test_processes_of_the_same_ranks_begin_with_the_same_random_numbers() -> None:
    before = process_rng()

    def drawn(rank: int, seed: int) -> tuple[float, float, float]:
        RayHost([RoleSpec("probe", Seeded, {"seed": seed})], rank, 2).build()
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def different(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
        return all(a != b for a, b in zip(first, second, strict=True))

    try:
        assert drawn(0, 5) == drawn(0, 5)
        assert different(drawn(0, 5), drawn(1, 5))
        assert different(drawn(0, 5), drawn(0, 6))
    finally:
        set_process_rng(before)


def failing(error: Exception) -> Callable[..., None]:
    def init(**options: object) -> None:
        raise error

    return init


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (
            "",
            Exception(TIMED_OUT),
            "timed out during startup; run again when",
        ),
        ("", AssertionError(), "could not be started: AssertionError; run again"),
        (
            "127.0.0.1:9",
            ConnectionError("no GCS\nthere"),
            "started at RAY_ADDRESS=127.0.0.1:9: no GCS; check the address",
        ),
    ],
)
def test_a_failed_start_is_one_sentence(
    address: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", failing(error))
    kind = PlacementError if address else WorkerError
    with pytest.raises(kind) as raised, ray_session("ray"):
        pass
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


PROBE = RoleSpec("probe", Probe)


TWO = [PROBE, RoleSpec("other", Probe)]


def placed(**changes: float) -> Placement:
    timeouts = {"start_timeout_s": 60.0, "call_timeout_s": 60.0} | changes
    return Placement((Pool(("probe",), cpus=0.5),), **timeouts)


def sleep(seconds: float, rows: int = 1) -> Batch:
    return Batch({"x": torch.full((rows,), seconds)}, {"tag": [0] * rows})


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while process_start(pid) is not None:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def cpus_in_use() -> float:
    return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)


def wait_for_free_cpus() -> None:
    deadline = time.monotonic() + 10
    while cpus_in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cpus_in_use() == 0


def two_ranks(call_timeout_s: float = 60.0) -> Placement:
    """The probe on two ranks, and another role that takes what it gives."""
    pools = (Pool(("probe",), 2, cpus=0.5), Pool(("other",), cpus=0.0))
    return Placement(pools, call_timeout_s=call_timeout_s, timeline=True)


def pids_of(roles: Roles, role: str) -> list[int]:
    actors = roles[role]._actors
    return [ray.get(actor.call.remote(RemoteCall(role, "pid"))) for actor in actors]


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_process_is_reported_by_all_who_wait_for_it() -> None:
    with launch(two_ranks(), TWO) as roles:
        busy, pid = pids_of(roles, "probe")
        pending = roles.probe.slow(sleep(8, rows=2))
        downstream = roles.other.total(LazyBatch(pending), 1.0)
        last = roles.other.nap(downstream)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        for future in (last, downstream, pending):
            with pytest.raises(
                WorkerError, match=r"^probe rank 1: slow failed: the worker process died"
            ):
                future.result()
        with pytest.raises(WorkerError, match=r"^probe rank 1: nap failed: the worker process"):
            roles.probe.nap(0.0).result()
        assert pending.done()
        assert time.monotonic() - start < 4, "rank 0 is still busy, and nobody waits for it"
    wait_until_gone(busy)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_stopped_process_ends_in_an_error_and_does_not_outlive_the_run() -> None:
    roles = launch(two_ranks(call_timeout_s=1.0), TWO)
    pid = pids_of(roles, "probe")[1]
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    pending = roles.probe.slow(sleep(0, rows=2))
    downstream = roles.other.total(pending, 1.0)
    with pytest.raises(
        WorkerError, match=r"^other rank 0: total waits for probe rank 1: slow, which gave no"
    ):
        downstream.result()
    with pytest.raises(WorkerError, match=r"^probe rank 1: slow gave no result within 1 s"):
        pending.result()
    with pytest.raises(WorkerError, match=r"^probe rank 1: its timeline gave no result within 1 s"):
        roles.timeline()
    assert time.monotonic() - start < 8
    start = time.monotonic()
    roles.close()
    assert time.monotonic() - start < 8
    wait_until_gone(pid, 10.0)
    wait_for_free_cpus()


@pytest.mark.usefixtures("ray_cluster")
def test_a_stopped_node_is_noticed_by_the_deadline_and_close_frees_the_cluster() -> None:
    """Ray itself would wait for ever to store the batch."""
    wait_for_free_cpus()
    with launch(placed(call_timeout_s=1.0), [PROBE]) as roles:
        [pid] = pids_of(roles, "probe")
        assert pid != os.getpid()
        [name] = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
        assert re.fullmatch(r"hybridflyte-[0-9a-f]{6}/probe/0", name)
        assert cpus_in_use() == 0.5
        mine = psutil.Process().children(recursive=True)
        [raylet] = [process for process in mine if process.name() == "raylet"]
        raylet.suspend()
        try:
            start = time.monotonic()
            with pytest.raises(
                WorkerError, match=r"Ray node of this machine took no data within 1"
            ):
                roles.probe.slow(sleep(0))
            assert time.monotonic() - start < 5
        finally:
            raylet.resume()
    wait_until_gone(pid)
    wait_for_free_cpus()
    roles.close()


class Unknown(Worker):
    """Lives in a module that Ray's workers can't import."""


@pytest.mark.usefixtures("ray_cluster")
def test_a_class_that_the_workers_can_t_import_is_named() -> None:
    wait_for_free_cpus()
    with pytest.raises(
        WorkerError, match=r"^probe rank 0: its start failed: (.|\n)*No module named"
    ):
        launch(placed(), [RoleSpec("probe", Unknown)])
    wait_for_free_cpus()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", and_slow(["local"], ["ray"]))
def test_a_role_that_can_t_be_built(kind: Literal["ray", "local"]) -> None:
    wait_for_free_cpus()
    placement = Placement((Pool(("probe",), cpus=0.5),), kind)
    with pytest.raises(DataError) as caught:
        launch(placement, [RoleSpec("probe", Probe, {"fail": "data"})])
    assert str(caught.value) == "the probe refuses its data"
    assert caught.value.__notes__[0].startswith("raised in probe rank 0: its construction\nTrace")
    wait_for_free_cpus()


@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_that_is_taken_is_refused_at_the_deadline() -> None:
    taken = placement_group([{"CPU": 2}])
    assert taken.wait(10)
    start = time.monotonic()
    with pytest.raises(PlacementError, match=r"no room for .* within 1 s: something else"):
        launch(Placement((Pool(("probe",), cpus=2),), start_timeout_s=1.0), [PROBE])
    assert time.monotonic() - start < 5
    remove_placement_group(taken)
    wait_for_free_cpus()


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


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_batch_of_64_mib_is_copied_once() -> None:
    placement = Placement((Pool(("maker",), cpus=0.5), Pool(("taker",), cpus=0.5)))
    with launch(placement, [RoleSpec("maker", Probe), RoleSpec("taker", Probe)]) as roles:
        made = roles.maker.make(64)
        where, size, total = roles.taker.where(made).result()
    assert size == 64 << 20
    assert total == pytest.approx(64 * (1 << 18))
    assert "/dev/shm" in where or "plasma" in where


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@given(dtype=st.sampled_from(DTYPES), rows=st.integers(1, 4), stride=st.integers(1, 3))
def test_what_travels_arrives_as_it_was(dtype: torch.dtype, rows: int, stride: int) -> None:
    values = (torch.arange(rows * 6).reshape(rows, 6) % 5)[:, ::stride].to(dtype)
    batch = Batch({"x": values, "y": torch.rand(rows)}, {"c": [{"a": i} for i in range(rows)]})
    back = pickle.loads(pickle.dumps(batch, protocol=5))
    assert back.names == batch.names
    for name in batch.names:
        assert back[name].dtype == batch[name].dtype
        assert torch.equal(back[name], batch[name])
    assert list(back.columns["c"]) == list(batch.columns["c"])
