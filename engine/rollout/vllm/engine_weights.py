"""The weights of a vLLM engine, in this process or in worker processes, and their updates.

They are loaded from a trainer's model (shared, copied, with adapters merged or separate) or from a
stream of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout import trainer_weights
from engine.rollout.vllm import adapters, shared_memory, weight_sharing
from engine.rollout.vllm.options import DTYPES, VllmOptions
from engine.rollout.vllm.vllm_types import LLM, Worker
from engine.rollout.vllm.weight_load import begin_load
from engine.rollout.vllm.worker_group import WeightChannel, WorkerMonitor

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Identifies a model's weights but its adapters; unequal after a write that autograd counts."""

    model: nn.Module
    writes: tuple[tuple[int, int], ...]  # address and version of each

    @classmethod
    def of(cls, model: nn.Module) -> BaseWeights:
        frozen = (p for name, p in model.named_parameters() if ".lora_" not in name)
        return cls(model, tuple((p.data_ptr(), p._version) for p in frozen))


class EngineWeights(ABC):
    """The weights of one engine."""

    def __init__(self, options: VllmOptions) -> None:
        self._own_adapters = bool(options.adapter_rank)  # vLLM applies adapters itself
        self._quantized = bool(options.tuning.quantization)
        self._base: BaseWeights | None = None  # loaded base of a model with adapters

    shares_storage = False

    def load_model(self, model: nn.Module) -> None:
        """Load `model`'s current weights; of a known base with adapters only the adapters."""
        base = BaseWeights.of(model) if trainer_weights.has_adapters(model) else None
        known, self._base = base is not None and self._base == base, None
        known = known and not self._quantized  # a layer is quantised as a whole
        if self._own_adapters and not trainer_weights.has_adapters(model):
            raise RolloutError(
                "an engine with lora=adapter takes a model with adapters, and this one has no "
                "adapters; use lora=merged"
            )
        if self._own_adapters:
            if not known:
                self._load(trainer_weights.base_weights(model), whole=True)
            self._load_adapter(
                trainer_weights.adapter_weights(model), trainer_weights.adapter_config(model)
            )
        elif trainer_weights.has_adapters(model):
            self._load(trainer_weights.merged_weights(model, changed_only=known), whole=not known)
        else:
            self._load_plain(model)
        self._base = base

    def load_tensors(self, named: Named) -> None:
        """Load the whole tensors `named`, all of a model."""
        if self._own_adapters:
            raise RolloutError(
                "an engine with lora=adapter takes a model, not a stream; use lora=merged"
            )
        self._base = None
        self._load(named, whole=True)

    def invalidate(self) -> None:
        """Load the next model whole: the weights loaded before are lost."""
        self._base = None

    def release(self) -> None:  # noqa: B027 (most share nothing)
        """Give the trainer's parameters storage of their own, if they share any."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """vLLM's live parameters in this process, by name, to be written in place."""

    @abstractmethod
    def _load(self, named: Named, whole: bool) -> None: ...

    @abstractmethod
    def _load_adapter(self, named: Named, config: dict[str, object]) -> None: ...

    def _load_plain(self, model: nn.Module) -> None:
        self._load(trainer_weights.merged_weights(model), whole=True)


class InProcessWeights(EngineWeights):
    """Weights in this process: the trainer's own storage wherever layouts and dtypes agree."""

    def __init__(self, llm: LLM, options: VllmOptions) -> None:
        super().__init__(options)
        # `apply_model` would return one shard's answer for all ranks and not wait for the others.
        shared_memory.unlink_group_names()
        self._worker: Worker = llm.collective_rpc(_unwrapped)[0]
        self.target: nn.Module = self._worker.model_runner.get_model()
        # Weights that sleep would take away can't be the trainer's.
        sleeps = bool(llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        self._shareable = not self._quantized and (options.share or not sleeps)
        self._views: dict[str, Tensor] | None = None
        self._shared: nn.Module | None = None  # the model whose parameters `_views` are
        self._snapshot: weight_sharing.ParameterSnapshot | None = None  # of these parameters
        self._not_shareable: nn.Module | None = None  # a model found not to fit

    @property
    def shares_storage(self) -> bool:  # type: ignore[override]
        """True if vLLM's parameters are the trainer's."""
        return self._views is not None

    def parameters(self) -> dict[str, Tensor]:
        if self._quantized:
            raise RolloutError(
                "vLLM's parameters are quantised, so they can't be written in place; "
                "use update_weights or update_from"
            )
        return {name: parameter.data for name, parameter in self.target.named_parameters()}

    def release(self) -> None:
        if self._shared is not None and self._views is not None:
            weight_sharing.release(self._shared, self._views)
        self._views = self._shared = self._snapshot = None

    def _load_plain(self, model: nn.Module) -> None:
        if self._shared is model and self._snapshot is not None and self._snapshot.is_current():
            return
        self._load(trainer_weights.merged_weights(model), whole=True)
        if self._not_shareable is model or not self._shareable:
            return
        views = weight_sharing.plan_sharing(model, self.target)
        if views is None:
            self._not_shareable = model
            return
        weight_sharing.share(model, views)
        self._views, self._shared, self._snapshot = (
            views,
            model,
            weight_sharing.ParameterSnapshot(model),
        )

    def _load(self, named: Named, whole: bool) -> None:
        if self._snapshot is not None and not self._snapshot.is_current():
            self._views = self._shared = self._snapshot = None  # the trainer replaced its tensors
        self.release()
        loading = begin_load(self._worker.model_runner)
        loading.load(named)
        loading.finish(whole)

    def _load_adapter(self, named: Named, config: dict[str, object]) -> None:
        adapters.load_adapter(self._worker, {name: t.detach().clone() for name, t in named}, config)


class WorkerWeights(EngineWeights):
    """Weights in vLLM's worker processes; each loads its shards from shared memory."""

    def __init__(self, llm: LLM, options: VllmOptions) -> None:
        super().__init__(options)
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        self.monitor = WorkerMonitor(executor)
        self._channel = WeightChannel(
            executor, self.monitor, options.bucket_mb << 20, DTYPES[options.dtype]
        )
        self._channel.unlink_names()

    def parameters(self) -> dict[str, Tensor]:
        raise RolloutError(
            "vLLM's parameters are in its worker processes, where this one can't write; use "
            "update_weights or update_from, or an engine with rank_groups"
        )

    def _load(self, named: Named, whole: bool) -> None:
        with torch.no_grad():
            self._channel.send("weights", named, whole)

    def _load_adapter(self, named: Named, config: dict[str, object]) -> None:
        with torch.no_grad():
            self._channel.send("adapter", named, config)


def _unwrapped(worker: Worker) -> Worker:
    inner: Worker = getattr(worker, "worker", worker)
    return inner
