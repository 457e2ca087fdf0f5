"""What one RL step of a configuration would take: memory of a rank and seconds, by the planner.

For a dry run: the layout is the settings' own. `auto_placement` searches for one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.config import RLConfig
from engine.parallel.layout import Layout
from engine.planner import Candidate, Workload
from engine.planner.candidates import PricedCandidate
from engine.planner.hardware import GIB, cpu, gpu
from engine.planner.resources import Allocation

_HOST_GIB = 128  # of a machine's memory, a GPU; where it is not known


@dataclass(frozen=True, slots=True)
class Machines:
    """What the ranks would compute on."""

    ranks: int
    per_machine: int
    accelerator: str = ""  # by Ray's name, e.g. "H100"; empty: CPU cores of this machine


def step_estimate(config: RLConfig, work: Workload, machines: Machines) -> list[str]:
    """Lines about a rank's memory and a step's seconds."""
    parallel, rollout = config.actor.parallel, config.rollout
    candidate = Candidate(
        Layout.of(parallel),
        rollout.tensor_parallel_size,
        config.actor.max_tokens_per_micro_batch,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
        activation_checkpointing=parallel.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
    )
    one = PricedCandidate(work, candidate, _allocation(machines))
    memory, price, there = one.memory, one.price, one.allocation.memory
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "moments": memory.moments,
        "activations": memory.activations,
        "rollout copy": memory.rollout,
        "cache": memory.cache,
    }
    large = {name: size / GIB for name, size in parts.items() if size >= GIB / 100}
    shown = ", ".join(f"{name} {size:.2f}" for name, size in large.items())
    fits = "fits" if one.fits else f"does not fit: {one.lacks} needs more"
    return [
        f"memory    {memory.peak / GIB:.2f} of {there / GIB:.1f} GiB a rank at most, in "
        f"{memory.when}; {fits}",
        f"          {shown or 'next to nothing'}",
        f"time      {price.total:.3g} s a step, roughly: training {price.compute:.3g}, between "
        f"ranks {price.traffic + price.switch:.3g}, rollout {price.rollout + price.ahead:.3g}",
    ]


def local_gpu() -> str:
    """The kind of this machine's first GPU, as the planner knows it; empty without one."""
    if not torch.cuda.is_available():
        return ""
    words = torch.cuda.get_device_name(0).replace("-", " ").split()
    return next((word for word in words if gpu(word).memory_gib), "GPU")


def _allocation(machines: Machines) -> Allocation:
    if machines.accelerator:
        kind = gpu(machines.accelerator)
        memory, host = int((kind.memory_gib or 80) * GIB), _HOST_GIB * int(GIB)
        return Allocation(machines.ranks, machines.per_machine, 1.0, memory, host, kind, 1.0)
    cores = max(1.0, (os.cpu_count() or 1) / machines.per_machine)
    memory = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / machines.per_machine)
    return Allocation(machines.ranks, machines.per_machine, cores, memory, memory, cpu(cores))
