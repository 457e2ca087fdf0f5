"""What every rollout engine takes and gives; the engines themselves live beside this file.

`native` decodes with the trainer's own weights; `vllm` runs a vLLM engine that shares them or is
brought up to date; `server` speaks to one that somebody else runs. An engine is chosen by
`rollout.engine`; a new one registers itself with `@register_engine("name")` in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.errors import ConfigError, RolloutError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy decoding."""

    n: int = 1  # completions a prompt, e.g. 8
    max_new_tokens: int = 64  # length limit of a completion, end token included
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with this probability mass
    seed: int = 0  # same seed, prompts and weights give the same tokens
    stop_token_ids: tuple[int, ...] = ()  # sampling one of these ends the completion, e.g. (2,)
    first_prompt: int = 0  # draws are those of prompts number first_prompt, first_prompt + 1, …


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer to the prompt at `prompt_index`."""

    prompt_index: int  # position of its prompt in the request, e.g. 0
    token_ids: list[int]  # sampled tokens, the stop token included, e.g. [17, 9, 2]
    log_probs: list[float]  # log-prob of each token under the distribution it was drawn from;
    # for greedy decoding, under softmax(logits)
    finish_reason: str  # "stop" (end token) or "length"
    policy_version: int  # updates the sampling weights had seen, e.g. 12; where weights changed
    # on the way, the oldest of `token_versions`: the one that a staleness bound must use
    token_versions: list[int] | None = None  # policy version of each token, e.g. [12, 12, 13];
    # None: all are of `policy_version`


class RolloutEngine(Protocol):
    """Tokens in, completions out.

    `generate` returns `n` completions a prompt, those of prompt i at [i*n, (i+1)*n).
    `update_weights` makes the next `generate` use the trainer's current weights; with an engine
    that shares the trainer's storage it copies nothing.
    """

    @property
    def policy_version(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]: ...

    def update_weights(self, model: torch.nn.Module, version: int) -> None: ...

    def close(self) -> None: ...


EngineFactory = Callable[..., RolloutEngine]
_ENGINES: dict[str, EngineFactory] = {}


def register_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Class decorator: make an engine selectable as `rollout.engine=<name>`."""

    def add(factory: EngineFactory) -> EngineFactory:
        _ENGINES[name] = factory
        return factory

    return add


def check_engine(name: str) -> None:
    """Raise ConfigError unless `name` is a rollout engine."""
    from engine.rollout import native, server, vllm  # noqa: F401  (they register themselves)

    if name not in _ENGINES:
        raise ConfigError(f"rollout.engine={name!r} is unknown; choose one of {sorted(_ENGINES)}")


def check_version(engine: RolloutEngine, version: int) -> None:
    """Raise RolloutError unless `engine` serves policy `version`; call it before a rollout."""
    if engine.policy_version != version:
        raise RolloutError(
            f"{type(engine).__name__} serves policy version {engine.policy_version}, the trainer's "
            f"is {version}; call update_weights before generate"
        )


def create_engine(name: str, model: torch.nn.Module, **options: Any) -> RolloutEngine:
    """Build the engine `name` over the trainer's `model` (a transformers causal LM).

    Options every engine takes: `max_num_seqs` (rows decoded at once) and `max_model_len` (longest
    prompt plus completion, in tokens). Raises ConfigError for an unknown name.
    """
    check_engine(name)
    return _ENGINES[name](model, **options)
