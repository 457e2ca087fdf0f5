"""Sharing one storage between a trainer's model and vLLM's, where the layouts allow it.

vLLM fuses some matrices (q, k and v; gate and up) by stacking rows and pads vocabularies with rows.
So each trainer parameter can BE a run of rows of a vLLM parameter: `share` makes it point there,
and optimizer steps in place then need no copy at all. Where dtypes, devices or layouts differ,
weights are copied (`weight_load.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plan_sharing(model: nn.Module, target: nn.Module) -> dict[str, Tensor] | None:
    """Map each trainer parameter to the rows of vLLM's parameter that it can be; None if any can't.

    Call it after an update: a run of rows counts only if vLLM's own loader has put the very same
    numbers there. Every row of every vLLM parameter must have one owner, but for padding.
    """
    fused = _fused_names(target)
    parameters = dict(target.named_parameters())
    filled = dict.fromkeys(parameters, 0)
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        home = _fused_name(name, fused)
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


class ParameterSnapshot:
    """The parameter objects and addresses of a model; checking them costs microseconds.

    A walk over the model's names costs more than all the rest of a switch, so the check reads the
    modules' own tables of parameters and submodules.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = [
            table for module in model.modules() for table in (module._parameters, module._modules)
        ]
        self._sizes = [(table, len(table)) for table in tables]
        self._objects = [(table, name, one) for table in tables for name, one in table.items()]
        self._storage = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]

    def is_current(self) -> bool:
        """Whether all are the same objects, no more and no fewer, on the same storage."""
        return (
            all(len(table) == size for table, size in self._sizes)
            and all(table.get(name) is one for table, name, one in self._objects)
            and all(parameter.data_ptr() == address for parameter, address in self._storage)
        )


def release(model: nn.Module, views: dict[str, Tensor]) -> None:
    """Give the trainer's parameters storage of their own again."""
    for name, parameter in model.named_parameters():
        if name in views and parameter.data_ptr() == views[name].data_ptr():
            parameter.data = parameter.data.clone()


def _fused_names(target: nn.Module) -> dict[str, str]:
    packed: dict[str, list[str]] = getattr(target, "packed_modules_mapping", {})
    return {part: whole for whole, parts in packed.items() for part in parts}


def _fused_name(name: str, fused: dict[str, str]) -> str:
    """The vLLM parameter that contains the trainer's `name`."""
    return ".".join(fused.get(piece, piece) for piece in name.split("."))
