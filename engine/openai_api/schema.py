"""Requests of OpenAI's completions and chat completions, and their answers.

Nothing here knows a server: `parse` takes what a client sent, within `RequestLimits`; `Reply`
builds what the client gets back, as a whole or as the events of a stream.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.config.base import Section
from engine.errors import EngineError

_R = TypeVar("_R", bound="_Request")
NO_TOOLS: dict[str, tuple[object, ...]] = {
    "function_call": ("none", "auto"), "functions": ([],), "tool_choice": ("none", "auto"),
    "tools": ([],),
}  # fmt: skip
NO_LOGPROBS: dict[str, tuple[object, ...]] = {"logprobs": (False,), "top_logprobs": (0,)}
# Fields of the API that change the answer, and the values that ask for nothing.
UNCOMMON: dict[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "guided_json": (),
    "guided_regex": (), "logit_bias": ({},), "min_p": (0,), "min_tokens": (0,),
    "presence_penalty": (0,), "prompt_logprobs": (), "repetition_penalty": (1,),
    "response_format": ({"type": "text"},), "suffix": ("",),
}  # fmt: skip


class RequestError(EngineError):
    """A request that can't be answered; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RequestLimits(Section):
    """Limits on one request; more is refused before any text becomes tokens."""

    max_prompts: int = Field(1024, ge=1, le=1_000_000, description="Prompts of a request")
    max_n: int = Field(64, ge=1, le=16_384, description="Completions of a prompt (n)")
    max_tokens: int = Field(1_000_000, ge=1)
    """Tokens that a request may generate, prompts times n times max_tokens; and log-probs that it
    may ask for, tokens of its prompts times (prompt_logprobs + 1)"""


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False  # the last event counts tokens


class _Request(BaseModel):
    """The fields of both kinds of requests."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = Field(None, max_length=1000)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of an answer; None: what the context leaves."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts at which an answer ends."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    prompt: Any
    prompt_logprobs: int | None = Field(None, ge=0, le=1000)

    @field_validator("prompt")
    @classmethod
    def _is_text_or_tokens(cls, prompt: object) -> object:
        """Checked here: pydantic would keep an error for each token of a long list."""
        several = isinstance(prompt, list) and all(map(_is_prompt, prompt))
        if not (several or _is_prompt(prompt)):
            raise ValueError("give a text, a list of texts, token ids, or a list of token ids")
        return prompt

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or as tokens."""
        prompt = self.prompt
        single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if single else prompt

    @property
    def longest(self) -> int:
        return self.max_tokens or 16  # OpenAI's own default


def _is_prompt(value: object) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    return all(type(token) is int and token >= 0 for token in value)


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[_Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the role and text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    continue_final_message: bool | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens  # the newer name first


Completions = CompletionRequest | ChatRequest
KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def read_json(data: bytes | bytearray) -> Any:
    """The values of a request's body; raise RequestError for what is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None


def parse(
    request_class: type[_R],
    values: object,
    served: str,
    limits: RequestLimits,
    not_offered: Mapping[str, Sequence[object]],
    instead: str = ", or serve the model with --engine vllm",
) -> _R:
    """Read a request for the model `served`; RequestError for what is wrong or not offered.

    `not_offered` has fields that the server can't honour, and the values that ask for nothing;
    `instead` is what errors advise besides leaving one out.
    """
    try:
        request = request_class.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"]) or "the request"
        raise RequestError(f"{location}: {first['msg'].removeprefix('Value error, ')}") from None
    if request.model is not None and request.model != served:
        raise RequestError(f"model {request.model!r} is not served; {served!r} is", 404)
    if request.stream and getattr(request, "prompt_logprobs", None) is not None:
        raise RequestError("prompt_logprobs can't be streamed; leave one of the two out")
    for name, value in (request.model_extra or {}).items():
        if value is not None and name in not_offered and value not in not_offered[name]:
            raise RequestError(
                f"{name}={repr(value)[:100]} is not offered by this server; leave it out{instead}"
            )
    _check_limits(request, limits)
    return request


def _check_limits(request: _Request, limits: RequestLimits) -> None:
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    n = request.n or 1
    if prompts > limits.max_prompts:
        raise RequestError(
            f"prompt: the request has {prompts} prompts, and this server takes "
            f"{limits.max_prompts} at once; send them in several requests"
        )
    if n > limits.max_n:
        raise RequestError(f"n: Input should be less than or equal to {limits.max_n}")
    check_tokens(limits, prompts, n, request.longest or 1)


def check_tokens(limits: RequestLimits, prompts: int, n: int, longest: int) -> None:
    """Raise RequestError for a request that may generate more tokens than its server allows."""
    if prompts * n * longest > limits.max_tokens:
        raise RequestError(
            f"max_tokens: {prompts} prompts, n={n} and {longest} tokens an answer may generate "
            f"{prompts * n * longest} tokens, and this server takes {limits.max_tokens} a request; "
            "lower one of them, or send several requests"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as text."""

    text: str
    tokens: int
    finish_reason: str  # "stop", "length" or "tool_calls"
    message: Mapping[str, Any] | None = None  # of a chat; None: the text is all there is to it
    log_probs: Mapping[str, object] | None = None  # the choice's `logprobs`


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request that has been accepted; its parts share their id and time."""

    request: Completions
    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Tell whether the request is a chat."""
        return isinstance(self.request, ChatRequest)

    def whole(
        self, answers: Sequence[Answer], prompt_logprobs: Sequence[object] = ()
    ) -> dict[str, object]:
        """Build the full answer; its choices are in the order of `answers`."""
        choices: list[dict[str, object]] = []
        for index, answer in enumerate(answers):
            about = {"finish_reason": answer.finish_reason, "logprobs": answer.log_probs}
            choices.append({"index": index, **about, **self._piece("message", answer)})
            if prompt_logprobs:
                n = self.request.n or 1
                choices[-1]["prompt_logprobs"] = prompt_logprobs[index // n]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self._usage(answers)}

    def events(self, index: int, answer: Answer) -> Iterator[dict[str, object]]:
        """Build a stream's events of the choice `index`, which comes in one piece."""
        end: dict[str, object] = {"delta": {}} if self.chat else {"text": ""}
        first = {"logprobs": answer.log_probs, **self._piece("delta", answer)}
        for reason, part in ((None, first), (answer.finish_reason, end)):
            yield self._event([{"index": index, "finish_reason": reason, **part}])

    def _piece(self, name: str, answer: Answer) -> dict[str, object]:
        if not self.chat:
            return {"text": answer.text}
        message = dict(answer.message or {"role": "assistant", "content": answer.text})
        if name == "delta" and "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            message["tool_calls"] = [{"index": i, **call} for i, call in calls]
        return {name: message}

    def last_event(self, answers: Iterable[Answer]) -> dict[str, object] | None:
        """Build the event with the counts of tokens, where the client asks for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return self._event([]) | {"usage": self._usage(answers)}

    def _event(self, choices: list[dict[str, object]]) -> dict[str, object]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._head(kind) | {"choices": choices}

    def _head(self, kind: str) -> dict[str, object]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created}
        return head | {"model": self.model}

    def _usage(self, answers: Iterable[Answer]) -> dict[str, int]:
        generated = sum(answer.tokens for answer in answers)
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": generated}
        return usage | {"total_tokens": self.prompt_tokens + generated}


def error_body(message: str, status: int) -> dict[str, object]:
    """Describe an error as OpenAI's clients read it."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": error_type, "param": None, "code": status}}


def sse(event: object) -> str:
    """Write an event of a stream; `[DONE]` ends one."""
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
