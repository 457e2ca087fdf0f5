"""The model that an engine and its streams decode with: its version, and whether it may serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine.errors import RolloutError
from engine.rollout.requests import WeightGuard


class ServedModel:
    """One model in the trainer's storage, shared by all that decode with it."""

    def __init__(self, model: nn.Module) -> None:
        self._guard = WeightGuard("native")
        self._model: nn.Module | None = model
        self._parameters = list(model.parameters())

    @property
    def version(self) -> int:
        return self._guard.version

    def check(self) -> None:
        """Raise RolloutError unless the weights are whole."""
        self._guard.check()

    def get(self) -> nn.Module:
        """The model; raises RolloutError unless its weights are whole."""
        self._guard.check()
        assert self._model is not None
        return self._model

    @contextmanager
    def updating(self, model: nn.Module | None, version: int) -> Iterator[nn.Module]:
        """Serve `model` (None: the one it has) as policy `version` once the body has ended."""
        with self._guard.updating(version):
            if model is None and self._model is None:
                raise RolloutError("the engine was closed and has no model; pass one")
            chosen = self._model if model is None else model
            assert chosen is not None
            for name, parameter in chosen.named_parameters():
                if parameter.is_meta:
                    raise RolloutError(
                        f"parameter {name!r} is on the meta device and holds no numbers; load "
                        f"the model"
                    )
            self._model, self._parameters = chosen, list(chosen.parameters())
            yield chosen

    def release(self) -> None:
        """Let go of the model; nothing is served from now on."""
        self._guard.refuse("it was closed")
        self._model, self._parameters = None, []

    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        model: Any = self.get()
        return int(model.get_input_embeddings().weight.shape[0])

    def state(self) -> tuple[int, int, int]:
        """A value that differs once another model is served or a weight was written in place.

        It counts what autograd counts, so a write through `parameter.data` goes unseen.
        """
        writes = sum(p._version for p in self._parameters if not p.is_inference())
        return self.version, id(self._model), writes
