"""Placements that contradict themselves or a cluster, where pools land, and what is closed."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import ray
from probe_worker import Probe

from engine.controller.launch import init_options, launch
from engine.controller.placement import ClusterNode, Placement, Pool, by_node, require_capacity
from engine.controller.worker_host import RoleSpec
from engine.errors import PlacementError, WorkerError
from engine.workers.role import Worker

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSED: list[str] = []


class Closing(Worker):
    """Notes when it is closed; may fail to be built, or to close."""

    def __init__(self, context: Any, *, fails: bool = False, stuck: bool = False) -> None:
        super().__init__(context)
        if fails:
            raise OSError("no such device")
        self.stuck = stuck

    def close(self) -> None:
        CLOSED.append(self.context.role)
        if self.stuck:
            raise OSError("stuck")


def local(*pools: tuple[str, ...]) -> Placement:
    return Placement(tuple(Pool(pool) for pool in pools), kind="local")


def test_a_role_in_two_pools() -> None:
    with pytest.raises(PlacementError, match=r"placed twice: \['a'\]"):
        local(("a", "b"), ("a",))


def test_roles_without_a_pool() -> None:
    with pytest.raises(
        PlacementError, match=r"placement has \['a'\], the dataflow needs \['a', 'b"
    ):
        launch(local(("a",)), [RoleSpec("a", Closing), RoleSpec("b", Closing)])


def test_one_process_holds_one_rank() -> None:
    placement = Placement((Pool(("a",), world_size=2),), kind="local")
    with pytest.raises(PlacementError, match=r"2 ranks in one process; use trainer.placement=ray"):
        launch(placement, [RoleSpec("a", Closing)])


# Bundles' nodes as Ray 2.60 chose them, by PACK on nodes of 4 cores.
MIXED = [0, 1, 1, 0, 2, 2, 1, 2, 2]  # three times 2, 1 and 1 cores


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 1, 0, 1], [0, 2, 1, 3]),
        (MIXED, [4, 5, 7, 8, 1, 2, 6, 0, 3]),
        ([0, 0, 1, 1, 1, 1], [2, 3, 4, 5, 0, 1]),  # else a group of 4 would cross
    ],
)
def test_ranks_of_a_node_follow_one_another(nodes: list[int], wanted: list[int]) -> None:
    table = {bundle: f"node-{node}" for bundle, node in enumerate(nodes)}
    assert by_node(table, table) == wanted
    assert by_node([2, 3], table) == sorted([2, 3], key=lambda bundle: wanted.index(bundle))


def test_a_failed_launch_closes_what_it_built() -> None:
    CLOSED.clear()
    specs = [
        RoleSpec("a", Closing),
        RoleSpec("b", Closing),
        RoleSpec("c", Closing, {"fails": True}),
    ]
    with pytest.raises(
        WorkerError, match="c rank 0: its construction failed with OSError: no such"
    ):
        launch(local(("a",), ("b", "c")), specs)
    assert sorted(CLOSED) == ["a", "b"]


def test_all_roles_are_closed_though_one_fails_to() -> None:
    CLOSED.clear()
    specs = [
        RoleSpec("a", Closing),
        RoleSpec("b", Closing, {"stuck": True}),
        RoleSpec("c", Closing),
    ]
    roles = launch(local(("a", "b"), ("c",)), specs)
    with pytest.raises(OSError, match="stuck"):
        roles.close()
    assert sorted(CLOSED) == ["a", "b", "c"]
    assert CLOSED.index("b") < CLOSED.index("a"), "in a process the last one built closes first"


# What a cluster can't hold, told from its nodes as values.

SMALL = ClusterNode("10.0.0.1", {"CPU": 2.0}, {"disk": "ssd", "ray.io/node-id": "ab12"})
LARGE = ClusterNode("10.0.0.2", {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H100": 1.0})


def test_what_fits_is_let_through() -> None:
    require_capacity([Pool(("a",), 3, cpus=2)], [SMALL, LARGE])
    require_capacity([Pool(("a",), 2, gpus=1), Pool(("b",), 9, cpus=0)], [SMALL, LARGE])
    require_capacity([Pool(("a",), 4, resources={"accelerator_type:H100": 0.25})], [LARGE])
    require_capacity([Pool(("a",), 2, labels={"disk": "ssd"})], [SMALL, LARGE])


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (Pool(("a",), 2, cpus=4), "CPU: wanted 8, present 6;"),
        (Pool(("a",), 1, cpus=6), r"no single node holds one process of a \(6 CPU\)"),
        (Pool(("a", "b"), 2, cpus=3), r"hold one process of a\+b .* 1 times, wanted 2"),
        (Pool(("a",), 1, resources={"fast": 0.1}), "fast: wanted 0.1, present 0"),
        (Pool(("a",), 1, labels={"disk": "tape"}), r"labels \{'disk': 'tape'\}"),
        (Pool(("a",), 1, gpus=1, labels={"disk": "ssd"}), "no single node holds"),
        (Pool(("a",), 1, cpus=0, labels={"disk": "tape"}), "no single node holds"),
    ],
)
def test_what_can_t_fit_is_refused(pool: Pool, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        require_capacity([pool], [SMALL, LARGE])


def test_the_table_shows_wanted_and_present_by_node() -> None:
    pools = [
        Pool(("actor", "rollout"), 2, cpus=2, gpus=1, resources={"accelerator_type:H100": 0.001}),
        Pool(("reward",), 4, cpus=1, labels={"disk": "ssd"}),
    ]
    with pytest.raises(PlacementError) as caught:
        require_capacity(pools, [SMALL, LARGE])
    assert str(caught.value).splitlines() == [
        "the Ray cluster can't hold the placement: CPU: wanted 8, present 6; ask for less or add "
        "nodes",
        "                               CPU  GPU  accelerator_type:H100",
        "wanted                           8    2                  0.002",
        "  2 × actor+rollout, each        2    1                  0.001",
        "  4 × reward [disk=ssd], each    1    0                      0",
        "present                          6    2                      1",
        "  10.0.0.1 [disk=ssd]            2    0                      0",
        "  10.0.0.2                       4    2                      1",
    ]


@pytest.mark.parametrize(
    ("selector", "holds"),
    [("ssd", True), ("!ssd", False), ("in(hdd, ssd)", True), ("!in(hdd,tape)", True), ("s", False)],
)
def test_label_selectors(selector: str, holds: bool) -> None:
    pool = Pool(("a",), labels={"disk": selector})
    assert bool(SMALL.capacity_for(pool)) == holds
    assert bool(LARGE.capacity_for(pool)) == selector.startswith("!")


@pytest.mark.parametrize(
    "changes", [{"world_size": 0}, {"cpus": -1.0}, {"resources": {"fast": -0.5}}]
)
def test_pools_with_impossible_amounts(changes: dict[str, Any]) -> None:
    with pytest.raises(PlacementError, match="world_size must be 1 or more, amounts 0 or more"):
        Placement((Pool(("a",), **changes),))


def test_how_ray_is_started() -> None:
    def options(**environ: str) -> dict[str, Any]:
        return init_options(environ)

    assert options()["include_dashboard"] is False
    assert options()["address"] == "local", "never a cluster that somebody else started"
    assert options(HYBRIDFLYTE_RAY_DASHBOARD="1")["include_dashboard"] is True
    assert options(HYBRIDFLYTE_RAY_DASHBOARD="0")["include_dashboard"] is False
    joined = options(RAY_ADDRESS="10.0.0.1:6379", HYBRIDFLYTE_RAY_DASHBOARD="1")
    assert joined["address"] == "10.0.0.1:6379"
    assert "include_dashboard" not in joined


def test_a_ray_that_is_started_here_listens_on_the_loopback_address_alone(
    ray_cluster: None,
) -> None:
    listening = set[tuple[str, str]]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it ended meanwhile
            name, connections = process.name(), process.net_connections("inet")
            listening |= {(name, c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN}
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {ip.removeprefix("::ffff:") for _, ip in listening} <= {"127.0.0.1", "::1"}
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_signal_to_the_processes_of_a_run_leaves_the_ray_that_it_started(
    ray_cluster: None,
) -> None:
    started = {"gcs_server", "raylet"}
    groups = dict[str, int]()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ended meanwhile
            if (name := process.name()) in started:
                groups[name] = os.getpgid(process.pid)
    assert set(groups) == started
    assert os.getpgrp() not in groups.values()


# A real cluster of two unlike nodes.


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[dict[str, str]]:
    """A node of one CPU, and one of two with labels and a resource; node ids by name."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    store = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **store})
    cluster.add_node(num_cpus=2, resources={"fast": 1}, labels={"disk": "ssd"}, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield {"fast" if n["Resources"].get("fast") else "head": n["NodeID"] for n in ray.nodes()}
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_pools_land_on_the_nodes_that_they_ask_for(two_nodes: dict[str, str]) -> None:
    pools = (
        Pool(("by_resource",), cpus=0.5, resources={"fast": 0.001}),
        Pool(("by_label",), cpus=0.5, labels={"disk": "in(ssd)"}),
        Pool(("light",), cpus=0, labels={"disk": "ssd"}),
        Pool(("elsewhere", "too"), cpus=0.5, labels={"disk": "!ssd"}),
    )
    specs = [RoleSpec(role, Probe) for pool in pools for role in pool.roles]
    with launch(Placement(pools, call_timeout_s=60), specs) as roles:
        found = {spec.name: roles[spec.name].node().result() for spec in specs}
        names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    fast, head = two_nodes["fast"], two_nodes["head"]
    assert found == {
        "by_resource": fast,
        "by_label": fast,
        "light": fast,
        "elsewhere": head,
        "too": head,
    }
    [run] = {name.split("/")[0] for name in names}
    assert re.fullmatch(r"hybridflyte-[0-9a-f]{6}", run)
    wanted = ("by_resource/0", "by_label/0", "light/0", "elsewhere+too/0")
    assert names == {f"{run}/{name}" for name in wanted}


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (Pool(("a",), cpus=3), r"no single node holds one process of a \(3 CPU\)"),
        (Pool(("a",), 2, cpus=1.5), "1 times, wanted 2 times"),
        (Pool(("a",), resources={"accelerator_type:H100": 0.001}), "H100: wanted 0.001"),
        (Pool(("a",), labels={"disk": "tape"}), "disk=tape"),
    ],
)
@pytest.mark.slow
def test_a_real_cluster_refuses_at_once(two_nodes: dict[str, str], pool: Pool, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(PlacementError, match=reason) as caught:
        launch(Placement((pool,)), [RoleSpec("a", Probe)])
    assert time.monotonic() - start < 2
    assert "[disk=ssd]" in str(caught.value), "the table tells the nodes apart"
