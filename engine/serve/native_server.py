"""The native rollout engine behind an HTTP server of OpenAI's API (Starlette on uvicorn).

It listens before the model (and torch) is loaded; until then `/health` and requests answer 503.
What is asked for and not offered is refused by name, never left out in silence.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import ConfigError, DataError, EngineError, ModelError, RolloutError
from engine.serve import Identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.rollout.protocol import Completion, RolloutEngine


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


LARGEST = 8 << 20  # bytes of a request
BODY_S = 60.0  # for a client to send its request
STOP_S = 3  # for requests under way when the server ends
Completions = CompletionRequest | ChatRequest
KINDS: dict[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


class Backend:
    """A loaded model: texts in, texts out."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        stops: tuple[int, ...],
        context: int,
        vocabulary: int,
        model: Any = None,
    ) -> None:
        """`model` is the engine's, for log-probs of prompts."""
        from engine.serve.batching import Batcher

        self.context, self._model = context, model
        self._tokenizer, self._stops, self._vocabulary = tokenizer, stops, vocabulary
        self._texts = ThreadPoolExecutor(1)  # a tokenizer is not safe for use by two threads
        self._engine, self.batcher = engine, Batcher(engine)

    @staticmethod
    def load(folder: Path, max_model_len: int | None) -> Backend:
        """Load a model's folder onto this process's device.

        Its weights are bfloat16 where the hardware computes in it, else float32. Raises ModelError
        for a folder that can't be loaded and ConfigError for a length beyond the model's context.
        """
        import torch

        from engine.data.templates import stop_token_ids
        from engine.data.tokenizer import load_tokenizer
        from engine.models import load_model, resolve_dtype, text_config
        from engine.rollout.protocol import create_engine, resolve_max_model_len
        from engine.rollout.trainer_model import context_length

        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(folder)
        shape = text_config(folder)
        model = load_model(folder, resolve_dtype("auto", shape.hidden_size)).eval()
        torch.nn.Module.to(model, torch.device(device))  # in place
        context = resolve_max_model_len(max_model_len, context_length(model))
        engine = create_engine("native", model, max_model_len=context)
        stops = stop_token_ids(tokenizer, model.generation_config)
        return Backend(engine, tokenizer, stops, context, int(shape.vocab_size), model)

    async def complete(self, request: Completions) -> tuple[list[Answer], int, list[object]]:
        """All answers to a request in order, its prompts' tokens, and log-probs where asked for.

        Raises RequestError for a prompt that can't be completed. Where it is cancelled, so are
        those of its prompts that still wait.
        """
        from engine.rollout.protocol import SamplingParams

        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._texts, self._encode, request)
        temperature = 1.0 if request.temperature is None else request.temperature
        jobs = [
            self.batcher.submit(
                prompt,
                SamplingParams(
                    n=request.n or 1,
                    max_new_tokens=min(request.longest or self.context, self.context - len(prompt)),
                    temperature=temperature,
                    top_k=max(request.top_k or 0, 0),
                    top_p=request.top_p or 1.0,
                    seed=(request.seed or 0) & (2**62 - 1),
                    stop_token_ids=self._stops,
                    first_prompt=i,
                ),
                request.seed is not None,
            )
            for i, prompt in enumerate(prompts)
        ]
        done = await asyncio.gather(*map(asyncio.wrap_future, jobs))
        answers = await loop.run_in_executor(
            self._texts, self._answers, [one for own in done for one in own], request.stops
        )
        said = await loop.run_in_executor(self._texts, self._prompt_log_probs, request, prompts)
        return answers, sum(map(len, prompts)), said

    def _prompt_log_probs(self, request: object, prompts: list[list[int]]) -> list[object]:
        from engine.serve.batching import prompt_log_probs

        top_k = getattr(request, "prompt_logprobs", None)
        return [] if top_k is None else [prompt_log_probs(self._model, p, top_k) for p in prompts]

    def _encode(self, request: Completions) -> list[list[int]]:
        from engine.data.templates import encode_prompts, encode_text
        from engine.rollout.protocol import check_prompt

        try:
            if isinstance(request, ChatRequest):
                chat = [message.plain() for message in request.messages]
                prompts = encode_prompts(self._tokenizer, [chat], "messages")
            else:
                prompts = [
                    encode_text(self._tokenizer, one) if isinstance(one, str) else one
                    for one in request.prompts
                ]
            for i, prompt in enumerate(prompts):
                check_prompt(f"prompt {i}", prompt, self.context, self._vocabulary)
        except (DataError, ModelError, RolloutError) as error:
            raise RequestError(str(error)) from None
        if not prompts:
            raise RequestError("prompt is empty; give a text or token ids")
        return prompts

    def _answers(self, done: list[Completion], stops: list[str]) -> list[Answer]:
        return [self._answer(one).stopped_at(stops) for one in done]

    def _answer(self, one: Completion) -> Answer:
        from engine.data.templates import decode_response

        ids = one.token_ids
        ended = bool(ids) and ids[-1] in self._stops
        text = decode_response(self._tokenizer, ids[:-1] if ended else ids)
        return Answer(text, len(ids), one.finish_reason)


class NativeServer:
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
        # What clients ask is theirs: no line a request.
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
            self.backend.batcher.close()

    async def _health(self, request: Request) -> Response:
        state, status = ("loading", 503) if self.backend is None else ("ok", 200)
        values = {"status": state, "engine": "native", "model": self.identity.to_dict()}
        return _json(values, status)

    async def _models(self, request: Request) -> Response:
        context = self.backend.context if self.backend is not None else None
        return _json(models(self.identity.name, self.created, context))

    async def _complete(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            raise RequestError("the server is stopping", 503) from None

    async def _answer(self, request: Request) -> Response:
        name, values = self.identity.name, await _body(request)
        asked = parse(KINDS[request.scope["path"]], values, name)
        if self.backend is None:
            raise RequestError("the model is being loaded", 503)
        try:
            async with asyncio.timeout(self.request_timeout):
                answers, prompt_tokens, said = await self.backend.complete(asked)
        except TimeoutError:
            raise RequestError(
                "the answer took longer than --request-timeout; ask for fewer tokens, or when "
                "fewer others ask",
                504,
            ) from None
        whole = response(asked, answers, prompt_tokens, name, said)
        if not asked.stream:
            return _json(whole)
        events = [*map(json.dumps, chunks(whole)), "[DONE]"]
        data = "".join(f"data: {event}\n\n" for event in events)
        return Response(data, headers={"content-type": "text/event-stream"})


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, on a free port for 0; ConfigError says why it can't."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = "is in use by another process; stop that, or choose another with --port"
        elif error.errno == errno.EACCES:
            what = "may not be used by this user; choose one above 1023 with --port"
        else:
            what = f"can't be listened on: {error.strerror or error}; check --host and --port"
        raise ConfigError(f"port {port} of {host} {what} (0: any that is free)") from error


async def _body(request: Request) -> object:
    """The request's JSON; RequestError for what is too large, too slow, or none."""
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
    """An error as OpenAI's clients read it; uvicorn logs one that is not foreseen."""
    status, message = 500, "the server failed at this request; its log says why"
    if isinstance(error, HTTPException):
        status = error.status_code
        message = f"there is no {request.method} {request.url.path}; POST to {' or '.join(KINDS)}"
    elif isinstance(error, EngineError):
        status, message = getattr(error, "status", 500), str(error)
    return _json(error_body(message, status), status)


def _json(values: object, status: int = 200) -> Response:
    return Response(json.dumps(values), status, media_type="application/json")
