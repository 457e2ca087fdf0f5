"""Float32 masters of weights that are stored in bfloat16 or float16 (arXiv:1710.03740).

Forward, backward and rollout read the working weights. The optimizer updates their masters and
writes the rounded result into the working weights in place, so that whatever shares their storage
sees it. An update below the working dtype's resolution is lost in the weight and not in its master.
Gradients are accumulated in float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine.parallel.module_shards import local_tensor

REDUCED = (torch.bfloat16, torch.float16)


def has_master(parameter: Tensor) -> bool:
    """Whether the optimizer keeps a float32 master of a parameter."""
    return parameter.dtype in REDUCED


def make_master(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """A float32 copy of this rank's part of a parameter."""
    return local_tensor(parameter).detach().to(device, torch.float32, copy=True)


@torch.no_grad()
def write_working_weights(parameters: Iterable[nn.Parameter], masters: Iterable[Tensor]) -> None:
    """Round masters into their parameters, in place; both on one device."""
    working = [local_tensor(parameter) for parameter in parameters]
    if working:
        torch._foreach_copy_(working, list(masters))


def accumulate_in_float32(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Make backward passes leave float32 gradients in `parameters` of `model`, and add to them.

    FSDP reduces in float32, casts the sum to the parameter's dtype and stores that: it is widened
    then, and what later passes add is added in float32.
    """
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for parameter in parameters:
        if not sharded:
            parameter.grad_dtype = torch.float32
            continue
        parameter.grad_dtype = None  # any
        parameter.register_post_accumulate_grad_hook(_widen)


def _widen(parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        parameter.grad = parameter.grad.float()
