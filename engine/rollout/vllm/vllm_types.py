"""The attributes of vLLM's objects that are used here, as protocols; vLLM is imported late."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

# Private objects: what is used of them is in `private_names.yaml`.
Executor: TypeAlias = Any
ModelRunner: TypeAlias = Any
Worker: TypeAlias = Any


class CompletionOutput(Protocol):
    token_ids: Sequence[int]
    logprobs: Any  # has `logprobs`, a float a token
    finish_reason: str | None
    routed_experts: Any | None  # uint8 or uint16 array [prompt + completion − 1, layers, k]


class RequestOutput(Protocol):
    request_id: str
    finished: bool
    outputs: Sequence[CompletionOutput]
    prompt_token_ids: Sequence[int]


class LLMEngine(Protocol):
    engine_core: Any  # `shutdown`, and `engine_core.model_executor`: an `Executor`
    output_processor: Any  # has `request_states`, by id
    vllm_config: Any

    def add_request(
        self, request_id: str, prompt: object, params: object, *, lora_request: object
    ) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def reset_prefix_cache(self, reset_running_requests: bool) -> bool: ...
    def sleep(self, level: int) -> object: ...
    def wake_up(self, tags: list[str]) -> object: ...


class LLM(Protocol):
    llm_engine: LLMEngine

    def collective_rpc(self, method: Callable[[Worker], object]) -> list[Any]: ...
