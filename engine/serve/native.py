"""The native rollout engine behind a small HTTP server (Starlette on uvicorn).

It listens before the model is loaded; until it is, `/health` and requests answer 503.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import ConfigError, DataError, EngineError, ModelError, RolloutError
from engine.serve.openai_api import (
    Answer,
    ChatRequest,
    CompletionRequest,
    RequestError,
    chunks,
    error_body,
    models,
    parse,
    response,
)
from engine.serve.served_model import Identity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from engine.rollout.protocol import Completion, RolloutEngine

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
        from engine.rollout.causal_lm import context_length
        from engine.rollout.protocol import create_engine
        from engine.rollout.requests import resolve_max_model_len

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
        from engine.serve.prompt_log_probs import prompt_log_probs

        top_k = getattr(request, "prompt_logprobs", None)
        return [] if top_k is None else [prompt_log_probs(self._model, p, top_k) for p in prompts]

    def _encode(self, request: Completions) -> list[list[int]]:
        from engine.data.templates import encode_prompts, encode_text
        from engine.rollout.requests import check_prompt

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
