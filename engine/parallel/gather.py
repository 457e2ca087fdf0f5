"""Whole parameters out of, and into, a model that is spread over ranks: one at a time.

For what reads or writes Hugging Face folders, and for other layouts' checkpoints. Names are those
of the plain transformers model. Moving weights to a rollout engine is the resharding's matter: it
sends slices, not wholes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from engine.errors import CheckpointError
from engine.parallel import fsdp
from engine.parallel.gradients import local
from engine.parallel.process_groups import Ranks


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the whole model, and the pipeline stage that has it."""

    name: str  # e.g. "model.layers.3.mlp.up_proj.weight"
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    stage: int


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """This rank's live parameters and persistent buffers by name; tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


@torch.no_grad()
def full_parameters(
    model: nn.Module, ranks: Ranks, copies: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer, whole, in its own dtype, on the ranks' device.

    All ranks must iterate to the end together: each step is a collective, gives all of them the
    same name and tensor, and needs memory for that one. A tensor may be the model's own storage:
    read it, or copy. `copies` names this rank's tensors that repeat one of another stage (the
    second end of a tied embedding) and the name that the one is given under; they are left out.
    """
    fsdp.reshard(model)
    own = {n: t for n, t in named_tensors(model).items() if n not in (copies or {})}
    stages = ranks.group("pp")
    for entry in _entries(own, ranks):
        if entry.stage == ranks.index("pp"):
            whole = _whole(own[entry.name])
        else:
            whole = torch.empty(entry.shape, dtype=entry.dtype, device=_device(ranks))
        if stages is not None:
            dist.broadcast(whole, group_src=entry.stage, group=stages)
        yield entry.name, whole


@torch.no_grad()
def load_full(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Copy whole tensors into what this rank stores of them, in place and without traffic.

    `tensors` has every name that `full_parameters` gives, or that this rank's model has; `copies`
    is as there. Raises CheckpointError, before anything has changed, for a missing name or a wrong
    shape.
    """
    fsdp.reshard(model)
    own = named_tensors(model)
    sources = {name: (copies or {}).get(name, name) for name in own}
    for name, tensor in own.items():
        given = tensors.get(sources[name])
        if given is None or given.shape != tensor.shape:
            there = "missing" if given is None else f"of shape {list(given.shape)}"
            raise CheckpointError(
                f"the weights are of another model: {sources[name]!r} is {there}, this model wants "
                f"{list(tensor.shape)}; load those of the same configuration"
            )
    for name, tensor in own.items():
        local(tensor).copy_(part_of(tensors[sources[name]], tensor))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, a view, that this rank stores of a parameter `like` it.

    Raises ValueError for placements other than those of FSDP and tensor parallelism.
    """
    if not isinstance(like, DTensor):
        return whole
    where = like.device_mesh.get_coordinate()
    assert where is not None, "this rank is not on the parameter's mesh"
    cuts = list(zip(like.placements, like.device_mesh.shape, where, strict=True))
    # FSDP cuts what tensor parallelism has left, though its mesh dimension comes before.
    for placement, size, index in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        if isinstance(placement, Shard | _StridedShard):
            rows = whole.shape[placement.dim]
            each = -(-rows // size)
            start = min(index * each, rows)
            whole = whole.narrow(placement.dim, start, min(each, rows - start))
        elif not placement.is_replicate():
            raise ValueError(f"a parameter can't be loaded into the placement {placement}")
    return whole


def _whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, by collectives of the ranks that share it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Any = tensor.detach().to(tensor.device_mesh.device_type)  # it may be offloaded
    placements = list(tensor.placements)
    for dim in range(len(placements)):  # in steps, as FSDP's cuts are inside tensor parallelism's
        placements[dim] = Replicate()
        part = part.redistribute(placements=placements)
    return local(part)


def _entries(own: Mapping[str, Tensor], ranks: Ranks) -> list[_Entry]:
    """What `full_parameters` gives: the first stage's tensors in their order, then the next's."""
    stage, group = ranks.index("pp"), ranks.group("pp")
    mine = [_Entry(name, tuple(t.shape), t.dtype, stage) for name, t in own.items()]
    if group is None:
        return mine
    stages: list[list[_Entry]] = [[] for _ in range(ranks.size("pp"))]
    dist.all_gather_object(stages, mine, group=group)
    found: dict[str, _Entry] = {}
    for entry in (entry for entries in stages for entry in entries):
        found.setdefault(entry.name, entry)  # a buffer may be on all stages
    return list(found.values())


def _device(ranks: Ranks) -> torch.device:
    return torch.device(ranks.mesh.device_type if ranks.mesh is not None else "cpu")
