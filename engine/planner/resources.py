"""The machines that there are to plan with, and what their devices can do.

Ray knows a node's CPUs, GPUs, memory for workers and kind of accelerator, but not the memory of a
GPU: each machine with GPUs is asked for it, and where it can't tell, the smallest variant of its
accelerator counts.

Devices are in round numbers: enough to rank layouts, not to predict seconds. One table has GPUs by
the name that Ray gives them (`ray.util.accelerators`). A kind that is not in it, or that your
provider cut, is a setting (`trainer.gpu_kinds`), and wins. Peaks are the vendors' data sheets',
dense, without sparsity; of AMD's two-chip devices, one chip's, which is what a process sees.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.controller.placement import ClusterNode
from engine.errors import PlacementError

GB = 10**9
GIB = 1 << 30
EFFICIENCY = 0.4  # of peak arithmetic, in training
STREAMED = 0.7  # of peak memory bandwidth, in decoding
FLOAT32_SHARE = 1 / 8  # of bf16's arithmetic, where matrices are float32


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's processor and its ways to the others."""

    name: str
    memory_gib: float  # the smallest variant of that name; 0: whatever the machine has
    flops: float  # bf16, a second
    bandwidth: float  # of its own memory, bytes a second
    link: float  # to devices of the same machine, bytes a second each way
    network: float  # to other machines
    vendor: str = ""  # of a GPU: nvidia or amd
    latency_s: float = 20e-6  # of one collective on one machine
    network_latency_s: float = 60e-6
    kernel_s: float = 40e-6  # of a decoder layer that has next to nothing to do


def gpu_of(
    name: str,
    memory_gib: float,
    tflops: float,
    memory_gbs: float,
    link_gbs: float = 32,
    network_gbs: float = 12.5,
    vendor: str = "",
) -> Device:
    """Return a GPU from its data sheet: 10^12 operations and 10^9 bytes a second, see `Device`.

    Without a vendor it is the one that its name says.
    """
    ways = (memory_gbs * GB, link_gbs * GB, network_gbs * GB)
    vendor = vendor or ("amd" if name.startswith("AMD") else "nvidia")
    return Device(name, memory_gib, tflops * 1e12, *ways, vendor)


_GPUS = {
    device.name: device
    for device in (
        gpu_of("V100", 16, 125, 900, 150),
        gpu_of("T4", 16, 65, 320, 16),
        gpu_of("A10G", 24, 70, 600, 32),
        gpu_of("L4", 24, 121, 300, 32),
        gpu_of("L40S", 48, 362, 864, 32),
        gpu_of("A100", 40, 312, 1555, 300),
        gpu_of("A100-40G", 40, 312, 1555, 300),
        gpu_of("A100-80G", 80, 312, 2039, 300),
        gpu_of("H100", 80, 989, 3350, 450),
        gpu_of("H200", 141, 989, 4800, 450),
        gpu_of("H20", 96, 148, 4000, 450),
        gpu_of("B200", 180, 2250, 8000, 900),
        gpu_of("B300", 270, 2250, 8000, 900),
        gpu_of("GB200", 186, 2500, 8000, 900),
        gpu_of("GB300", 278, 2500, 8000, 900),
        gpu_of("AMD-Instinct-MI210", 64, 181, 1600, 50),
        gpu_of("AMD-Instinct-MI250X", 64, 191, 1600, 50),
        gpu_of("AMD-Instinct-MI250X-MI250", 64, 181, 1600, 50),
        gpu_of("AMD-Instinct-MI300A", 128, 980, 5300, 384),
        gpu_of("AMD-Instinct-MI300X-OAM", 192, 1307, 5300, 448),
        gpu_of("AMD-Instinct-MI300X-HF", 192, 1307, 5300, 448),
        gpu_of("AMD-Instinct-MI325X-OAM", 256, 1307, 6000, 448),
        gpu_of("AMD-Instinct-MI350X-OAM", 288, 2307, 8000, 537),
        gpu_of("AMD-Instinct-MI355X-OAM", 288, 2517, 8000, 537),
    )
}
_UNKNOWN_GPU = gpu_of("GPU", 0, 120, 900, 32)  # cautious numbers

HOST_LINK = 25 * GB  # between a GPU and its machine's memory
CORE_FLOPS = 30e9  # of a CPU core, float32


def gpu(name: str, kinds: Mapping[str, Device] | None = None) -> Device:
    """Return a GPU by Ray's name, as `kinds` or else the table have it; unknown has no memory."""
    return (kinds or {}).get(name) or _GPUS.get(name, _UNKNOWN_GPU)


def gpu_of_product(product: str, memory: int) -> Device:
    """Return the GPU of the table that a driver names so and gives about `memory` bytes.

    >>> gpu_of_product("NVIDIA A100-SXM4-80GB", 79 * GIB).name
    'A100-80G'
    >>> gpu_of_product("AMD Instinct MI300X", 192 * GIB).name
    'AMD-Instinct-MI300X-OAM'
    """
    words = product.replace("-", " ").split()
    same = [d for d in _GPUS.values() if d.name.split("-")[2 * (d.vendor == "amd")] in words]
    return min(same, key=lambda d: abs(d.memory_gib * GIB - memory), default=_UNKNOWN_GPU)


def cpu(cores: float) -> Device:
    """Return a machine's cores as one device; 10 Gbit Ethernet between machines."""
    return Device(
        "CPU",
        memory_gib=0,
        # bf16's, of which float32 gets FLOAT32_SHARE
        flops=cores * CORE_FLOPS / FLOAT32_SHARE / EFFICIENCY,
        bandwidth=20 * GB,
        link=5 * GB,
        network=1.25 * GB,
        latency_s=100e-6,
        network_latency_s=300e-6,
        kernel_s=100e-6,
    )


_TYPE = "accelerator_type:"
_LABEL = "ray.io/accelerator-type"


@dataclass(frozen=True, slots=True)
class Machine:
    """A node that runs workers."""

    name: str
    cpus: float  # e.g. 88.0
    memory: int  # bytes that workers may use
    gpus: int = 0
    gpu_memory: int = 0  # bytes of each
    accelerator: str = ""  # by Ray's name, e.g. "H100"
    resources: Mapping[str, float] = field(default_factory=dict)  # others, for pools that ask
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> ClusterNode:  # as the check of capacity takes it
        amounts = {**self.resources, "CPU": self.cpus, "GPU": float(self.gpus)}
        return ClusterNode(self.name, {k: v for k, v in amounts.items() if v}, self.labels)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Equal ranks on a part of the cluster: one a GPU, or one a machine without GPUs."""

    ranks: int
    per_machine: int  # at most
    cpus: float  # a rank
    memory: int  # bytes of the device that a rank computes on
    host_memory: int  # bytes of its machine's memory, a rank; the same where there is no GPU
    device: Device
    gpus: float = 0.0  # a rank
    reserved_cpus: float = 0.0  # cores of a machine that are left to other processes

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.per_machine)

    def link(self, ranks: int) -> tuple[float, float]:
        """Return bytes a second and seconds of latency between so many neighbours."""
        device = self.device
        if ranks <= self.per_machine:
            return device.link, device.latency_s
        return device.network, device.network_latency_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a cluster that run workers."""

    machines: tuple[Machine, ...]
    kinds: Mapping[str, Device] = field(default_factory=dict)  # GPUs of the user's own

    @property
    def gpus(self) -> int:
        return sum(machine.gpus for machine in self.machines)

    def without_gpus(self) -> Cluster:
        """Return the same for processes that ask for none."""
        plain = (replace(machine, gpus=0, accelerator="") for machine in self.machines)
        return replace(self, machines=tuple(plain))

    def less_gpus(self, count: int) -> Cluster:
        """Return what is left without `count` GPUs, with their share, of machines with fewest."""
        machines = []
        for machine in sorted(self.machines, key=lambda m: m.gpus):
            gpus = max(0, machine.gpus - count)
            count -= machine.gpus - gpus
            share = gpus / machine.gpus if machine.gpus else 1.0
            memory = int(machine.memory * share)
            machines.append(replace(machine, gpus=gpus, cpus=machine.cpus * share, memory=memory))
        return replace(self, machines=tuple(machines))

    def allocations(self, reserved_cpus: float = 0.0) -> list[Allocation]:
        """Return numbers of ranks worth a look; each leaves `reserved_cpus` cores of a machine."""
        candidates = self._of_gpus() if self.gpus else self._of_machines(reserved_cpus)
        return sorted(set(candidates), key=lambda allocation: allocation.ranks)

    def _of_gpus(self) -> Iterator[Allocation]:
        machines = sorted((m for m in self.machines if m.gpus), key=lambda m: -m.gpus)
        counts = [m.gpus for m in machines]
        first = [(n, machines[:1]) for n in range(1, counts[0] + 1)]
        sums = ((sum(counts[:j]), machines[:j]) for j in _doubling(len(machines)))
        for ranks, used in [*first, *sums]:
            cpus = min(m.cpus / m.gpus for m in used)
            yield Allocation(
                ranks,
                per_machine=min(ranks, used[0].gpus),
                cpus=float(int(cpus)) if cpus >= 1 else cpus,
                memory=min(m.gpu_memory for m in used),
                host_memory=min(m.memory // min(m.gpus, ranks) for m in used),
                device=min((gpu(m.accelerator, self.kinds) for m in used), key=lambda d: d.flops),
                gpus=1.0,
            )

    def _of_machines(self, reserved_cpus: float) -> Iterator[Allocation]:
        for key in ("cpus", "memory"):
            machines = sorted(self.machines, key=lambda m: getattr(m, key), reverse=True)
            for ranks in {*range(1, min(8, len(machines)) + 1), *_doubling(len(machines))}:
                used = machines[:ranks]
                cores = min(m.cpus for m in used)
                if ranks > 1 and max(m.cpus for m in used) >= 2 * cores:
                    continue  # Ray would put two ranks on one of them
                memory = min(m.memory for m in used)
                cpus = max(1.0, cores - reserved_cpus) if cores >= 1 else cores
                yield Allocation(ranks, 1, cpus, memory, memory, cpu(cpus), 0.0, reserved_cpus)

    def __str__(self) -> str:  # e.g. "2 machines, 16 × H100 of 79.6 GiB, 176 cores, 1800 GiB"
        count = len(self.machines)
        parts = [f"{count} machine{'s' if count != 1 else ''}"]
        if self.gpus:
            kinds = sorted({m.accelerator or "GPU" for m in self.machines if m.gpus})
            least = min(m.gpu_memory for m in self.machines if m.gpus)
            parts.append(f"{self.gpus} × {'/'.join(kinds)} of {least / GIB:.1f} GiB")
        parts.append(f"{sum(m.cpus for m in self.machines):g} cores")
        parts.append(f"{sum(m.memory for m in self.machines) / GIB:.1f} GiB for workers")
        return ", ".join(parts)


def _doubling(count: int) -> list[int]:
    """Return 1, 2, 4, … and `count` itself."""
    return sorted({*(1 << power for power in range(count.bit_length())), count})


def cluster_of(
    nodes: Sequence[ClusterNode],
    gpu_memory: Mapping[str, int] | None = None,
    kinds: Mapping[str, Device] | None = None,
) -> Cluster:
    """Return the machines among Ray's nodes that run workers: those with CPUs or GPUs.

    `gpu_memory` is what each node, by name, said of its GPUs, in bytes; `kinds` as `gpu` has them.
    Raises PlacementError where there are no such nodes, or a GPU's memory is unknown.
    """
    machines = []
    for node in nodes:
        has, labels = dict(node.resources), node.labels
        cpus, gpus = has.pop("CPU", 0.0), int(has.pop("GPU", 0.0))
        kind = labels.get(_LABEL) or next((k[len(_TYPE) :] for k in has if k.startswith(_TYPE)), "")
        if not (cpus or gpus):
            continue  # a head that schedules nothing
        listed = int(gpu(kind, kinds).memory_gib * GIB)
        each = (gpu_memory or {}).get(node.name) or listed
        if gpus and not each:
            raise PlacementError(
                f"trainer.placement=auto can't tell how much memory the GPUs of {node.name} have "
                f"(accelerator {kind or 'unnamed'}, no nvidia-smi or amdgpu there); describe it in "
                "trainer.gpu_kinds, or set actor.parallel and trainer.pools, and "
                "trainer.placement=ray"
            )
        memory = int(has.get("memory", 0.0))
        machines.append(
            Machine(node.name, cpus, memory, gpus, each if gpus else 0, kind, has, labels)
        )
    if not machines:
        raise PlacementError(
            f"the Ray cluster has no CPU and no GPU for workers ({len(nodes)} nodes are alive); "
            "add worker nodes"
        )
    return Cluster(tuple(machines), kinds or {})


def read_cluster(kinds: Mapping[str, Device] | None = None) -> Cluster:
    """Return the machines that are alive in the Ray cluster; joins or starts Ray as a launch does.

    `kinds` as in `cluster_of`. Counts all that they have, free or taken: an earlier attempt's
    processes may still be ending.
    """
    from engine.controller.launch import ask_nodes, cluster_nodes

    nodes = cluster_nodes()
    with_gpus = {id: node for id, node in nodes.items() if node.resources.get("GPU", 0.0) >= 1}
    memory = ask_nodes(with_gpus, gpu_memory_here)
    return cluster_of(list(nodes.values()), memory, kinds)


def gpu_memory_here(amd: str = "/sys/class/drm") -> int:
    """Return bytes of this machine's smallest GPU; 0 where neither driver says."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        sizes = [int(line) << 20 for line in output.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):  # no NVIDIA driver here
        sizes = [int(f.read_text()) for f in Path(amd).glob("card*/device/mem_info_vram_total")]
    return min(sizes, default=0)
