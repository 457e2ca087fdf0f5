"""Giving a vLLM model the trainer's weights: shared where the layouts allow, else copied in place.

vLLM fuses some matrices (q, k and v; gate and up) by stacking rows and pads vocabularies with rows.
So each trainer parameter can BE a run of rows of a vLLM parameter: `share` makes it point there,
and optimizer steps in place then need no copy at all. Where dtypes, devices or layouts differ,
`load` uses vLLM's own loaders, tensor by tensor, on the live model. Neither reloads an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RolloutError


def plan_sharing(model: nn.Module, target: nn.Module) -> dict[str, Tensor] | None:
    """Map each trainer parameter to the rows of vLLM's parameter that it can be; None if any can't.

    Call it after `load`: a run of rows counts only if vLLM's own loader has put the very same
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


class WeightLoad:
    """One update of a live vLLM model by vLLM's own loaders, in as many calls as it takes."""

    def __init__(self, target: nn.Module) -> None:
        self._target = target
        self._sent: set[str] = set()  # in vLLM's naming, parts of fused matrices apart
        self._loaded: set[str] | None = set()  # None: this model's loader doesn't say

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors, by the trainer's names, into vLLM's parameters; a rank its shards."""
        loader: Any = self._target
        loaded = loader.load_weights(self._recording(named))
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def _recording(self, named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        mapper = rename_mapper(self._target)
        for name, tensor in named:
            self._sent.add((mapper.map_name(name) if mapper is not None else None) or name)
            yield name, tensor

    def check_whole(self) -> None:
        """Raise RolloutError unless all of vLLM's parameters, and all their parts, were given."""
        missing = set() if self._loaded is None else self._unfilled(self._loaded)
        if missing:
            first = ", ".join(sorted(missing)[:3])
            raise RolloutError(
                f"the update lacks {len(missing)} of the model's weights, such as {first}; give "
                "every parameter, or use rollout.engine=native for this architecture"
            )

    def _unfilled(self, loaded: set[str]) -> set[str]:
        parameters = {name for name, _ in self._target.named_parameters()}
        known = {_plain_name(name) for name in loaded}
        missing = {name for name in parameters if _plain_name(name) not in known}
        parts: dict[str, list[str]] = getattr(self._target, "packed_modules_mapping", {})
        for name in parameters:
            plain = _plain_name(name)
            entries = plain.split(".")
            for at, piece in enumerate(entries):
                for part in parts.get(piece, ()):
                    source = ".".join([*entries[:at], part, *entries[at + 1 :]])
                    if source not in self._sent and plain not in self._sent:
                        missing.add(source)
        return missing


def rename_mapper(target: nn.Module) -> Any:
    """vLLM's way from transformers' names to `target`'s, without fusing; None if they are alike."""
    mapper: Any = getattr(target, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if mapper is not None else None


def _plain_name(name: str) -> str:
    """A parameter's name without vLLM's own LoRA layer around its module."""
    return name.replace(".base_layer.", ".")


def _fused_names(target: nn.Module) -> dict[str, str]:
    packed: dict[str, list[str]] = getattr(target, "packed_modules_mapping", {})
    return {part: whole for whole, parts in packed.items() for part in parts}


def _fused_name(name: str, fused: dict[str, str]) -> str:
    """The vLLM parameter that contains the trainer's `name`."""
    return ".".join(fused.get(piece, piece) for piece in name.split("."))
