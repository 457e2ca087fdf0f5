"""A policy on this process's ranks, for training, for rollout, and for its model folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine import models
from engine.batch import Batch
from engine.config import LoRAConfig, ParallelConfig
from engine.data.templates import add_stop_tokens
from engine.data.tokenizer import load_tokenizer
from engine.errors import RolloutError
from engine.parallel.layout import Layout
from engine.parallel.module_shards import named_tensors
from engine.parallel.process_groups import Ranks
from engine.rollout.protocol import RolloutEngine, check_version, create_engine
from engine.rollout.vllm.weight_broadcast import Member
from engine.runtime.apply_layout import ModelPart, load_shards
from engine.runtime.rollout_weights import RolloutWeights, SharedWeights, merged_tensors
from engine.runtime.sharded_model import ShardedModel
from engine.storage.weight_files import file_tensors
from engine.weight_transfer import BroadcastRound, WeightReceiver, WeightSender

T = TypeVar("T")


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """An engine that frees its memory between rollouts."""

    @property
    def asleep(self) -> bool: ...

    def sleep(self, level: int) -> None: ...

    def wake_weights(self) -> None: ...

    def wake_kv(self) -> None: ...


class PolicyRuntime:
    """A policy's sharded weights, the rollout engine over them, and their version.

    `HybridActor` has one, and the workers of a process share one (`WorkerContext.process`).
    `sharded` trains; `rollout_weights` are the same weights for `engine`; `version` counts
    updates. `loaded_in_shards`: no rank ever had all of it.
    """

    def __init__(
        self,
        model: PreTrainedModel | models.CriticModel | models.UnloadedModel,
        ranks: Ranks | None = None,
        config: ParallelConfig | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        """Shard `model` in place; `device`: where it is and stays, None: this process's."""
        ranks, config = ranks or Ranks(Layout()), config or ParallelConfig()
        self.sharded = ShardedModel(model, ranks, config, device=device)
        self.loaded_in_shards = isinstance(model, models.UnloadedModel)
        self.version = 0
        self.rollout_weights: RolloutWeights = SharedWeights(self.module)
        self._engine: RolloutEngine | None = None
        self._sleep_level = 0
        self._receiver = WeightReceiver()

    @property
    def module(self) -> ModelPart:
        return self.sharded.module

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine; raises RolloutError before `init_rollout`."""
        if self._engine is None:
            raise RolloutError("this policy has no rollout engine; call init_rollout first")
        return self._engine

    def init_rollout(
        self,
        engine: str,
        weights: RolloutWeights,
        options: dict[str, object],
        *,
        sleep_level: int = 0,
    ) -> None:
        """Start the rollout engine of this name over `weights`.

        `options` are those of `create_engine`. `sleep_level`: how deep the engine sleeps between
        rollouts, 0 for not at all. Raises ConfigError and RolloutError as `create_engine` does.
        """
        self.rollout_weights, self._sleep_level = weights, sleep_level
        self._engine = create_engine(engine, weights.model, **(options | weights.engine_options))
        if not weights.engine_options.get("load", True):  # the engine has no weights yet
            weights.sync_weights(self._engine, self.version)

    def sync_weights(self, *, force: bool = False) -> None:
        """Synchronise the engine with the newest weights as `version`; all ranks call it together.

        Weights wake before they are synchronised, the KV cache after. With `force` also when the
        engine has this version. Raises RolloutError where old and new weights may be mixed.
        """
        engine, asleep = self.engine, None
        if self._sleep_level and isinstance(engine, SleepingEngine) and engine.asleep:
            asleep = engine
            asleep.wake_weights()
        lost = asleep is not None and self._sleep_level == 2
        if force or lost or engine.policy_version != self.version:
            self.rollout_weights.sync_weights(engine, self.version)
        if asleep is not None:
            asleep.wake_kv()
        check_version(engine, self.version)
        self.rollout_weights.require_intact()

    def sleep(self) -> None:
        """Let the engine sleep until `sync_weights`, where it sleeps at all."""
        if self._sleep_level and isinstance(self.engine, SleepingEngine):
            self.engine.sleep(self._sleep_level)

    def pack_weights(self, sender: WeightSender | None = None) -> Batch:
        """The weights for rollout elsewhere; all ranks call it, those above 0 get the version."""
        packed = self.write_full(lambda named: (sender or WeightSender()).send(named, self.version))
        return Batch({"policy_version": torch.tensor([self.version])}) if packed is None else packed

    def broadcast_weights(
        self, member: Member, broadcast: BroadcastRound, dtype: torch.dtype | None
    ) -> None:
        """Send the weights, floating point as `dtype`, from rank 0 as all ranks gather them."""
        version, kind = self.version, self.module.config.model_type
        self.write_full(lambda all: member.send(broadcast, version, file_tensors(kind, all), dtype))

    def load_weights(self, packed: Batch) -> int:
        """Write packed weights into the policy in place; return their version.

        Raises WorkerError for a model of another size, WeightSyncError where they are needed in
        full.
        """
        self.version = self._receiver.load(_transferred_tensors(self.module), packed)
        return self.version

    def require_synced(self) -> None:
        """Raise WeightSyncError if this process failed to load the last weights sent to it."""
        self._receiver.check()

    def full_model(self, load: Callable[[], PreTrainedModel]) -> Any:
        """The policy, newest, on rank 0, where `load()` may be filled; None on others."""
        if self.sharded.ranks.layout.world_size == 1:
            return self.module
        full = self.write_full(lambda named: {n: t.to("cpu", copy=True) for n, t in named})
        if full is None:
            return None
        model = load()
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                if name in full:
                    tensor.copy_(full[name])
        return model

    def write_full(
        self,
        write: Callable[[Iterator[tuple[str, Tensor]]], T],
        tensors: Iterator[tuple[str, Tensor]] | None = None,
    ) -> T | None:
        """Let rank 0 `write` the policy's full tensors, by name, as they are gathered.

        Returns what `write` does, None on other ranks. All ranks call it together, and gather to
        the end even where rank 0 can't write. `tensors` are what they gather; None: all that
        changes in training.
        """
        tensors = tensors or self._transferred()
        try:
            return None if self.sharded.ranks.rank else write(tensors)
        finally:
            for _ in tensors:  # a collective each
                pass

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _transferred(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors that change in training; of a model with adapters, the trained ones."""
        if self.sharded.ranks.layout.world_size == 1:
            yield from _transferred_tensors(self.module).items()
            return
        trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        adapters = models.has_adapters(self.module)
        yield from self.sharded.full_tensors(trained.__contains__ if adapters else None)


def _transferred_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and buffers of a state dict, by name; or adapters alone."""
    if models.has_adapters(model):
        return {name: p.data for name, p in models.adapter_parameters(model).items()}
    return {name: tensor.data for name, tensor in named_tensors(model).items()}


def open_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model's own tokenizer; ModelError unless the folder is whole and the two fit.

    Every entry point that is given a model begins with this, before it reads data.
    """
    models.require_model_folder(path)
    vocabulary, _ = models.vocabulary_and_context(path)
    tokenizer = load_tokenizer(path)
    models.check_vocabulary(vocabulary, tokenizer, str(path))
    return tokenizer


@dataclass(frozen=True, slots=True)
class StartModel:
    path: str  # folder or hub id
    dtype: str  # e.g. "bfloat16"
    lora: LoRAConfig | None = None
    seed: int = 0  # of new adapters
    tokenizer: str = ""  # its folder; empty: the model's

    def open(self) -> PreTrainedModel | models.UnloadedModel:
        """Open the model, to be loaded by the ranks that keep it where that can be."""
        return models.open_policy_model(self.path, self.dtype, self.lora, self.seed)

    def load_on(self, device: torch.device) -> PreTrainedModel:
        return load_opened(self.open(), device)


def load_opened(opened: Any, device: torch.device) -> Any:
    """A model on `device`; its weights are read if it was not loaded."""
    if not isinstance(opened, models.UnloadedModel):
        return opened.to(device)
    load_shards(opened.module, opened, device, device)
    return opened.module.to(device)


def saved_tokenizer(path: str, model: Any) -> PreTrainedTokenizerBase:
    """The tokenizer to save with a model, whose generation config gets the ends of its turns."""
    tokenizer = load_tokenizer(path)
    if getattr(model, "generation_config", None) is not None:
        add_stop_tokens(model.generation_config, tokenizer)
    return tokenizer


def save_ranks(policy: PolicyRuntime, start: StartModel, folder: Path) -> None:
    """Write `policy`, its adapters and its tokenizer; all ranks call it together.

    Ranks gather it a tensor at a time, merged with its adapters, which rank 0 writes; what was
    loaded whole on each rank is put together on rank 0. Raises StorageError there.
    """
    ranks, tokenizer = policy.sharded.ranks, start.tokenizer or start.path
    if ranks.layout.world_size == 1 or not policy.loaded_in_shards:
        load = partial(models.load_policy_model, start.path, start.dtype, start.lora, start.seed)
        model = policy.full_model(load)
        if ranks.rank == 0:
            models.save_model(model, saved_tokenizer(tokenizer, model), folder)
        return

    adapters: dict[str, Tensor] = {}
    if models.has_adapters(policy.module):
        adapters = dict(policy.sharded.full_tensors(lambda name: ".lora_" in name))

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        opened: Any = start.open()
        saved = saved_tokenizer(tokenizer, opened.module)
        models.save_tensors(opened.module, tensors, saved, folder, adapters)

    policy.write_full(write, merged_tensors(policy.sharded, adapters) if adapters else None)
