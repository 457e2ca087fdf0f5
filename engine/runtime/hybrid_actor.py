"""`HybridActor`: one causal language model to train and to sample from, without a reload between.

It is the policy's module tree under another root, over the `PolicyRuntime` that the RL workers use
too. `generate`'s arguments are read in `generate_arguments`; many ranks are in `sharded_policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.config import RolloutConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, EngineError, RolloutError
from engine.models import (
    DTYPES,
    UnloadedModel,
    check_vocabulary,
    load_model,
    open_model,
    require_model_folder,
    save_policy,
    vocabulary_and_context,
)
from engine.models.load import adapter_base_path, load_model_config
from engine.rollout.protocol import (
    Completion,
    RolloutEngine,
    SamplingParams,
    engine_capabilities,
)
from engine.runtime.generate_arguments import read_call
from engine.runtime.hybrid_config import HybridConfig
from engine.runtime.launcher_ranks import init_from_launcher
from engine.runtime.policy_runtime import PolicyRuntime
from engine.runtime.rollout_weights import RolloutWeights, SharedWeights
from engine.runtime.sharded_policy import ShardedPolicy


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
        model: PreTrainedModel | UnloadedModel | None = None,
        hybrid_config: Mapping[str, object] | None = None,
        *,
        policy: PreTrainedModel | UnloadedModel | None = None,
        contiguous: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rollout_engine: str = "native",
        rollout_options: Mapping[str, object] | None = None,
    ) -> None:
        """Take a transformers causal LM as it is, and start a rollout engine over it.

        `policy` is another name of `model`. With `contiguous`, weights that are views with gaps in
        memory are laid out without; what they hold stays.
        On many ranks (torchrun, or an existing default process group) each passes the same policy
        and keeps its shard; `hybrid_config` is as in `HybridConfig`. `rollout_options` are
        those of `engine.rollout.protocol.create_engine`: `max_num_seqs`, `max_model_len`,
        `kv_cache_memory_mb`, `seed`. Raises ConfigError and RolloutError as it does, ConfigError
        for an impossible layout, and ModelError if the tokenizer has tokens that the model lacks.
        """
        super().__init__()
        source = _one_model(model, policy)
        policy = source.module if isinstance(source, UnloadedModel) else source
        if contiguous:
            _make_contiguous(policy)
        sizes = HybridConfig.of(hybrid_config)
        _check_rollout(rollout_engine, sizes)
        world_size, on_node = init_from_launcher()
        layout = sizes.check(policy.config, world_size, on_node)
        self.tokenizer = tokenizer
        if tokenizer is not None:
            check_vocabulary(policy.config.get_text_config().vocab_size, tokenizer, "the actor")
        self._sharded: ShardedPolicy | None = None
        if world_size > 1:
            self._sharded = ShardedPolicy(source, layout, sizes.rollout_tp)
            self.runtime, weights = self._sharded.runtime, self._sharded.weights
        else:
            device = None if isinstance(source, UnloadedModel) else policy.device
            self.runtime = PolicyRuntime(source, device=device)
            weights = SharedWeights(policy)
        # Not registered as a child, which would put "policy." before every name. The root has the
        # policy's own dictionaries, so what changes in one changes in the other.
        self.__dict__["policy"] = policy
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(policy, shared)
        self.training = policy.training
        options: dict[str, Any] = dict(rollout_options or {})
        context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        self._max_model_len = int(options.get("max_model_len") or context or 0)
        _init_rollout(self.runtime, rollout_engine, weights, options)
        self._seen = _writes(policy.parameters())
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

        `dtype` is one of DTYPES; `device` None leaves the model on the CPU, and on many ranks
        it must be None: each has its own. The tokenizer is that of `path`, where it has one, unless
        another is given. Raises ConfigError for a wrong `hybrid_config`, dtype or engine and
        ModelError for a folder that is no whole model or whose tokenizer doesn't fit it, before
        weights are read.
        """
        sizes = HybridConfig.of(hybrid_config)
        _check_rollout(rollout_engine, sizes)
        world_size, on_node = init_from_launcher()
        sizes.layout(world_size, on_node)
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(f"dtype={name!r} is not supported; use one of {[*DTYPES]}")
        if device is not None and world_size > 1:
            raise ConfigError(
                f"device={str(device)!r} with {world_size} ranks: each takes the device of its "
                "LOCAL_RANK, or the CPU; leave device out"
            )
        require_model_folder(path, "path")
        vocabulary, _ = vocabulary_and_context(path)
        if world_size > 1:
            config = load_model_config(adapter_base_path(path) or path)
            sizes.check(config, world_size, on_node)
        loaded = _tokenizer(path, tokenizer)
        if loaded is not None:
            check_vocabulary(vocabulary, loaded, str(path))
        policy: PreTrainedModel | UnloadedModel
        if world_size > 1:  # each rank reads its shard
            policy = open_model(path, name)
        else:
            policy = load_model(path, name)
            if device is not None:
                policy.to(device)  # type: ignore[arg-type]  # a str is fine
        return cls(
            policy,
            hybrid_config,
            tokenizer=loaded,
            rollout_engine=rollout_engine,
            rollout_options=rollout_options,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's own forward pass, with its arguments and outputs.

        On many ranks each passes its rows (ranks that differ in tp only: the same rows); all call
        it together, and backward leaves the gradients' mean over the data-parallel ranks.
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
        """Turn to sampling: `eval()`, and the engine ready for its first token.

        `generate` does this by itself; call it to pay for the switch at a chosen time.
        """
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

        Takes `input_ids` (or `inputs`) and `attention_mask`, both `[batch, prompt]`,
        `max_new_tokens` or `max_length`, `do_sample`, `temperature`, `top_k`, `top_p`,
        `num_return_sequences`, `eos_token_id` and `pad_token_id`, with transformers' defaults, the
        model's `generation_config` included. Rows are padded on the right after their end token,
        to the longest. Draws come from torch's global generator. The mode stays as it is, and
        dropout is off. Raises ConfigError for any other argument and for values out of range,
        DataError for inputs that are not left-padded prompts.
        """
        call, problem = None, None
        try:
            self._check_open()
            call = read_call(self.policy, self._max_model_len, inputs, generation_config, kwargs)
        except EngineError as error:
            problem = error
        self._raise_everywhere(problem)
        assert call is not None
        return call.sequences(self.rollout(call.prompts, call.params))

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        """Complete token lists with the newest weights, with log-probs and policy version.

        On many ranks all call it together, each with its own prompts, and get their completions.
        """
        self.refresh()
        if self._sharded is None:
            return self.engine.generate(prompts, params)
        task = self._sharded.peers.scatter(prompts, params)
        done, problem = list[Completion](), None
        try:
            done = self.engine.generate(task.prompts, task.params)
        except EngineError as error:
            problem = error
        self._raise_everywhere(problem)
        return self._sharded.peers.gather(task, done)

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
        """The rollout engine."""
        return self.runtime.engine

    @property
    def policy_version(self) -> int:
        """How often the weights may have changed; completions carry it."""
        return self.runtime.version

    @property
    def received_bytes(self) -> int:
        """What this rank received in the latest switch to rollout."""
        return self.runtime.rollout_weights.received_bytes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's, names included."""
        return self.policy.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the policy's weights, on many ranks full ones too; the next rollout has them."""
        self._trained = True
        if self._sharded is not None:
            return self._sharded.load_state_dict(*args, **kwargs)
        return self.policy.load_state_dict(*args, **kwargs)

    def save_pretrained(self, folder: str | Path, **options: object) -> None:
        """Write the policy as transformers does; many ranks call it together, and rank 0 writes.

        Raises StorageError, on every rank, if it can't be written.
        """
        if self._sharded is not None:
            self._sharded.save_pretrained(folder, **options)
        else:
            save_policy(self.policy, folder, options)

    def close(self) -> None:
        """Close the rollout engine; the policy stays as it is."""
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

    def _raise_everywhere(self, problem: EngineError | None) -> None:
        """Raise this rank's problem, or another rank's."""
        if self._sharded is not None:
            self._sharded.peers.raise_everywhere(problem)
        elif problem is not None:
            raise problem


def _one_model(
    model: PreTrainedModel | UnloadedModel | None, policy: PreTrainedModel | UnloadedModel | None
) -> PreTrainedModel | UnloadedModel:
    """The one that was given; ConfigError for none and for two."""
    given = [one for one in (model, policy) if one is not None]
    if len(given) != 1:
        raise ConfigError(
            f"HybridActor got {'no model' if not given else 'both model and policy'}; give model, "
            "a transformers causal LM, or use HybridActor.from_pretrained(path)"
        )
    return given[0]


def _make_contiguous(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


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


def _init_rollout(
    runtime: PolicyRuntime, name: str, weights: RolloutWeights, options: dict[str, object]
) -> None:
    try:
        runtime.init_rollout(name, weights, options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ConfigError(
            f"rollout_options don't fit rollout_engine={name!r}: {error}; leave it out"
        ) from None


def _tokenizer(
    path: str | Path, given: PreTrainedTokenizerBase | str | Path | None
) -> PreTrainedTokenizerBase | None:
    """The given one, or that of the model's folder; None for a folder without one."""
    if given is None:
        names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
        folder = Path(path)
        if folder.is_dir() and not any((folder / name).exists() for name in names):
            return None
        return load_tokenizer(path)
    return load_tokenizer(given) if isinstance(given, str | Path) else given
