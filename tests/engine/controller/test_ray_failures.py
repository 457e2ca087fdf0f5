"""What goes wrong on Ray comes back soon, as our errors, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray
import torch
from probe_worker import Probe

from engine.batch import Batch
from engine.controller.futures import LazyBatch
from engine.controller.host import RoleSpec
from engine.controller.launch import Placement, Pool, launch
from engine.errors import DataError, PlacementError, WorkerError

pytestmark = pytest.mark.usefixtures("ray_cluster")
PROBE = RoleSpec("probe", Probe)


def placed(**changes: float) -> Placement:
    timeouts = {"start_timeout_s": 60.0, "call_timeout_s": 60.0} | changes
    return Placement((Pool(("probe",), cpus=0.5),), **timeouts)


def sleep(seconds: float) -> Batch:
    return Batch({"x": torch.tensor([seconds])}, {"tag": [0]})


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def cpus_in_use() -> float:
    return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)


def wait_for_free_cpus() -> None:
    deadline = time.monotonic() + 10
    while cpus_in_use() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cpus_in_use() == 0


def test_close_ends_the_processes_and_frees_the_cluster() -> None:
    wait_for_free_cpus()
    with launch(placed(), [PROBE]) as roles:
        pid = roles.probe.whoami().result()[3]
        assert pid != os.getpid()
        assert cpus_in_use() == 0.5
    wait_until_gone(pid)
    wait_for_free_cpus()
    roles.close()


def test_a_killed_process_is_reported_within_seconds() -> None:
    with launch(placed(), [PROBE]) as roles:
        pid = roles.probe.whoami().result()[3]
        pending = roles.probe.slow(sleep(30))
        downstream = roles.probe.total(LazyBatch(pending), 1.0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        for future in (pending, downstream, roles.probe.whoami()):
            with pytest.raises(WorkerError, match=r"probe\.\w+: the worker process died"):
                future.result()
        assert time.monotonic() - start < 10


def test_a_deadline_ends_the_wait_and_a_hung_worker_is_killed() -> None:
    with launch(placed(call_timeout_s=0.3), [PROBE]) as roles:
        pid = ray.get(roles.probe._actors[0].call.remote("probe", "whoami", []))[3]
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"probe\.slow gave no result within 0 s|0\.3 s"):
            roles.probe.slow(sleep(60)).result()
        assert time.monotonic() - start < 5
    wait_until_gone(pid)
    assert time.monotonic() - start < 20


def test_an_upstream_error_reaches_whoever_reads_downstream() -> None:
    with launch(placed(), [PROBE]) as roles:
        lazy = LazyBatch(roles.probe.fail("data"))
        with pytest.raises(DataError, match="row 3 is wrong"):
            roles.probe.double(lazy).result()


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        ("data", DataError, "^the probe refuses its data$"),
        ("boom", WorkerError, "^probe rank 0: its construction failed with ZeroDivisionError"),
    ],
)
def test_a_role_that_can_t_be_built(fail: str, error: type[Exception], message: str) -> None:
    wait_for_free_cpus()
    for kind in ("ray", "local"):
        placement = Placement((Pool(("probe",), cpus=0.5),), kind=kind)  # type: ignore[arg-type]
        with pytest.raises(error, match=message):
            launch(placement, [RoleSpec("probe", Probe, {"fail": fail})], threads=1)
    wait_for_free_cpus()


def test_a_cluster_that_is_too_small_is_refused_at_once() -> None:
    start = time.monotonic()
    pools = (Pool(("probe",), world_size=2, cpus=8, gpus=1),)
    with pytest.raises(PlacementError) as caught:
        launch(Placement(pools), [PROBE])
    assert "CPU: wanted 16, present 2; GPU: wanted 2, present 0" in str(caught.value)
    assert time.monotonic() - start < 2


def test_a_cluster_that_is_taken_is_refused_at_the_deadline() -> None:
    pools = (Pool(("probe",), cpus=2),)
    with launch(Placement(pools), [PROBE]):
        start = time.monotonic()
        with pytest.raises(PlacementError, match=r"no room for .* within 1 s: something else"):
            launch(Placement(pools, start_timeout_s=1.0), [PROBE])
        assert time.monotonic() - start < 5
    wait_for_free_cpus()
