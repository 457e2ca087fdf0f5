"""The policy's weights on their way from the actor to rollout workers in other processes.

Of a policy with adapters only these travel: both sides loaded the same base, which never changes.
They travel as one row of bytes, one object in the store, whatever their dtypes and number; how, and
how much of them, is `sync`'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.models import adapter_parameters, has_adapters
from engine.parallel.gather import named_tensors
from engine.runtime.sharded_model import ShardedModel
from engine.weight_transfer.endpoints import WeightReceiver, WeightSender


def pack_policy(shared: dict[str, Any], sender: WeightSender | None = None) -> Batch:
    """The policy's weights, whole, and their version: what `WeightSender.send` gives.

    Where the policy is sharded (`shared["sharded"]`) all its ranks call it, and rank 0 has the
    weights.
    """
    named, sharded, version = (
        _policy_tensors(shared),
        shared.get("sharded"),
        shared["policy_version"],
    )
    if sharded is not None and sharded.ranks.rank:
        for _ in named:  # a collective each
            pass
        return Batch({"policy_version": torch.tensor([version])})
    return (sender or WeightSender()).send(named, version)


def _policy_tensors(shared: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that rollout must have anew; of a policy with adapters, these alone."""
    sharded = shared.get("sharded")
    if sharded is None or sharded.ranks.layout.world_size == 1:
        yield from _tensors(shared["policy"]).items()
        return
    adapters = has_adapters(sharded.module)
    for name, whole in sharded.full_tensors():
        if not adapters or ".lora_" in name:
            yield name, whole


def trained_tensors(sharded: ShardedModel) -> dict[str, Tensor]:
    """Whole tensors of a sharded policy that rollout must have anew, on rank 0; `{}` on others.

    All ranks call it together. Of a policy with adapters: these alone.
    """
    adapters = has_adapters(sharded.module)
    keep = sharded.ranks.rank == 0
    return {
        name: whole.to("cpu", copy=True)
        for name, whole in sharded.full_tensors()
        if keep and (not adapters or ".lora_" in name)
    }


def gathered(sharded: ShardedModel, load: Callable[[], PreTrainedModel] | None) -> Any:
    """A whole model with a sharded policy's weights, where `load` is given (rank 0); else None.

    `load()` makes the policy anew, with its base and adapters. All ranks call it together.
    """
    whole = trained_tensors(sharded)
    if load is None:
        return None
    model = load()
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name in whole:
                tensor.copy_(whole[name])
    return model


def load_policy(shared: dict[str, Any], packed: Batch) -> int:
    """Write weights, whole or a delta, into `shared["policy"]`, in place; return their version.

    Raises WorkerError when they are of a model of another size, and WeightSyncError where the
    process needs them whole: it samples nothing until then.
    """
    receiver: WeightReceiver = shared.setdefault("receiver", WeightReceiver())
    version = receiver.load(_tensors(shared["policy"]), packed)
    shared["policy_version"] = version
    return version


def check_weights(shared: dict[str, Any]) -> None:
    """Raise WeightSyncError where this process failed to load the last weights it was sent."""
    if "receiver" in shared:
        shared["receiver"].check()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and buffers that a state dict holds, by name.

    Of a model with adapters: these alone.
    """
    if has_adapters(model):
        return {name: p.data for name, p in adapter_parameters(model).items()}
    named: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    named |= {name: b for name, b in model.named_buffers() if name in kept}
    return {name: tensor.data for name, tensor in named.items()}
