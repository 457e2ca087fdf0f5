"""What Ray reports, as values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.controller.placement import ClusterNode
from engine.errors import PlacementError
from engine.planner import Cluster, Machine, read_cluster
from engine.planner.resources import GIB, cluster_of, gpu_memory_here

LABEL = "ray.io/accelerator-type"


def gpu_node(name: str, gpus: float = 8.0, kind: str = "H100") -> ClusterNode:
    amounts = {"CPU": 64.0, "GPU": gpus, "memory": 100.0 * GIB, f"accelerator_type:{kind}": 1.0}
    return ClusterNode(name, amounts, {LABEL: kind})


def test_nodes_without_cores_run_nothing() -> None:
    head = ClusterNode("head", {"memory": 4.0 * GIB, "node:10.0.0.1": 1.0})
    cluster = cluster_of([head, gpu_node("a"), gpu_node("b")])
    assert [machine.name for machine in cluster.machines] == ["a", "b"]
    assert cluster.gpus == 16
    assert str(cluster) == ("2 machines, 16 × H100 of 80.0 GiB, 128 cores, 200.0 GiB for workers")
    with pytest.raises(PlacementError, match="no CPU and no GPU for workers"):
        cluster_of([head])


def test_a_machine_knows_its_gpus_better_than_the_table() -> None:
    cluster = cluster_of([gpu_node("a", kind="A100"), gpu_node("b", kind="A100")], {"a": 80 * GIB})
    assert [machine.gpu_memory for machine in cluster.machines] == [80 * GIB, 40 * GIB]
    with pytest.raises(PlacementError, match=r"how much memory the GPUs of c .*Mystery"):
        cluster_of([gpu_node("c", kind="Mystery")])
    assert cluster_of([gpu_node("c", kind="Mystery")], {"c": GIB}).machines[0].gpu_memory == GIB


def test_gpu_memory_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_here(str(tmp_path)) == 0
    amd = tmp_path / "card1" / "device"
    amd.mkdir(parents=True)
    (amd / "mem_info_vram_total").write_text("206141652992\n")
    assert gpu_memory_here(str(tmp_path)) == 206141652992
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n[ \"$2\" = '--format=csv,noheader,nounits' ] && echo '81559\n81251'\n"
    )
    os.chmod(tool, 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    assert gpu_memory_here(str(tmp_path)) == 81251 << 20


def test_ranks_are_one_a_gpu_filled_machine_by_machine() -> None:
    cluster = cluster_of([gpu_node("a", 4.0), gpu_node("b", 4.0)])
    allocations = {allocation.ranks: allocation for allocation in cluster.allocations()}
    assert sorted(allocations) == [1, 2, 3, 4, 8]
    assert allocations[8].per_machine == 4
    assert allocations[8].machines == 2
    assert allocations[8].cpus == 16.0
    assert allocations[8].host_memory == 25 * GIB
    assert allocations[2].host_memory == 50 * GIB
    assert allocations[2].machines == 1
    assert {allocation.ranks for allocation in cluster.less_gpus(1).allocations()} == {
        1,
        2,
        3,
        4,
        7,
    }


def test_ranks_are_one_a_machine_without_gpus() -> None:
    machines = [Machine("a", 8.0, 4 * GIB), Machine("b", 8.0, 6 * GIB), Machine("c", 2.0, 90 * GIB)]
    cluster = Cluster(tuple(machines))
    found = {(s.ranks, s.cpus, s.memory // GIB) for s in cluster.allocations()}
    # Two ranks of 2 cores would land on one machine of 8; so a and b only go together.
    assert found == {(1, 8.0, 4), (1, 2.0, 90), (2, 8.0, 4)}
    assert {s.cpus for s in cluster.allocations(reserved_cpus=3.0) if s.ranks == 2} == {5.0}


@pytest.mark.usefixtures("ray_cluster")
def test_a_real_ray() -> None:
    cluster = read_cluster()
    [machine] = cluster.machines
    assert machine.cpus == 2.0
    assert machine.gpus == 0
    assert GIB // 8 < machine.memory < 1 << 45
