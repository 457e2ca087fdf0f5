"""The model that an engine and its streams decode with: its version, and whether it may serve.

It is the trainer's whole model, or on a tensor-parallel rank the slices of it that the rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine.errors import RolloutError
from engine.rollout.native.tensor_parallel import TensorParallel
from engine.rollout.native.tp_shards import SlicedModel
from engine.rollout.requests import WeightGuard

Model = nn.Module | SlicedModel


class ServedModel:
    """One model in the trainer's storage, shared by all that decode with it."""

    def __init__(self, model: Model) -> None:
        self._guard = WeightGuard("native")
        self._model: Model | None = model
        self._parameters = list(model.parameters())

    @property
    def version(self) -> int:
        return self._guard.version

    def check(self) -> None:
        """Raise RolloutError unless the weights are whole."""
        self._guard.check()

    def get(self) -> Model:
        """The model; raises RolloutError unless its weights are whole."""
        self._guard.check()
        assert self._model is not None
        return self._model

    @property
    def tp(self) -> TensorParallel | None:
        """The ranks that decode together with this one."""
        return self._model.tp if isinstance(self._model, SlicedModel) else None

    @contextmanager
    def updating(self, model: Model | None, version: int) -> Iterator[Model]:
        """Serve `model` (None: the one it has) as policy `version` once the body has ended."""
        with self._guard.updating(version):
            if model is None and self._model is None:
                raise RolloutError("the engine was closed and has no model; pass one")
            chosen = self._model if model is None else model
            assert chosen is not None
            named = dict(chosen.named_parameters())
            for name, parameter in named.items():
                if parameter.is_meta:
                    raise RolloutError(
                        f"parameter {name!r} is on the meta device and holds no numbers; load "
                        f"the model"
                    )
            self._model, self._parameters = chosen, list(named.values())
            yield chosen

    def release(self) -> None:
        """Let go of the model; nothing is served from now on."""
        self._guard.refuse("it was closed")
        self._model, self._parameters = None, []

    def vocabulary(self) -> int:
        """Rows of the input embedding, on all ranks together."""
        model: Any = self.get()
        if isinstance(model, SlicedModel):
            return int(model.config.vocab_size)
        return int(model.get_input_embeddings().weight.shape[0])

    def state(self) -> tuple[int, int, int]:
        """A value that differs once another model is served or a weight was written in place.

        It counts what autograd counts, so a write through `parameter.data`, and one by a fused
        optimizer, goes unseen.
        """
        writes = sum(p._version for p in self._parameters if not p.is_inference())
        return self.version, id(self._model), writes


def whole(model: Model) -> nn.Module:
    """`model`, which is no slice of one: streams are not opened over slices."""
    assert isinstance(model, nn.Module)
    return model
