"""`HybridActor`: one causal language model to train and to sample from, without a reload between.

Also the ranks that a launcher started, and what a switch between training and generation costs.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine import models
from engine.config import RolloutConfig, Section, validated
from engine.data.tokenizer import load_tokenizer, may_have_tokenizer
from engine.errors import ConfigError, RolloutError
from engine.models.loading import adapter_base_path, load_model_config
from engine.parallel.layout import Layout, ModelShape, check_layout, rollout_layout
from engine.parallel.process_groups import init_process_group
from engine.rollout.protocol import Completion, RolloutEngine, SamplingParams, engine_capabilities
from engine.runtime.generate_arguments import read_call
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import SharedWeights
from engine.runtime.sharded_policy import ShardedPolicy


class HybridConfig(Section):
    """Sizes of the axes of ranks. `dp_size` and `fsdp_size` follow from the others if left out.

    `tp_size` is that of `generate`; training shards weights by `fsdp_sharding`, and splits
    matrices where `train_tp_size` says so.

    >>> HybridConfig.of({"train_tp_size": 2, "fsdp_sharding": "FULL_SHARD"}).layout(4)
    Layout(pp=1, dp=1, fsdp=2, sp=1, tp=2)
    """

    dp_size: int | None = Field(None, ge=1, description="Copies of the model")
    fsdp_size: int | None = Field(None, ge=1, description="Ranks that share a copy's weights")
    tp_size: int | None = Field(
        None, ge=1, description="Ranks that share each matrix in generate; None: train_tp_size"
    )
    train_tp_size: int = Field(1, ge=1, description="Ranks that share each matrix in training")
    rollout_tp_size: int | None = Field(None, ge=1, description="Another name of tp_size")
    fsdp_sharding: Literal["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "FULL_SHARD",
        description="Weights sharded over all data ranks, inside each node, or copied to each rank",
    )

    @classmethod
    def of(cls, values: Mapping[str, object] | None) -> Self:
        """Read a user's dictionary; ConfigError names a wrong key and the valid ones."""
        values = values or {}
        unknown = sorted(str(key) for key in values.keys() - cls.model_fields.keys())
        if unknown:
            elsewhere = unknown[0] in ("pp_size", "sp_size")  # no ordinary forward and backward
            hint = f"; RLTrainer spreads by {unknown[0][:2]} (actor.parallel)" if elsewhere else ""
            raise ConfigError(
                f"hybrid_config has no key {', '.join(map(repr, unknown))}; its keys are "
                f"{', '.join(cls.model_fields)}{hint}"
            )
        config = validated(cls, values, "hybrid_config: ")
        sizes = {config.tp_size, config.rollout_tp_size} - {None}
        if len(sizes) > 1:
            raise ConfigError(
                f"hybrid_config: tp_size={config.tp_size} and rollout_tp_size="
                f"{config.rollout_tp_size} are both that of generate; training's is train_tp_size"
            )
        return config

    @property
    def rollout_tp(self) -> int:
        """Ranks that share each matrix while they generate."""
        return self.tp_size or self.rollout_tp_size or self.train_tp_size

    def layout(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """The training layout; `ranks_per_node`: of them on one machine, None for all."""
        training = self.train_tp_size * (self.dp_size or 1) * (self.fsdp_size or 1)
        if (needed := max(training, self.rollout_tp)) > world_size:
            names = ("dp_size", "fsdp_size", "tp_size", "train_tp_size", "rollout_tp_size")
            used = ", ".join(f"{n}={v}" for n in names if (v := getattr(self, n) or 1) > 1)
            there = "this process is alone" if world_size == 1 else f"there are {world_size}"
            raise ConfigError(
                f"hybrid_config's {used} needs {needed} ranks, but {there}; run it under torchrun "
                f"with {needed} processes (torchrun --nproc-per-node {needed} …), or leave them out"
            )
        data_ranks = max(1, world_size // self.train_tp_size)
        in_node = max(1, (ranks_per_node or world_size) // self.train_tp_size)
        dp, fsdp = self._data_axes(data_ranks, in_node)
        layout = Layout(dp=dp, fsdp=fsdp, tp=self.train_tp_size)
        check_layout(layout, world_size)
        return layout

    def check(self, config: Any, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """`layout`; ConfigError where a model of this transformers configuration can't have it."""
        layout = self.layout(world_size, ranks_per_node)
        if layout.fsdp == layout.tp == self.rollout_tp == 1:
            return layout  # whole models only: any will do
        shape, tp = ModelShape.of(config), self.rollout_tp
        check_layout(layout, world_size, shape)
        rollout_layout(layout, tp=tp)
        if shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
            raise ConfigError(
                f"hybrid_config's tp_size={tp} does not share the model's {shape.heads} attention "
                f"heads and {shape.kv_heads} key heads evenly; choose a divisor"
            )
        return layout

    def _data_axes(self, data_ranks: int, in_node: int) -> tuple[int, int]:
        dp, fsdp, mode = self.dp_size, self.fsdp_size, self.fsdp_sharding
        for name, size, refused in (("dp", dp, "FULL_SHARD"), ("fsdp", fsdp, "NO_SHARD")):
            if mode == refused and (size or 1) > 1:
                raise ConfigError(
                    f"hybrid_config: {name}_size={size} does not go with fsdp_sharding={mode!r}; "
                    "use 'HYBRID_SHARD'"
                )
        if mode == "FULL_SHARD":
            return 1, fsdp or data_ranks
        if mode == "NO_SHARD":
            return dp or data_ranks, 1
        shared = fsdp or (max(1, data_ranks // dp) if dp else in_node)
        return dp or max(1, data_ranks // min(shared, data_ranks)), shared


def init_from_launcher() -> tuple[int, int]:
    """Initialise this launch's process group; return the world size and the local world size.

    Raises ConfigError for an incomplete environment, WorkerError if other ranks don't connect.
    """
    world_size = _whole_number("WORLD_SIZE", 1)
    if not dist.is_initialized() and world_size > 1:
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise ConfigError(
                f"the environment has WORLD_SIZE={world_size} and no {', '.join(missing)}; start "
                "the program with torchrun, or unset WORLD_SIZE for one rank"
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(_whole_number("LOCAL_RANK", 0) % torch.cuda.device_count())
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        init_process_group(address, _whole_number("RANK", 0), world_size)
    if not dist.is_initialized():
        return 1, 1
    world_size = dist.get_world_size()
    return world_size, _whole_number("LOCAL_WORLD_SIZE", world_size)


def _whole_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text or default)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={text!r}, which is no whole number; start the program "
            "with torchrun, or unset it"
        ) from None


class HybridActor(nn.Module):
    """A policy and its rollout engine over the same weights.

    Parameters, buffers, their names and `state_dict` are the policy's; what an `nn.Module` has not
    (`config`, `save_pretrained`, …) is the policy's too.

    Examples:
        >>> actor = HybridActor.from_pretrained(path, hybrid_config={"tp_size": 1})
        >>> sequences = actor.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32)
        >>> actor.train()
        >>> actor(input_ids=sequences, labels=sequences).loss.backward()
    """

    policy: PreTrainedModel
    runtime: PolicyRuntime  # as `RLTrainer`'s workers have it

    def __init__(
        self,
        model: PreTrainedModel | models.UnloadedModel | None = None,
        hybrid_config: Mapping[str, object] | None = None,
        *,
        policy: PreTrainedModel | models.UnloadedModel | None = None,
        contiguous: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rollout_engine: str = "native",
        rollout_options: Mapping[str, object] | None = None,
    ) -> None:
        """Take a transformers causal LM as it is, and start a rollout engine over it.

        `policy` is another name of `model`. With `contiguous`, weights that are views with gaps in
        memory are laid out without; what they hold stays. On many ranks (torchrun, or an existing
        default process group) each passes the same policy and keeps its shard; `hybrid_config` is
        as in `HybridConfig`. `rollout_options` are those of `create_engine`: `max_num_seqs`,
        `max_model_len`, `kv_cache_memory_mb`, `seed`. Raises ConfigError and RolloutError as it
        does, ConfigError for an impossible layout, and ModelError for a tokenizer of more tokens.
        """
        super().__init__()
        if (model is None) == (policy is None):
            raise ConfigError(
                f"HybridActor got {'no model' if model is None else 'both model and policy'}; give "
                "model, a transformers causal LM, or use HybridActor.from_pretrained(path)"
            )
        source: Any = policy if model is None else model
        unloaded = isinstance(source, models.UnloadedModel)
        module: PreTrainedModel = source.module if unloaded else source
        for parameter in module.parameters() if contiguous else ():
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        sizes = HybridConfig.of(hybrid_config)
        _check_rollout(rollout_engine, sizes)
        world_size, on_node = init_from_launcher()
        layout = sizes.check(module.config, world_size, on_node)
        self.tokenizer, text = tokenizer, module.config.get_text_config()
        if tokenizer is not None:
            models.check_vocabulary(text.vocab_size, tokenizer, "the actor")
        self._sharded: ShardedPolicy | None = None
        if world_size > 1:
            self._sharded = ShardedPolicy(source, layout, sizes.rollout_tp)
            self.runtime, weights = self._sharded.runtime, self._sharded.weights
        else:
            device = None if unloaded else module.device
            self.runtime = PolicyRuntime(source, device=device)
            weights = SharedWeights(module)
        # Not registered as a child, which would put "policy." before every name. The root has the
        # policy's own dictionaries, so what changes in one changes in the other.
        self.__dict__["policy"] = module
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(module, shared)
        self.training = module.training
        options: dict[str, Any] = dict(rollout_options or {})
        context = getattr(text, "max_position_embeddings", None)
        self._max_model_len = int(options.get("max_model_len") or context or 0)
        try:
            self.runtime.init_rollout(rollout_engine, weights, options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ConfigError(
                f"rollout_options don't fit rollout_engine={rollout_engine!r}: {error}; leave it "
                "out"
            ) from None
        self._seen = _writes(module.parameters())
        self._closed = False
        self._trained = False  # whether weights may have changed in a way `_writes` doesn't show

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        hybrid_config: Mapping[str, object] | None = None,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        rollout_engine: str = "native",
        rollout_options: Mapping[str, object] | None = None,
    ) -> Self:
        """Load any causal LM from a folder or hub id.

        `dtype` is one of DTYPES; `device` None leaves the model on the CPU, and on many ranks it
        must be None: each has its own. The tokenizer is that of `path`, where it has one, unless
        another is given, and pads on the left. Raises ConfigError for a wrong `hybrid_config`,
        dtype or engine and ModelError for a folder that is no whole model or whose tokenizer
        doesn't fit it, before weights are read.
        """
        sizes = HybridConfig.of(hybrid_config)
        _check_rollout(rollout_engine, sizes)
        world_size, on_node = init_from_launcher()
        sizes.layout(world_size, on_node)
        name = str(dtype).removeprefix("torch.")
        if name not in models.DTYPES:
            raise ConfigError(f"dtype={name!r} is not supported; use one of {[*models.DTYPES]}")
        if device is not None and world_size > 1:
            raise ConfigError(
                f"device={str(device)!r} with {world_size} ranks: each takes the device of its "
                "LOCAL_RANK, or the CPU; leave device out"
            )
        models.require_model_folder(path, "path")
        vocabulary, _ = models.vocabulary_and_context(path)
        if world_size > 1:
            config = load_model_config(adapter_base_path(path) or path)
            sizes.check(config, world_size, on_node)
        if isinstance(tokenizer, str | Path) or (tokenizer is None and may_have_tokenizer(path)):
            tokenizer = load_tokenizer(tokenizer or path)
            tokenizer.padding_side = "left"  # `generate` continues a row at its end
        if tokenizer is not None:
            models.check_vocabulary(vocabulary, tokenizer, str(path))
        # Of many ranks each reads its shard.
        policy: Any = (models.open_model if world_size > 1 else models.load_model)(path, name)
        if device is not None:
            policy.to(device)
        engine: Any = {"rollout_engine": rollout_engine, "rollout_options": rollout_options}
        return cls(policy, hybrid_config, tokenizer=tokenizer, **engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's own forward pass, with its arguments and outputs.

        Of many ranks each passes its rows, and backward leaves the mean of their gradients.
        """
        self._trained |= torch.is_grad_enabled()
        if self._sharded is not None:
            return self._sharded.forward(*args, **kwargs)
        return self.policy(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as on any module; no weight moves."""
        self.policy.train(mode)
        self.training = mode
        self._trained |= mode
        return self

    def to_rollout(self) -> Self:
        """Turn to sampling: `eval()`, and the engine ready; `generate` does it by itself."""
        self.eval()
        self.refresh()
        prepare = getattr(self.engine, "prepare", None)
        if prepare is not None:
            prepare()
        return self

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Complete left-padded prompts: `[batch · num_return_sequences, prompt + new]`, int64.

        Takes `input_ids` (or `inputs`) and `attention_mask`, both `[batch, prompt]`, and
        transformers' arguments of length, sampling and special tokens, with its defaults and the
        model's `generation_config`. Rows are padded on the right after their end token, to the
        longest. Draws come from torch's global generator. The mode stays as it is, and dropout is
        off. Raises ConfigError for any other argument and for values out of range, DataError for
        inputs that are not left-padded prompts.
        """
        with self._sharded.peers.together() if self._sharded is not None else nullcontext():
            self._check_open()
            call = read_call(self.policy, self._max_model_len, inputs, generation_config, kwargs)
        return call.sequences(self.rollout(call.prompts, call.params))

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        """Complete token lists, with log-probs and policy version; many ranks call it together."""
        self.refresh()
        if self._sharded is None:
            return self.engine.generate(prompts, params)
        peers = self._sharded.peers
        task = peers.scatter(prompts, params)
        with peers.together():
            done = self.engine.generate(task.prompts, task.params)
        return peers.gather(task, done)

    def refresh(self) -> None:
        """Make the rollout engine serve the newest weights; `generate` does it by itself.

        The policy version rises if weights may have changed since the last call: after a forward
        pass with gradients, `train()`, `load_state_dict`, or a write that autograd counts.
        """
        self._check_open()
        if self._sharded is not None:
            self._sharded.reshard()
        parameters = list(self.policy.parameters())
        changed = self._trained or _writes(parameters) != self._seen
        if self._sharded is not None:
            changed = self._sharded.peers.any_rank(changed)
        self.runtime.version += changed
        # Always: a write through `.data` or by a fused optimizer isn't counted, and an update
        # without changes costs next to nothing where storage is shared.
        if self._sharded is not None:
            self._sharded.sync_weights()
        else:
            self.runtime.sync_weights(force=True)
        self._seen, self._trained = _writes(parameters), self.training

    @property
    def engine(self) -> RolloutEngine:
        return self.runtime.engine

    @property
    def policy_version(self) -> int:
        """How often the weights may have changed; completions carry it."""
        return self.runtime.version

    @property
    def received_bytes(self) -> int:
        return self.runtime.rollout_weights.received_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.policy.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the policy's weights, on many ranks full ones too; the next rollout has them."""
        self._trained = True
        if self._sharded is not None:
            return self._sharded.load_state_dict(*args, **kwargs)
        return self.policy.load_state_dict(*args, **kwargs)

    def save_pretrained(self, folder: str | Path, **options: object) -> None:
        """Write the policy as transformers does; all ranks call it together."""
        if self._sharded is not None:
            self._sharded.save_pretrained(folder, **options)
        else:
            models.save_policy(self.policy, folder, options)

    def close(self) -> None:
        self._closed = True
        self.runtime.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            policy = self.__dict__.get("policy")
            if policy is None:
                raise
            return getattr(policy, name)

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the actor was closed and samples no more; create another one")


def _writes(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """A value that differs once a parameter was replaced, or written where autograd counts."""
    found = list(parameters)
    return hash(tuple(map(id, found))), sum(p._version for p in found)


def _check_rollout(engine: str, sizes: HybridConfig) -> None:
    """Raise ConfigError for an unknown rollout engine, or one that can't shard matrices."""
    capabilities = engine_capabilities(RolloutConfig(engine=engine))
    if sizes.rollout_tp > 1 and not capabilities.decodes_shards:
        raise ConfigError(
            f"rollout_engine={engine!r} decodes an actor's whole model on each rank; set "
            f"hybrid_config's tp_size to 1 (it is {sizes.rollout_tp}), or use 'native'"
        )


Mode = Literal["train", "rollout", "eval"]


def measure_switch_overhead(
    actor: HybridActor, mode: Mode = "train", repeats: int = 9
) -> dict[str, float]:
    """What one switch of `actor` into `mode` costs; eval is another name of rollout.

    `latency_ms` is the median time of `repeats` switches until the first token, or the first
    training forward, can be computed, and `latency_min_ms` the fastest; each switch to "rollout"
    comes after a write to every weight, as an optimizer step makes. `mem_increase_mb` (10⁶ bytes)
    is what one switch allocates: on a GPU the peak above the level before, elsewhere the sum of all
    new tensor storage. `received_mb` is what one switch brought to this rank from others. All ranks
    of an actor call it together.

    Weights keep their bits and the actor its mode; its policy version rises. Raises ConfigError for
    another mode, or fewer than one repeat.
    """
    if mode not in ("train", "rollout", "eval"):
        raise ConfigError(f"mode={mode!r} is unknown; use 'train', or 'rollout' ('eval')")
    mode = "rollout" if mode == "eval" else mode
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} measures nothing; use 1 or more")
    switch: Callable[[], object] = actor.to_rollout if mode == "rollout" else actor.train
    before = actor.training
    times = []
    actor.refresh()
    try:
        for _ in range(repeats + 1):  # the first one warms up
            _leave(actor, mode)
            times.append(_timed(switch, actor.device))
        _leave(actor, mode)
        allocated = _allocated(switch, actor.device)
    finally:
        actor.train(before)
    return {
        "latency_ms": 1e3 * statistics.median(times[1:]),
        "latency_min_ms": 1e3 * min(times[1:]),
        "mem_increase_mb": allocated / 1e6,
        "received_mb": actor.received_bytes / 1e6 if mode == "rollout" else 0.0,
    }


def _leave(actor: HybridActor, mode: Mode) -> None:
    if mode == "train":
        actor.to_rollout()
        return
    actor.train()
    with torch.no_grad():
        weights: list[Tensor] = [p for p in actor.parameters() if p.is_floating_point()]
        torch._foreach_mul_(weights, 1.0)  # a write to each that changes no bit


def _timed(switch: Callable[[], object], device: torch.device) -> float:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    switch()
    synchronize()
    return time.perf_counter() - started


def _allocated(switch: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        with StorageCounter() as counter:
            switch()
        return counter.bytes
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    switch()
    return torch.cuda.max_memory_allocated(device) - before


class StorageCounter(TorchDispatchMode):
    """Sums the sizes of the storages that operators create while it is active, freed ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:  # it comes back here with the local tensors that it stands for
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        known = {_address(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in known:
                known.add(_address(tensor))
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
