"""Giving a vLLM model the trainer's weights: shared where the layouts allow, else copied in place.

vLLM fuses some matrices (q, k and v; gate and up) by stacking rows and pads vocabularies with rows.
So each trainer parameter can BE a run of rows of a vLLM parameter: `share` makes it point there,
and optimizer steps in place then need no copy at all. Where dtypes, devices or layouts differ,
`copy_into` uses vLLM's own loaders, tensor by tensor, on the live model. Neither reloads an engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RolloutError


def plan(model: nn.Module, target: nn.Module) -> dict[str, Tensor] | None:
    """Map each trainer parameter to the rows of vLLM's parameter that it can be; None if any can't.

    Call it after `copy_into`: a run of rows counts only if vLLM's own loader has put the very same
    numbers there. Every row of every vLLM parameter must have one owner, but for padding.
    """
    packed: dict[str, list[str]] = getattr(target, "packed_modules_mapping", {})
    whole_of = {part: whole for whole, parts in packed.items() for part in parts}
    parameters = dict(target.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        home = ".".join(whole_of.get(piece, piece) for piece in name.split("."))
        if home not in parameters or type(parameter.data) is not Tensor:
            return None
        start = filled[home]
        filled[home] = start + parameter.shape[0]
        view = parameters[home].data[start : filled[home]]
        if not _same(view, parameter.data):
            return None
        views[name] = view
    for home, whole in parameters.items():
        padded = "embed_tokens" in home or "lm_head" in home
        if filled[home] != whole.shape[0] and not (padded and filled[home]):
            return None
    return views


def _same(view: Tensor, data: Tensor) -> bool:
    layout = (view.shape, view.dtype, view.device) == (data.shape, data.dtype, data.device)
    return layout and torch.equal(view, data)


def share(model: nn.Module, views: dict[str, Tensor]) -> None:
    """Make the trainer's parameters `views`, which hold the same numbers."""
    for name, parameter in model.named_parameters():
        parameter.data = views[name]


def is_shared(model: nn.Module, views: dict[str, Tensor]) -> bool:
    """Tell whether all of the trainer's parameters still are `views`."""
    return all(
        name in views
        and parameter.data_ptr() == views[name].data_ptr()
        and parameter.shape == views[name].shape
        for name, parameter in model.named_parameters()
    )


def release(model: nn.Module, views: dict[str, Tensor]) -> None:
    """Give the trainer's parameters storage of their own again."""
    for name, parameter in model.named_parameters():
        if name in views and parameter.data_ptr() == views[name].data_ptr():
            parameter.data = parameter.data.clone()


def copy_into(target: nn.Module, model: nn.Module) -> None:
    """Copy the trainer's weights into vLLM's live parameters; RolloutError if any is missed."""
    loader: Any = target
    loaded = loader.load_weights((name, p.data) for name, p in model.named_parameters())
    expected = {name for name, _ in target.named_parameters()}
    missed = expected - set(loaded if loaded is not None else expected)
    if missed:
        raise RolloutError(
            f"the trainer's model has no weights for vLLM's {', '.join(sorted(missed))}; use "
            f"rollout.engine=native for this architecture"
        )
