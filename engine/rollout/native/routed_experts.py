"""Which experts a mixture's routers choose while `GenericDecoder` decodes, for training to repeat.

Rollout routing replay (R3, arXiv:2510.11370). Only the choice is recorded, not its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.errors import ConfigError


class RoutedExperts:
    """The choices of a model's routers in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ConfigError for a model without routers that are known here."""
        self._routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._chosen: dict[int, Tensor] = {}  # by layer, [rows · columns, k]
        if not self._routers:
            raise ConfigError(
                "rollout.enable_rollout_routing_replay with a model without routers that are known "
                "here; it is for Mixtral, Qwen2-MoE and Qwen3-MoE: leave it out"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forward passes in this block are recorded."""
        handles = [
            router.register_forward_hook(self._hook(layer))
            for layer, router in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def latest(self, rows: int) -> Tensor:
        """Of the latest pass over so many `rows`: int16 `[rows, columns, layers · k]`."""
        layers = [self._chosen[layer] for layer in range(len(self._routers))]
        return torch.cat(layers, 1).to(torch.int16).unflatten(0, (rows, -1))

    def _hook(self, layer: int) -> Callable[..., None]:
        def record(_: nn.Module, __: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[layer] = output[2]

        return record
