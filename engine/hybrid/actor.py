"""`HybridActor`: one causal language model to train and to sample from, without a reload between.

It is the policy's module tree under another root, with a rollout engine beside it. Reading
`generate`'s arguments is the matter of `generation.py`, measuring the switch that of `switch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RolloutError
from engine.hybrid.config import HybridConfig
from engine.hybrid.generation import read_call
from engine.models import (
    check_vocabulary,
    load_model,
    require_model_folder,
    vocabulary_and_context,
)
from engine.rollout.protocol import (
    Completion,
    RolloutEngine,
    SamplingParams,
    check_engine,
    create_engine,
)


class HybridActor(nn.Module):
    """A policy and its rollout engine over the same weights.

    Parameters, buffers, their names and `state_dict` are the policy's; what an `nn.Module` has not
    (`config`, `save_pretrained`, …) is the policy's too.

    >>> actor = HybridActor.from_pretrained(path, hybrid_config={"tp_size": 1})
    >>> sequences = actor.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32)
    >>> actor.train()
    >>> actor(input_ids=sequences, labels=sequences).loss.backward()
    """

    policy: PreTrainedModel
    engine: RolloutEngine

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rollout_engine: str = "native",
        rollout_options: dict[str, Any] | None = None,
    ) -> None:
        """Take a transformers causal LM as it is, and start a rollout engine over it.

        `rollout_options` are those of `engine.rollout.protocol.create_engine`: `max_num_seqs`,
        `max_model_len`, `kv_cache_memory_mb`, `seed`. Raises ConfigError and RolloutError as it
        does, and ModelError if the tokenizer has tokens that the model lacks.
        """
        super().__init__()
        self.tokenizer = tokenizer
        if tokenizer is not None:
            check_vocabulary(policy.config.get_text_config().vocab_size, tokenizer, "the actor")
        # Not registered as a child, which would put "policy." before every name. The root holds
        # the very dictionaries of the policy, so whatever changes in one changes in the other.
        self.__dict__["policy"] = policy
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[shared] = getattr(policy, shared)
        self.training = policy.training
        options = dict(rollout_options or {})
        context = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        self._max_model_len = int(options.get("max_model_len") or context or 0)
        self.engine = create_engine(rollout_engine, policy, **options)
        self._version = self.engine.policy_version
        self._seen = self._writes()
        self._closed = False
        self._trained = False  # whether weights may have changed in a way `_writes` doesn't show

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        hybrid_config: dict[str, Any] | None = None,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        rollout_engine: str = "native",
        rollout_options: dict[str, Any] | None = None,
    ) -> Self:
        """Load any causal LM from a folder or hub id.

        `dtype` is float32 or bfloat16; `device` None leaves the model on the CPU. The tokenizer is
        that of `path`, where it has one, unless another is given. Raises ConfigError for a wrong
        `hybrid_config`, dtype or engine and ModelError for a folder that is no whole model or
        whose tokenizer doesn't fit it, before weights are read.
        """
        sizes = HybridConfig.of(hybrid_config)
        check_engine(rollout_engine)
        sizes.layout(world_size=1)
        name = str(dtype).removeprefix("torch.")
        if name not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={name!r} is not supported; use 'float32' or 'bfloat16'")
        require_model_folder(path, "path")
        loaded = _tokenizer(path, tokenizer)
        if loaded is not None:
            check_vocabulary(vocabulary_and_context(path)[0], loaded, str(path))
        policy = load_model(path, name)
        if device is not None:
            policy.to(device)  # type: ignore[arg-type]  # a str is fine
        return cls(
            policy,
            tokenizer=loaded,
            rollout_engine=rollout_engine,
            rollout_options=rollout_options,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's own forward pass, with its arguments and outputs."""
        self._trained |= torch.is_grad_enabled()
        return self.policy(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as on any module; no weight moves."""
        self.policy.train(mode)
        self.training = mode
        self._trained |= mode
        return self

    def to_rollout(self) -> Self:
        """Turn to sampling: `eval()`, and the engine ready for its first token.

        `generate` needs no such call; this is for doing the work of the switch at a chosen time.
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
        **kwargs: Any,
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
        call = read_call(self.policy, self._max_model_len, inputs, generation_config, kwargs)
        return call.sequences(self.rollout(call.prompts, call.params))

    def rollout(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        """Complete token lists with the newest weights, with log-probs and policy version."""
        self.refresh()
        return self.engine.generate(prompts, params)

    def refresh(self) -> None:
        """Make the rollout engine serve the newest weights; `generate` does it by itself.

        The policy version rises if weights may have changed since the last call: after a forward
        pass with gradients, `train()`, `load_state_dict`, or a write that autograd counts.
        """
        if self._closed:
            raise RolloutError("the actor was closed and samples no more; create another one")
        writes = self._writes()
        if self._trained or writes != self._seen:
            self._version += 1
        # Always, not only then: a write through `.data` or by a fused optimizer goes uncounted,
        # and an update without news costs next to nothing where storage is shared.
        self.engine.update_weights(self.policy, self._version)
        self._seen, self._trained = self._writes(), self.training

    @property
    def policy_version(self) -> int:
        """How often the weights may have changed; completions carry it."""
        return self._version

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The policy's, names included."""
        return self.policy.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the policy's weights; the next rollout samples with them."""
        self._trained = True
        return self.policy.load_state_dict(*args, **kwargs)

    def close(self) -> None:
        """End the rollout engine; the policy stays as it is."""
        self._closed = True
        self.engine.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            policy = self.__dict__.get("policy")
            if policy is None:
                raise
            return getattr(policy, name)

    def _writes(self) -> tuple[int, int]:
        """A value that differs once a parameter was replaced, or written where autograd counts."""
        parameters = list(self.policy.parameters())
        return hash(tuple(map(id, parameters))), sum(p._version for p in parameters)


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
