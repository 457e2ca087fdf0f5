"""What goes wrong on Ray comes back soon, as our errors, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Literal

import psutil
import pytest
import ray
import torch
from probe_worker import Probe
from ray.util.placement_group import placement_group, remove_placement_group
from thorough import and_slow

from engine.batch import Batch, LazyBatch
from engine.controller.groups import Roles
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RemoteCall, RoleSpec
from engine.errors import DataError, PlacementError, WorkerError
from engine.storage.filesystem import process_start
from engine.workers.role import Worker

pytestmark = pytest.mark.usefixtures("ray_cluster")
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


def test_a_class_that_the_workers_can_t_import_is_named() -> None:
    wait_for_free_cpus()
    with pytest.raises(
        WorkerError, match=r"^probe rank 0: its start failed: (.|\n)*No module named"
    ):
        launch(placed(), [RoleSpec("probe", Unknown)])
    wait_for_free_cpus()


@pytest.mark.parametrize("kind", and_slow(["local"], ["ray"]))
def test_a_role_that_can_t_be_built(kind: Literal["ray", "local"]) -> None:
    wait_for_free_cpus()
    placement = Placement((Pool(("probe",), cpus=0.5),), kind)
    with pytest.raises(DataError) as caught:
        launch(placement, [RoleSpec("probe", Probe, {"fail": "data"})])
    assert str(caught.value) == "the probe refuses its data"
    assert caught.value.__notes__[0].startswith("raised in probe rank 0: its construction\nTrace")
    wait_for_free_cpus()


def test_a_cluster_that_is_taken_is_refused_at_the_deadline() -> None:
    taken = placement_group([{"CPU": 2}])
    assert taken.wait(10)
    start = time.monotonic()
    with pytest.raises(PlacementError, match=r"no room for .* within 1 s: something else"):
        launch(Placement((Pool(("probe",), cpus=2),), start_timeout_s=1.0), [PROBE])
    assert time.monotonic() - start < 5
    remove_placement_group(taken)
    wait_for_free_cpus()
