"""This process's place in a layout: its process groups, and sums over them."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.errors import WorkerError
from engine.parallel.layout import AXES, Layout

# Ranks over which weights are sharded: those of a sequence hold the same weights and different
# tokens, so they may share weights as well as those of `fsdp` do.
SHARD_AXES = ("fsdp", "sp")


def init_process_group(
    address: str,
    rank: int,
    world_size: int,
    rendezvous_s: float = 120.0,
    collective_s: float = 600.0,  # NCCL's watchdog counts from when one is enqueued
) -> None:
    """Join the default process group whose rendezvous is at `address` ("host:port").

    A rank that stays away makes the others' collectives raise within `collective_s`; of one that
    has died, gloo's raise at once. Raises WorkerError if not all ranks have joined within
    `rendezvous_s`.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=rendezvous_s),
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"rank {rank} of {world_size} could not meet the others at {address} within "
            f"{rendezvous_s:g} s: {error}; check that all nodes reach that port"
        ) from error
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_s))


@dataclass(frozen=True, slots=True)
class Ranks:
    """A layout, as this process sees it. Without a mesh it is the only rank."""

    layout: Layout
    rank: int = 0
    mesh: DeviceMesh | None = None

    @classmethod
    def form(cls, layout: Layout, device_type: str = "cpu") -> Ranks:
        """Make the layout's process groups; every rank of the default group must call it."""
        if layout.world_size == 1:
            return cls(layout)
        if not dist.is_initialized() or dist.get_world_size() != layout.world_size:
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            raise WorkerError(
                f"the layout {layout} needs {layout.world_size} ranks, {world_size} have met; "
                "start one process a rank"
            )
        mesh = init_device_mesh(device_type, tuple(layout.sizes.values()), mesh_dim_names=AXES)
        for axis in AXES:
            _set_timeout(mesh[axis].get_group())
        return cls(layout, dist.get_rank(), mesh)

    def size(self, *axes: str) -> int:
        """Return the number of ranks that differ from this one in `axes` only, itself included."""
        return math.prod(getattr(self.layout, axis) for axis in axes)

    def index(self, *axes: str) -> int:
        """Return this rank's number among those, as `Layout.groups` lists them."""
        coordinates = self.layout.coordinates(self.rank)
        return self.layout.index(coordinates, (axis for axis in AXES if axis in axes))

    def submesh(self, *axes: str) -> DeviceMesh:
        """Return the one-dimensional mesh of those ranks; `axes` in the order of AXES."""
        assert self.mesh is not None, "a rank alone has no mesh"
        if len(axes) == 1:
            return self.mesh[axes[0]]
        flat = self.mesh[axes]._flatten("_".join(axes))
        _set_timeout(flat.get_group())
        return flat

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group of those ranks; None where this rank is the only one."""
        used = [axis for axis in AXES if axis in axes and getattr(self.layout, axis) > 1]
        return self.submesh(*used).get_group() if used else None

    def sum_over(self, value: Tensor, axes: Sequence[str]) -> Tensor:
        """Sum `value` over those ranks; `value` itself stays as it is."""
        group = self.group(*axes)
        if group is None:
            return value
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    def max_over(self, value: int, axes: Sequence[str]) -> int:
        """Return the largest of those ranks' values."""
        group = self.group(*axes)
        if group is None:
            return value
        assert self.mesh is not None
        largest = torch.tensor(value, device=self.mesh.device_type)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return int(largest)

    def cores(self) -> int:
        """Return this rank's share of its machine's cores; all ranks call it together."""
        machines = [platform.node()] * self.layout.world_size
        if self.mesh is not None:
            dist.all_gather_object(machines, platform.node())
        return max(1, len(os.sched_getaffinity(0)) // machines.count(platform.node()))


def _set_timeout(group: dist.ProcessGroup) -> None:
    """Give a group of a mesh the default group's deadline: it has torch's 30 minutes."""
    default_group = dist.distributed_c10d._get_default_group()
    device = "cpu" if "gloo" in str(dist.get_backend_config(default_group)) else "cuda"
    backend = default_group._get_backend(torch.device(device))
    dist.distributed_c10d._set_pg_timeout(backend.options._timeout, group)
