"""The native rollout engine behind an HTTP server of OpenAI's API (Starlette on uvicorn).

It listens before the model (and torch) is loaded; until then `/health` and requests answer 503.
A field that the server does not offer is refused by name, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import ConfigError, EngineError
from engine.serve import Identity

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
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | Tokens | list[Tokens]
    prompt_logprobs: int | None = Field(None, ge=0, le=1000)

    @property
    def prompts(self) -> list[str] | list[Tokens]:
        """The prompts, as texts or as tokens."""
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if single else prompt

    @property
    def longest(self) -> int:
        """Tokens of an answer; OpenAI's own default is 16."""
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
        """Return the role and text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    continue_final_message: bool | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of an answer, the newer name first; None: what the context leaves."""
        return self.max_completion_tokens or self.max_tokens


Completions = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion as text."""

    text: str
    tokens: int
    finish_reason: str  # "stop" or "length"


def parse(request_class: type[_R], values: object, served: str) -> _R:
    """Read a request for the model `served`; RequestError for what is wrong or not offered."""
    try:
        request = request_class.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the request"
        raise RequestError(f"{field}: {first['msg']}") from None
    if request.model is not None and request.model != served:
        raise RequestError(f"model {request.model!r} is not served; {served!r} is", 404)
    if request.stream and getattr(request, "prompt_logprobs", None) is not None:
        raise RequestError("prompt_logprobs can't be streamed; leave one of the two out")
    for name, value in (request.model_extra or {}).items():
        if value is not None and name in NOT_OFFERED and value not in NOT_OFFERED[name]:
            raise RequestError(
                f"{name}={value!r} is not offered by the native server; leave it out, or serve "
                "the model with --engine vllm"
            )
    return request


def response(
    request: Completions,
    answers: Sequence[Answer],
    prompt_tokens: int,
    model: str,
    prompt_logprobs: Sequence[object] = (),
) -> dict[str, object]:
    """Build the full answer; its choices are in the order of `answers`."""
    chat = isinstance(request, ChatRequest)
    generated = sum(answer.tokens for answer in answers)
    choices: list[dict[str, object]] = []
    for index, answer in enumerate(answers):
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
        choices.append(choice | ({"message": message} if chat else {"text": answer.text}))
        if prompt_logprobs:
            choices[-1]["prompt_logprobs"] = prompt_logprobs[index // (request.n or 1)]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }


def chunks(answer: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Split an answer into the events of a stream, each choice in one piece."""
    chat = answer["object"] == "chat.completion"
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in answer["choices"]:
        text = {"delta": choice["message"]} if chat else {"text": choice["text"]}
        end: dict[str, object] = {"delta": {}} if chat else {"text": ""}
        for reason, piece in ((None, text), (choice["finish_reason"], end)):
            yield head | {"choices": [{"index": choice["index"], "finish_reason": reason} | piece]}


LARGEST = 8 << 20  # bytes of a request
BODY_S = 60.0  # for a client to send its request
STOP_S = 3  # for requests under way when the server ends
KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


class Backend(Protocol):
    """A loaded model that answers requests: `native_backend.NativeBackend`, imported late."""

    context: int  # longest prompt plus completion, in tokens

    async def complete(self, request: Completions) -> tuple[list[Answer], int, list[object]]: ...
    def close(self) -> None: ...


class ApiServer:
    """The endpoint; it answers from `start` on, and with completions once it has a backend."""

    identity: Identity

    def __init__(self, host: str, port: int, request_timeout: float) -> None:
        """Listen on the port; ConfigError where another process does."""
        self._socket = listen(host, port)
        self.server_port: int = self._socket.getsockname()[1]
        self.request_timeout, self.created = request_timeout, int(time.time())
        self.backend: Backend | None = None
        routes = [Route("/health", self._health), Route("/v1/models", self._models)]
        routes += [Route(path, self._complete, methods=["POST"]) for path in KINDS]
        refused = dict.fromkeys((EngineError, HTTPException, Exception), _refuse)
        app = Starlette(routes=routes, exception_handlers=refused)
        # Requests are private: no access log.
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def start(self, identity: Identity) -> None:
        """Answer requests in a thread, for the model of this identity."""
        self.identity = identity
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, and wait a moment for what is under way."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_S + 1)
        self._socket.close()
        if self.backend is not None:
            self.backend.close()

    async def _health(self, request: Request) -> Response:
        state, status = ("loading", 503) if self.backend is None else ("ok", 200)
        values = {"status": state, "engine": "native", "model": asdict(self.identity)}
        return _json(values, status)

    async def _models(self, request: Request) -> Response:
        context = None if self.backend is None else self.backend.context
        model = {"id": self.identity.name, "object": "model", "created": self.created}
        model |= {"owned_by": "hybridflyte", "max_model_len": context}
        return _json({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> Response:
        name, values = self.identity.name, await _body(request)
        completions = parse(KINDS[request.scope["path"]], values, name)
        if self.backend is None:
            raise RequestError("the model is being loaded", 503)
        try:
            async with asyncio.timeout(self.request_timeout):
                answers, tokens, log_probs = await self.backend.complete(completions)
        except TimeoutError:
            raise RequestError(
                "the answer took longer than --request-timeout; ask for fewer tokens, or when "
                "fewer others ask",
                504,
            ) from None
        except asyncio.CancelledError:
            raise RequestError("the server is stopping", 503) from None
        answer = response(completions, answers, tokens, name, log_probs)
        if not completions.stream:
            return _json(answer)
        events = [*map(json.dumps, chunks(answer)), "[DONE]"]
        data = "".join(f"data: {event}\n\n" for event in events)
        return Response(data, headers={"content-type": "text/event-stream"})


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens there, on a free port for 0; raise ConfigError if it can't."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        reason = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(
            f"port {port} of {host} can't be listened on: {reason}; stop what has it, or choose "
            "another with --port (0: any that is free)"
        ) from error


async def _body(request: Request) -> object:
    """Read the request's JSON; raise RequestError for what is too large, too slow, or none."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > LARGEST:
                    raise RequestError(f"the request has more than {LARGEST} bytes", 413)
        return json.loads(data)
    except (TimeoutError, ClientDisconnect):
        raise RequestError(f"the request did not come within {BODY_S:g} s", 408) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON: {error}") from None


async def _refuse(request: Request, error: Exception) -> Response:
    """Describe an error as OpenAI's clients read it; uvicorn logs one that is not foreseen."""
    status, message = 500, "the server failed at this request; its log says why"
    if isinstance(error, HTTPException):
        status = error.status_code
        message = f"there is no {request.method} {request.url.path}; POST to {' or '.join(KINDS)}"
    elif isinstance(error, EngineError):
        status, message = getattr(error, "status", 500), str(error)
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": message, "type": error_type, "param": None, "code": status}
    return _json({"error": body}, status)


def _json(values: object, status: int = 200) -> Response:
    return Response(json.dumps(values), status, media_type="application/json")
