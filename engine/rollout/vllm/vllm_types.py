"""The attributes of vLLM's objects that are used here, as protocols; vLLM is imported late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class FlatLogprobs(Protocol):
    logprobs: Sequence[float]


class WeightVersionSpan(Protocol):
    version: str
    start: int
    end: int


class CompletionOutput(Protocol):
    token_ids: Sequence[int]
    logprobs: FlatLogprobs
    finish_reason: str | None
    weight_versions: Sequence[WeightVersionSpan] | None


class RequestOutput(Protocol):
    request_id: str
    finished: bool
    outputs: Sequence[CompletionOutput]
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int | None


class Detokenizer(Protocol):
    output_token_ids: Sequence[int]


class LogprobsProcessor(Protocol):
    logprobs: FlatLogprobs


class RequestState(Protocol):
    external_req_id: str
    detokenizer: Detokenizer
    logprobs_processor: LogprobsProcessor
    weight_version_starts: Sequence[tuple[str, int]]


class OutputProcessor(Protocol):
    request_states: Mapping[str, RequestState]


class WorkerProcess(Protocol):
    pid: int
    name: str
    sentinel: int
    exitcode: int | None

    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...
    def join(self, timeout: float) -> None: ...


class WorkerHandle(Protocol):
    proc: WorkerProcess
    death_writer: Connection | None


class Executor(Protocol):
    """The parts of vLLM's `MultiprocExecutor` that are used here."""

    workers: Sequence[WorkerHandle]
    shutting_down: bool
    rpc_broadcast_mq: object
    response_mqs: Sequence[object]

    def collective_rpc(
        self, method: str, *, timeout: float, args: tuple[object, ...], non_block: bool
    ) -> Future[list[str | None]]: ...


class EngineCore(Protocol):
    model_executor: Executor


class EngineCoreClient(Protocol):
    engine_core: EngineCore

    def shutdown(self) -> None: ...


class ModelConfig(Protocol):
    enable_sleep_mode: bool
    quantization: str | None


class CacheConfig(Protocol):
    kv_cache_size_tokens: int | None
    block_size: int


class VllmConfig(Protocol):
    model_config: ModelConfig
    cache_config: CacheConfig


class LLMEngine(Protocol):
    engine_core: EngineCoreClient
    output_processor: OutputProcessor
    vllm_config: VllmConfig

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
    vllm_config: VllmConfig

    def get_model(self) -> nn.Module: ...


class Worker(Protocol):
    model_runner: ModelRunner


class LLM(Protocol):
    llm_engine: LLMEngine

    def collective_rpc(self, method: Callable[[Worker], T]) -> list[T]: ...
