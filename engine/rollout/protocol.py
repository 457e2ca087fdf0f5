"""What every rollout engine takes and gives: read this first, then an engine's folder.

`native` decodes with the trainer's own weights; `vllm` runs a vLLM engine that shares them or is
brought up to date; `server` uses one that was started elsewhere; streams are in `stream`. An engine
is chosen by `rollout.engine`; a new one registers itself with `@register_engine("name")` in a
module of its own, here or outside (`rollout.engine: my_module:MyEngine`), and says what it can do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engine.batch import check_token_ids
from engine.config import RolloutConfig
from engine.errors import ConfigError, RolloutError
from engine.registry import Registry

TokenLists = Sequence[Sequence[int]]  # of prompts or completions, one list each
OnProgress = Callable[[int], None] | None  # gets the number of completions finished so far


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
    routed_experts: Tensor | None = None  # int16 [prompt + completion − 1, layers · k]: the experts
    # that each token but the last was given to, where they are recorded

    @property
    def versions(self) -> list[int]:
        """Policy version of each token."""
        return self.token_versions or [self.policy_version] * len(self.token_ids)


class RolloutEngine(Protocol):
    """Tokens in, completions out.

    `generate` returns `n` completions a prompt, those of prompt i at [i*n, (i+1)*n).
    `update_weights` makes the next `generate` use the trainer's current weights; with an engine
    that shares the trainer's storage it copies nothing.
    """

    @property
    def policy_version(self) -> int: ...

    def generate(
        self, prompts: TokenLists, params: SamplingParams, on_progress: OnProgress = None
    ) -> list[Completion]: ...

    def update_weights(self, model: torch.nn.Module, version: int) -> None: ...

    def close(self) -> None: ...


EngineFactory = Callable[..., RolloutEngine]
_F = TypeVar("_F", bound=EngineFactory)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What a rollout engine can do; code outside of it asks this, never its name."""

    streams: bool = False  # has `stream()` (`RolloutStream`): trainer.mode=async, rollout.parts
    cuts: bool = False  # its streams have `cut`: rollout.agent.turn_timeout_s
    adapters: bool = False  # decodes a policy with LoRA adapters
    decodes_shards: bool = False  # takes a rank's tensor-parallel shards in place of a model
    loads_shards: bool = False  # takes a sharded policy's shards into parameters of its own
    receives: bool = False  # takes broadcasts of whole weights while it decodes
    own_processes: bool = False  # decodes in processes that it starts itself
    streams_experts: bool = False  # its streams record experts too, not `generate` alone
    exclusive: bool = False  # sets up its process for itself: signals, threads, devices
    remote: bool = False  # decodes on devices that are not the run's
    memory_share: float = 0.0  # of a GPU, that it takes for weights and cache; 0: as it needs
    stays_awake: bool = False  # keeps that share between rollouts
    sleep_level: int = 0  # 1 or 2: frees device memory between rollouts (`sleep`, `wake_weights`)
    settings: frozenset[str] = frozenset({"max_num_seqs"})  # of ENGINE_SETTINGS, what it reads


ENGINE_SETTINGS = (
    *("max_num_seqs", "kv_cache_memory_mb", "cuda_graphs", "enable_rollout_routing_replay"),
    *("kv_on_update", "lora", "server", "vllm"),
)
"""Fields of RolloutConfig that only some engines read."""
COMMON_OPTIONS = ("max_num_seqs", "max_model_len", "kv_cache_memory_mb", "seed")
"""Keyword arguments that every engine takes."""


@dataclass(frozen=True, slots=True)
class _Engine:
    factory: EngineFactory
    capabilities: EngineCapabilities | Callable[[RolloutConfig], EngineCapabilities]
    options: Callable[[RolloutConfig], dict[str, object]] | None
    check: Callable[[RolloutConfig], None] | None


_registry: Registry[_Engine] = Registry(
    "rollout engine",
    "rollout.engine",
    ("engine.rollout.native", "engine.rollout.vllm", "engine.rollout.server"),
    "@register_engine(name)",
)


def register_engine(
    name: str,
    capabilities: EngineCapabilities
    | Callable[[RolloutConfig], EngineCapabilities] = EngineCapabilities(),
    *,
    options: Callable[[RolloutConfig], dict[str, Any]] | None = None,
    check: Callable[[RolloutConfig], None] | None = None,
) -> Callable[[_F], _F]:
    """Class decorator: make an engine selectable as `rollout.engine=<name>`.

    The class is called with the trainer's model, `COMMON_OPTIONS` and its own options. Those are
    its other keyword-only parameters with defaults, set by `rollout.options`; or what `options`
    makes of the settings, for an engine with a section of its own. `capabilities` may depend on the
    settings too. `check` raises ConfigError for settings that contradict each other.
    """

    def add(factory: _F) -> _F:
        _registry.add(name, _Engine(factory, capabilities, options, check), factory)
        return factory

    return add


def check_engine(name: str) -> None:
    """Raise ConfigError unless `name` is a rollout engine."""
    _registry.get(name)


def check_engine_settings(config: RolloutConfig) -> None:
    """Raise ConfigError for an unknown engine or option, and for contradicting settings."""
    engine_options(config)
    check = _registry.get(config.engine).check
    if check is not None:
        check(config)


def engine_capabilities(config: RolloutConfig) -> EngineCapabilities:
    capabilities = _registry.get(config.engine).capabilities
    return capabilities(config) if callable(capabilities) else capabilities


def engine_options(config: RolloutConfig) -> dict[str, object]:
    """Return the keyword arguments of the configured engine besides `COMMON_OPTIONS`."""
    engine = _registry.get(config.engine)
    if engine.options is not None and config.options:
        has_section = config.engine in RolloutConfig.model_fields
        section = f"rollout.{config.engine}" if has_section else "those of rollout"
        raise ConfigError(
            f"rollout.options has no effect with rollout.engine={config.engine}; set {section}"
        )
    for name in COMMON_OPTIONS:
        if name in config.options:
            raise ConfigError(f"rollout.options.{name} is given by the run; remove it")
    if engine.options is not None:
        return engine.options(config)
    return _registry.options(config.engine).parse(config.options, "rollout.options")


def check_lora(way: str) -> None:
    """Raise ConfigError unless `way` is one of decoding adapters (`RolloutConfig.lora`)."""
    if way not in ("", "merged", "adapter"):
        raise ConfigError(f"rollout.lora={way!r} is unknown; set merged or adapter")


def check_version(engine: RolloutEngine, version: int) -> None:
    """Raise RolloutError unless `engine` serves policy `version`; call it before a rollout."""
    if engine.policy_version != version:
        raise RolloutError(
            f"{type(engine).__name__} serves policy version {engine.policy_version}, the trainer's "
            f"is {version}; call update_weights before generate"
        )


def create_engine(name: str, model: torch.nn.Module, **options: object) -> RolloutEngine:
    """Build the engine `name` over a transformers causal LM; ConfigError for an unknown name."""
    return _registry.get(name).factory(model, **options)


class WeightGuard:
    """The policy version of an engine's weights, and whether they may be served."""

    def __init__(self, engine: str) -> None:
        self.version = 0
        self._engine = engine
        self._broken: str | None = None

    def begin(self, version: int) -> None:
        """Serve nothing until an update succeeds; RolloutError for an older version."""
        if version < self.version:
            raise RolloutError(
                f"rollout engine {self._engine!r} holds policy version {self.version} and was "
                f"handed the older {version}; pass versions that never fall"
            )
        self._broken = f"its update to policy version {version} did not finish"

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Serve nothing unless the body ends without an error; then the weights are `version`."""
        self.begin(version)
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
        """Raise RolloutError unless the weights are complete."""
        if self._broken is not None:
            raise RolloutError(
                f"rollout engine {self._engine!r} can't serve: {self._broken}; call "
                f"update_weights with a whole model, or create a new engine"
            )


def resolve_max_model_len(requested: int | None, context: int | None) -> int:
    """Return the longest prompt plus completion, or raise ConfigError if the model has less."""
    if requested is None:
        if context is None:
            raise ConfigError("the model has no max_position_embeddings; pass max_model_len")
        return context
    if requested < 2:
        raise ConfigError(f"max_model_len={requested} holds no completion; use 2 or more")
    if context is not None and requested > context:
        raise ConfigError(
            f"max_model_len={requested} exceeds the model's context of {context} tokens; lower it"
        )
    return requested


def check_request(
    prompts: TokenLists, params: SamplingParams, max_model_len: int, vocabulary: int
) -> None:
    """Raise RolloutError or ModelError for what can't be decoded, before anything is computed."""
    check_params(params)
    for index, prompt in enumerate(prompts):
        check_prompt(f"prompt {index}", prompt, max_model_len, vocabulary)


def check_prompt(name: str, prompt: Sequence[int], max_model_len: int, vocabulary: int) -> None:
    """Raise RolloutError for a prompt that can't be completed, ModelError for an unknown token."""
    if len(prompt) == 0:
        raise RolloutError(f"{name} is empty; give it at least one token, such as the BOS token")
    if len(prompt) >= max_model_len:
        raise RolloutError(
            f"{name} has {len(prompt)} tokens, which leaves no room for a completion in "
            f"max_model_len={max_model_len}; shorten or filter it (data.max_prompt_length)"
        )
    check_token_ids(name, prompt, vocabulary)


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
