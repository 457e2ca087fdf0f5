"""Modules that hold and compute one rank's share of a matrix, and what moves between them.

Parameters are DTensors, so that sharding, checkpoints and optimizers know their whole shape;
computation is on local tensors, and DTensor's redistribution does the communication, in the forward
and in the backward pass. Which module of a model gets which share is `parallel.tensor`'s matter.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from engine.parallel.vocab_parallel import vocabulary_bounds

TOKENS = Shard(1)  # of activations [B, L, H]


def move(x: Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> Tensor:
    """Local part of a tensor that is placed as `now` → its local part when placed as `then`.

    The backward pass moves gradients the other way: a sum's terms each get the whole gradient, and
    the gradient of `then=Replicate()` must be the same on every rank.
    """
    return DTensor.from_local(x, mesh, [now]).redistribute(placements=[then]).to_local()


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Hand a replicated tensor to computation that differs by rank: gradients are summed."""
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def gather_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Token shards `[B, L/tp, H]` → `[B, L, H]`, for computation that differs by rank."""
    whole = DTensor.from_local(x, mesh, [TOKENS]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def pad_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Add columns of 0 to `[B, L, H]` until the mesh's size divides L."""
    lacking = -x.shape[1] % mesh.size()
    return F.pad(x, (0, 0, 0, lacking)) if lacking else x


class LocalCompute(nn.Module):
    """A module of any kind that computes with the local parts of its DTensor parameters.

    It is mixed into a module's own class, whose forward stays as it is.
    """

    sum_gradients: bool
    """Whether ranks put different activations through replicated parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self._parameters
        local = {name: _local(p, self.sum_gradients) for name, p in parameters.items()}
        self.__dict__["_parameters"] = local
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = parameters


class RowLinear(nn.Linear):
    """y = Σ_ranks x_local W_localᵀ + b; W is split by columns, x `[B, L, in/tp]` likewise.

    Gives y whole on every rank, or, with `over_tokens`, this rank's share of the padded tokens.
    """

    over_tokens: bool

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        mesh = weight.device_mesh
        y = F.linear(x, weight.to_local())
        if self.over_tokens:
            y = move(pad_tokens(y, mesh), mesh, Partial(), TOKENS)
        else:
            y = move(y, mesh, Partial(), Replicate())
        return y if self.bias is None else y + _local(self.bias, self.over_tokens)


class VocabularyEmbedding(nn.Embedding):
    """Rows of the table are split over ranks; each looks up what it has, and the sum is whole."""

    def forward(self, ids: Tensor) -> Tensor:
        weight: Any = self.weight
        mesh, table = weight.device_mesh, weight.to_local()
        start, stop = vocabulary_bounds(self.num_embeddings, mesh.size(), mesh.get_local_rank())
        elsewhere = (ids < start) | (ids >= stop)
        padding = self.padding_idx  # its row gets no gradient
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        found = F.embedding((ids - start).masked_fill(elsewhere, 0), table, padding)
        return move(found.masked_fill(elsewhere[..., None], 0), mesh, Partial(), Replicate())


def compute_locally(module: nn.Module, sum_gradients: bool) -> None:
    """Give `module`, whose parameters are DTensors, a forward pass on their local parts."""
    kind: type = type(module)
    module.__class__ = _local_class(kind)
    assert isinstance(module, LocalCompute)
    module.sum_gradients = sum_gradients


@cache
def _local_class(base: type) -> type[nn.Module]:
    return type(f"Local{base.__name__}", (LocalCompute, base), {})


def _local(parameter: Any, sum_gradients: bool) -> Any:
    if parameter is None:
        return None
    local: Tensor = parameter.to_local()
    replicated = parameter.placements == (Replicate(),)
    return enter(local, parameter.device_mesh) if sum_gradients and replicated else local


@torch.no_grad()
def distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a parameter that all ranks hold alike; no communication."""
    from torch.distributed.tensor import distribute_tensor

    spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)
