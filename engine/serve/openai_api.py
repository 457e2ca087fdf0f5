"""The requests of OpenAI's API that the native server answers, and what it answers.

Pure: text and tokens become each other elsewhere. What is asked for and not offered is refused by
name, never left out in silence.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import EngineError

# Fields of the API that change the answer, and the values that ask for nothing.
NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,),
    "function_call": ("none", "auto"), "functions": ([],), "guided_json": (), "guided_regex": (),
    "logit_bias": ({},), "logprobs": (False,), "min_p": (0,), "min_tokens": (0,),
    "presence_penalty": (0,), "prompt_logprobs": (), "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,),
}  # fmt: skip
_R = TypeVar("_R", bound="_Request")
Tokens = list[Annotated[int, Field(ge=0)]]


class RequestError(EngineError):
    """A request that can't be answered; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class _Request(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    n: int | None = Field(None, ge=1, le=64)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None

    @property
    def stops(self) -> list[str]:
        """Texts at which an answer ends."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def longest(self) -> int | None:
        """Tokens of an answer; None: what the context leaves."""
        return self.max_tokens


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: str | list[str] | Tokens | list[Tokens]
    prompt_logprobs: int | None = Field(None, ge=0, le=1000)

    @property
    def prompts(self) -> list[str] | list[Tokens]:
        """All prompts, as texts or as tokens."""
        given: Any = self.prompt
        single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if single else given

    @property
    def longest(self) -> int | None:
        """OpenAI's own default is 16 tokens."""
        return self.max_tokens or 16


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[_Part]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and text."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": self.role, "content": text}


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def longest(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens or self.max_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as text."""

    text: str
    tokens: int
    finish_reason: str  # "stop" or "length"

    def stopped_at(self, stops: Sequence[str]) -> Answer:
        """It, up to the first of the texts at which it should end."""
        ends = [at for at in (self.text.find(stop) for stop in stops) if at >= 0]
        return Answer(self.text[: min(ends)], self.tokens, "stop") if ends else self


def parse(kind: type[_R], values: object, served: str) -> _R:
    """Read a request of one kind; RequestError for what is wrong or not offered.

    `served` is the one model's name.
    """
    try:
        request = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the request"
        raise RequestError(f"{field}: {first['msg']}") from None
    if request.model is not None and request.model != served:
        raise RequestError(f"model {request.model!r} is not served; {served!r} is", 404)
    if request.stream and getattr(request, "prompt_logprobs", None) is not None:
        raise RequestError("prompt_logprobs can't be streamed; leave one of the two out")
    for name, value in (request.model_extra or {}).items():
        asks = value is not None and name in NOT_OFFERED and value not in NOT_OFFERED[name]
        if asks:
            raise RequestError(
                f"{name}={value!r} is not offered by the native server; leave it out, or serve "
                "the model with --engine vllm"
            )
    return request


def response(
    request: _Request,
    answers: Sequence[Answer],
    prompt_tokens: int,
    model: str,
    prompt_logprobs: Sequence[object] = (),
) -> dict[str, object]:
    """The whole answer to a request, choices in the order of `answers`.

    `prompt_logprobs`: of each prompt, where they were asked for.
    """
    chat = isinstance(request, ChatRequest)
    generated = sum(answer.tokens for answer in answers)
    choices = []
    for index, one in enumerate(answers):
        said: dict[str, object] = {"index": index, "finish_reason": one.finish_reason}
        said |= {"message": _message(one)} if chat else {"text": one.text}
        if prompt_logprobs:
            said["prompt_logprobs"] = prompt_logprobs[index // (request.n or 1)]
        choices.append(said | {"logprobs": None})
    return {
        **_head(chat, "chat.completion" if chat else "text_completion", model),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }


def chunks(whole: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The same answer as the events of a stream: each choice in one piece, when it is whole."""
    chat = whole["object"] == "chat.completion"
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in whole["choices"]:
        said = {"index": choice["index"], "finish_reason": None}
        ended = {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        piece = {"delta": choice["message"]} if chat else {"text": choice["text"]}
        yield head | {"choices": [said | piece]}
        rest: dict[str, object] = {"delta": {}} if chat else {"text": ""}
        yield head | {"choices": [ended | rest]}


def models(name: str, started: int, context: int | None) -> dict[str, object]:
    """The answer to `GET /v1/models`."""
    one = {"id": name, "object": "model", "created": started, "owned_by": "hybridflyte"}
    return {"object": "list", "data": [one | {"max_model_len": context}]}


def error_body(message: str, status: int) -> dict[str, object]:
    """An error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _message(one: Answer) -> dict[str, str]:
    return {"role": "assistant", "content": one.text}


def _head(chat: bool, kind: str, model: str) -> dict[str, object]:
    name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}
