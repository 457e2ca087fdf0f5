"""What is checked of a call: shapes, ranges of options, and that a user's loss is finite."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError, DataError, EngineError
from engine.registry import origin


def shapes(tensors: Mapping[str, Tensor], mask: Tensor) -> None:
    """Raise DataError for a tensor that isn't of the shape of the response mask."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise DataError(
                f"{name} has shape {list(tensor.shape)} but response_mask {list(mask.shape)}"
            )


def same_shape(**tensors: Tensor) -> None:
    """Raise DataError unless all are of one shape."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        texts = (f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise DataError(f"{' and '.join(texts)} differ in shape")


def positive(**options: Any) -> None:
    """Raise ConfigError for an option that isn't above 0."""
    for name, value in options.items():
        if value <= 0:
            raise ConfigError(f"{name}={value} must be above 0")


def not_negative(**options: Any) -> None:
    """Raise ConfigError for an option below 0; None is left alone."""
    for name, value in options.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value} must not be negative")


def finite_loss(
    owner: str, formula: Callable[..., object], loss: Tensor, *inputs: Tensor, mask: Tensor
) -> None:
    """Raise EngineError, now or in the backward pass, where a plugin's formula gives NaN or ±∞.

    `owner` is the loss in the message, e.g. "policy loss 'mine'"; `inputs`, of the shape of `mask`,
    are what the formula was given: where these are not finite it has no fault.
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
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: check("a gradient", gradient, *arriving))


def _finite(values: Tensor, mask: Tensor) -> bool:
    return bool((torch.isfinite(values.detach()) | ~mask.bool()).all())
