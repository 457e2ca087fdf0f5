"""The attributes of vLLM's objects that are used here, as protocols; vLLM is imported late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class CompletionOutput(Protocol):
    token_ids: Sequence[int]
    logprobs: Any  # has `logprobs`, a float a token
    finish_reason: str | None
    weight_versions: Sequence[Any] | None  # runs of tokens: `version`, `start`, `end`


class RequestOutput(Protocol):
    request_id: str
    finished: bool
    outputs: Sequence[CompletionOutput]
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int | None


class RequestState(Protocol):
    external_req_id: str
    detokenizer: Any  # has `output_token_ids`
    logprobs_processor: Any  # has `logprobs`, as an output
    weight_version_starts: Sequence[tuple[str, int]]


class Executor(Protocol):
    """The parts of vLLM's `MultiprocExecutor` that are used here."""

    workers: Sequence[Any]  # each has a process `proc`, and a pipe or None as `death_writer`
    shutting_down: bool
    rpc_broadcast_mq: object
    response_mqs: Sequence[object]

    def collective_rpc(
        self, method: str, *, timeout: float, args: tuple[object, ...], non_block: bool
    ) -> Future[list[str | None]]: ...


class LLMEngine(Protocol):
    engine_core: Any  # `shutdown`, and `engine_core.model_executor`: an `Executor`
    output_processor: Any  # has `request_states`: a `RequestState` by id
    vllm_config: Any

    def add_request(
        self, request_id: str, prompt: object, params: object, *, lora_request: object
    ) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def reset_prefix_cache(self, reset_running_requests: bool) -> bool: ...
    def set_weight_version(self, weight_version: str) -> None: ...
    def sleep(self, level: int) -> object: ...
    def wake_up(self, tags: list[str]) -> object: ...


class ModelRunner(Protocol):
    kv_caches: Sequence[Tensor]
    vllm_config: Any

    def get_model(self) -> nn.Module: ...


class Worker(Protocol):
    model_runner: ModelRunner


class LLM(Protocol):
    llm_engine: LLMEngine

    def collective_rpc(self, method: Callable[[Worker], T]) -> list[T]: ...
