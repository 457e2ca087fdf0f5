"""Where a vLLM engine's weights live, behind one face: in this process, or in worker processes.

A holder takes a trainer's model (shared, copied, with adapters merged or beside it) or a stream of
tensors. Versions and refusing to serve are `engine.py`'s matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.vllm import adapters, shared_memory, sources, weights
from engine.rollout.vllm.options import DTYPES, Options
from engine.rollout.vllm.workers import Channel, Watch

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A model's weights but its adapters, as they were: another value after any counted write."""

    model: nn.Module
    writes: tuple[tuple[int, int], ...]  # address and version of each

    @classmethod
    def of(cls, model: nn.Module) -> Frozen:
        frozen = (p for name, p in model.named_parameters() if ".lora_" not in name)
        return cls(model, tuple((p.data_ptr(), p._version) for p in frozen))


class Holder(ABC):
    """The weights of one engine."""

    def __init__(self, own_adapters: bool) -> None:
        self._own_adapters = own_adapters  # vLLM applies adapters itself
        self._known: Frozen | None = None  # what is here of a model with adapters

    shares_storage = False

    def take(self, model: nn.Module) -> None:
        """Hold `model`'s current weights; of a known model with adapters only these are new."""
        frozen = Frozen.of(model) if sources.has_adapters(model) else None
        known, self._known = frozen is not None and self._known == frozen, None
        if self._own_adapters and not sources.has_adapters(model):
            raise RolloutError(
                "an engine with lora=adapter takes a model with adapters, and this one has no "
                "adapters; use lora=merged"
            )
        if self._own_adapters:
            if not known:
                self._load(sources.base_weights(model), whole=True)
            self._swap(sources.adapter_weights(model), sources.adapter_config(model))
        elif sources.has_adapters(model):
            self._load(sources.merged_weights(model, changed_only=known), whole=not known)
        else:
            self._take_plain(model)
        self._known = frozen

    def load(self, named: Named) -> None:
        """Hold the whole tensors `named`, all of a model."""
        if self._own_adapters:
            raise RolloutError(
                "an engine with lora=adapter takes a model, not a stream; use lora=merged"
            )
        self._known = None
        self._load(named, whole=True)

    def forget(self) -> None:
        """Take the next model whole: what was here is lost."""
        self._known = None

    def release(self) -> None:  # noqa: B027 (most share nothing)
        """Give the trainer's parameters storage of their own, if they share any."""

    @abstractmethod
    def storages(self) -> dict[str, Tensor]:
        """vLLM's live parameters in this process, by name, to be written in place."""

    @abstractmethod
    def _load(self, named: Named, whole: bool) -> None: ...

    @abstractmethod
    def _swap(self, named: Named, config: dict[str, Any]) -> None: ...

    def _take_plain(self, model: nn.Module) -> None:
        self._load(sources.merged_weights(model), whole=True)


class LocalHolder(Holder):
    """Weights in this process: the trainer's own storage wherever layouts and dtypes agree."""

    def __init__(self, llm: Any, options: Options) -> None:
        super().__init__(bool(options.adapter_rank))
        # `apply_model` would give a slice's answer for all ranks' and wait for none of them.
        shared_memory.forget_group_names()
        self._worker: Any = llm.collective_rpc(_itself)[0]
        self.target: nn.Module = self._worker.model_runner.get_model()
        # Weights that sleep would take away can't be the trainer's.
        sleeps = bool(llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        self._shareable = options.share or not sleeps
        self._views: dict[str, Tensor] | None = None
        self._sharer: nn.Module | None = None  # whose parameters `_views` are
        self._watched: weights.Watched | None = None  # these parameters
        self._apart: nn.Module | None = None  # a model found not to fit

    @property
    def shares_storage(self) -> bool:  # type: ignore[override]
        """True if vLLM's parameters are the trainer's."""
        return self._views is not None

    def storages(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.target.named_parameters()}

    def release(self) -> None:
        if self._sharer is not None and self._views is not None:
            weights.release(self._sharer, self._views)
        self._views = self._sharer = self._watched = None

    def _take_plain(self, model: nn.Module) -> None:
        if self._sharer is model and self._watched is not None and self._watched.unmoved():
            return
        self._load(sources.merged_weights(model), whole=True)
        if self._apart is model or not self._shareable:
            return
        views = weights.plan(model, self.target)
        if views is None:
            self._apart = model
            return
        weights.share(model, views)
        self._views, self._sharer, self._watched = views, model, weights.Watched(model)

    def _load(self, named: Named, whole: bool) -> None:
        if self._watched is not None and not self._watched.unmoved():
            self._views = self._sharer = self._watched = None  # the trainer moved its weights
        self.release()
        loading = weights.Loading(self.target)
        loading.load(named)
        if whole:
            loading.check_whole()

    def _swap(self, named: Named, config: dict[str, Any]) -> None:
        adapters.swap(self._worker, {name: t.detach().clone() for name, t in named}, config)


class WorkerHolder(Holder):
    """Weights in vLLM's worker processes; each takes its slices from shared memory."""

    def __init__(self, llm: Any, options: Options) -> None:
        super().__init__(bool(options.adapter_rank))
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        self.watch = Watch(executor)
        self._channel = Channel(
            executor, self.watch, options.bucket_mb << 20, DTYPES[options.dtype]
        )
        self._channel.forget_names()

    def storages(self) -> dict[str, Tensor]:
        raise RolloutError(
            "vLLM's parameters are in its worker processes, where this one can't write; use "
            "update_weights or update_from, or an engine with rank_groups"
        )

    def _load(self, named: Named, whole: bool) -> None:
        with torch.no_grad():
            self._channel.send("weights", named, whole)

    def _swap(self, named: Named, config: dict[str, Any]) -> None:
        with torch.no_grad():
            self._channel.send("adapter", named, config)


def _itself(worker: Any) -> Any:
    return getattr(worker, "worker", worker)
