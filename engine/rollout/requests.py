"""What all rollout engines share: checks of requests, counters of work, and weight versions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import ConfigError, RolloutError
from engine.rollout.protocol import SamplingParams


@dataclass(slots=True)
class RolloutStats:
    """Work done by the latest `generate`."""

    prompt_tokens: int = 0  # tokens of all prompts, each prompt once
    prefill_tokens: int = 0  # prompt tokens computed; each prompt once where its group shares them
    generated_tokens: int = 0  # sampled tokens that were returned
    decode_steps: int = 0  # forward passes after prefill; 0 where an engine can't tell
    seconds: float = 0.0  # wall time


class WeightGuard:
    """Which policy version the weights are, and whether they may be served.

    >>> guard = WeightGuard("native")
    >>> with guard.updating(3):
    ...     pass  # move weights
    >>> guard.version
    3
    """

    def __init__(self, engine: str) -> None:
        self.version = 0
        self._engine = engine
        self._broken: str | None = None

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Serve nothing unless the body ends without an error; then the weights are `version`."""
        if version < self.version:
            raise RolloutError(
                f"rollout engine {self._engine!r} holds policy version {self.version} and was "
                f"handed the older {version}; pass versions that never fall"
            )
        self._broken = f"its update to policy version {version} did not finish"
        try:
            yield
        except Exception as error:
            self._broken = f"its update to policy version {version} failed: {error}"
            raise RolloutError(
                f"rollout engine {self._engine!r} could not take policy version {version}: "
                f"{error}; it serves nothing until an update succeeds"
            ) from error
        self.version, self._broken = version, None

    def refuse(self, reason: str) -> None:
        """Serve nothing until an update succeeds; `reason` follows "can't serve:"."""
        self._broken = reason

    def check(self) -> None:
        """Raise RolloutError unless the weights are whole."""
        if self._broken is not None:
            raise RolloutError(
                f"rollout engine {self._engine!r} can't serve: {self._broken}; call "
                f"update_weights with a whole model, or create a new engine"
            )


def resolve_max_model_len(asked: int | None, context: int | None) -> int:
    """Return the longest prompt plus completion, or raise ConfigError if the model has less."""
    if asked is None:
        if context is None:
            raise ConfigError(
                "the model's config names no max_position_embeddings; pass max_model_len"
            )
        return context
    if asked < 2:
        raise ConfigError(f"max_model_len={asked} holds no prompt and completion; use 2 or more")
    if context is not None and asked > context:
        raise ConfigError(
            f"max_model_len={asked} exceeds the model's context of {context} tokens; lower it, or "
            f"raise max_position_embeddings"
        )
    return asked


def check_request(
    prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int, vocabulary: int
) -> None:
    """Raise RolloutError for a request that can't be decoded, before anything is computed."""
    check_params(params)
    for index, prompt in enumerate(prompts):
        check_prompt(f"prompt {index}", prompt, max_model_len, vocabulary)


def check_prompt(name: str, prompt: Sequence[int], max_model_len: int, vocabulary: int) -> None:
    """Raise RolloutError for a prompt that can't be completed; the message calls it `name`."""
    if len(prompt) == 0:
        raise RolloutError(f"{name} is empty; give it at least one token, such as the BOS token")
    if len(prompt) >= max_model_len:
        raise RolloutError(
            f"{name} has {len(prompt)} tokens, which leaves no room for a completion "
            f"in max_model_len={max_model_len}; shorten or filter it "
            f"(data.max_prompt_length), or use a model with a longer context"
        )
    check_tokens(name, prompt, vocabulary)


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise RolloutError if one of `tokens` (at least one) is not in the model's vocabulary."""
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocabulary:
        raise RolloutError(
            f"{name} has token id {low if low < 0 else high} outside the model's "
            f"vocabulary of {vocabulary}; use the tokenizer the model was trained with"
        )


def check_params(params: SamplingParams) -> None:
    """Raise RolloutError for sampling parameters out of their ranges."""
    problems = {
        f"n={params.n}: must be 1 or more": params.n < 1,
        f"max_new_tokens={params.max_new_tokens}: must be 1 or more": params.max_new_tokens < 1,
        f"temperature={params.temperature}: must be a finite number, 0 or more": not (
            math.isfinite(params.temperature) and params.temperature >= 0
        ),
        f"top_k={params.top_k}: must be 0 (all) or more": params.top_k < 0,
        f"top_p={params.top_p}: must be in (0, 1]": not 0 < params.top_p <= 1,
    }
    wrong = [text for text, bad in problems.items() if bad]
    if wrong:
        raise RolloutError("bad sampling parameters: " + "; ".join(wrong))
