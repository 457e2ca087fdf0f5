"""A loss from outside the package is named where it, or its gradient, is not finite.

What lives here: the check, which waits for the device and is therefore left out for the engine's
own formulas. What does not: what diverging weights lead to (`engine.runtime.optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.registry import origin


def require_finite_loss(
    owner: str, formula: Callable[..., object], loss: Tensor, *inputs: Tensor, mask: Tensor
) -> None:
    """Raise EngineError, now or in the backward pass, where a plugin's formula gives NaN or ±∞.

    `owner` is the loss in the message, e.g. "policy loss 'mine'"; `inputs` are what the formula was
    given, of the shape of `mask`, those with a gradient among them. Inputs that are not finite
    themselves are no fault of its.
    """
    if formula.__module__.startswith("engine."):
        return

    def check(what: str, values: Tensor, *causes: Tensor) -> None:
        if not _finite(values, mask) and all(_finite(cause, mask) for cause in causes):
            raise EngineError(
                f"{owner} ({origin(formula)}) has {what} that is not finite, though what it was "
                "given is finite; correct its formula"
            )

    check("a loss", loss, *inputs)
    if not loss.requires_grad:
        return
    arriving: list[Tensor] = []
    loss.register_hook(arriving.append)
    for given in inputs:
        if given.requires_grad:
            given.register_hook(lambda gradient: check("a gradient", gradient, *arriving))


def _finite(values: Tensor, mask: Tensor) -> bool:
    return bool((torch.isfinite(values.detach()) | ~mask.bool()).all())
