"""The policy's weights on their way from the actor to rollout workers in other processes.

Of a policy with adapters only these travel: both sides loaded the same base, which never changes.
They travel as one row of bytes: one object in the store, whatever their dtypes and number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.errors import WorkerError
from engine.models import adapter_parameters, has_adapters
from engine.parallel.full import named_tensors
from engine.workers.spread import SpreadModel


def pack_policy(shared: dict[str, Any]) -> Batch:
    """`weights [1, bytes]` uint8 of `shared["policy"]`, and `policy_version [1]`.

    Where the policy is spread (`shared["spread"]`) all its ranks call it, and rank 0 has the
    weights.
    """
    version = {"policy_version": torch.tensor([shared["policy_version"]])}
    spread = shared.get("spread")
    if spread is None or spread.ranks.layout.world_size == 1:
        tensors = _tensors(shared["policy"])
    else:
        own = trained_tensors(spread)
        if spread.ranks.rank:
            return Batch(version)
        tensors = [own[name] for name in sorted(own)]
    parts = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors]
    return Batch({"weights": torch.cat(parts)[None]} | version)


def trained_tensors(spread: SpreadModel) -> dict[str, Tensor]:
    """Whole tensors of a spread policy that rollout must have anew, on rank 0; `{}` on others.

    All ranks call it together. Of a policy with adapters: these alone.
    """
    adapters = has_adapters(spread.module)
    keep = spread.ranks.rank == 0
    return {
        name: whole.to("cpu", copy=True)
        for name, whole in spread.whole_tensors()
        if keep and (not adapters or ".lora_" in name)
    }


def gathered(spread: SpreadModel, load: Callable[[], PreTrainedModel] | None) -> Any:
    """A whole model with a spread policy's weights, where `load` is given (rank 0); else None.

    `load()` makes the policy anew, with its base and adapters. All ranks call it together.
    """
    whole = trained_tensors(spread)
    if load is None:
        return None
    model = load()
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name in whole:
                tensor.copy_(whole[name])
    return model


def load_policy(shared: dict[str, Any], packed: Batch) -> int:
    """Copy packed weights into `shared["policy"]`, in place; return their version.

    Raises WorkerError when they are of a model of another size.
    """
    tensors, data = _tensors(shared["policy"]), packed["weights"][0]
    size = sum(t.nbytes for t in tensors)
    if size != data.numel():
        raise WorkerError(
            f"the actor sent {data.numel()} bytes of weights, this process's policy has {size}; "
            "both must be built from the same model folder, dtype and adapters"
        )
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            piece = data[at : at + tensor.nbytes]
            at += tensor.nbytes
            # A piece may start off the dtype's alignment; a copy of it does not.
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
    shared["policy_version"] = int(packed["policy_version"][0])
    return int(shared["policy_version"])


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters (tied ones once) and buffers that a state dict holds, in order of name.

    Of a model with adapters: these alone.
    """
    if has_adapters(model):
        return [p.data for _, p in sorted(adapter_parameters(model).items())]
    named: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    named |= {name: b for name, b in model.named_buffers() if name in kept}
    return [named[name].data for name in sorted(named)]
