"""The native rollout engine behind a small HTTP server.

It listens before the model is loaded; until it is, `/health` and requests answer 503.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, DataError, ModelError, RolloutError
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

_log = logging.getLogger(__name__)
LARGEST = 8 << 20  # bytes of a request
SOCKET_S = 60.0  # for a client to send its request, and to take the answer
STOP_S = 3.0  # for the batch under way when the server ends
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
    ) -> None:
        from engine.serve.batching import Batcher

        self.context = context
        self._tokenizer, self._stops, self._vocabulary = tokenizer, stops, vocabulary
        self._lock = threading.Lock()  # a tokenizer is not safe for use by two threads
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
        return Backend(engine, tokenizer, stops, context, int(shape.vocab_size))

    def complete(
        self, request: CompletionRequest | ChatRequest, deadline: float
    ) -> tuple[list[Answer], int]:
        """All answers to a request in order, and its prompts' tokens.

        Raises RequestError for a prompt that can't be completed, or when `deadline`
        (time.monotonic()) passes.
        """
        from engine.rollout.protocol import SamplingParams
        from engine.rollout.requests import check_prompt

        prompts = self._encode(request)
        temperature = 1.0 if request.temperature is None else request.temperature
        jobs: list[Future[list[Completion]]] = []
        for i, prompt in enumerate(prompts):
            try:
                check_prompt(f"prompt {i}", prompt, self.context, self._vocabulary)
            except RolloutError as error:
                raise RequestError(str(error)) from None
            params = SamplingParams(
                n=request.n or 1,
                max_new_tokens=min(request.longest or self.context, self.context - len(prompt)),
                temperature=temperature,
                top_k=max(request.top_k or 0, 0),
                top_p=request.top_p or 1.0,
                seed=(request.seed or 0) & (2**62 - 1),
                stop_token_ids=self._stops,
                first_prompt=i,
            )
            jobs.append(self.batcher.submit(prompt, params, request.seed is not None))
        done = [one for job in jobs for one in self._result(job, jobs, deadline)]
        with self._lock:
            answers = [self._answer(one).stopped_at(request.stops) for one in done]
        return answers, sum(map(len, prompts))

    def _result(
        self,
        job: Future[list[Completion]],
        jobs: list[Future[list[Completion]]],
        deadline: float,
    ) -> list[Completion]:
        try:
            return job.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            for other in jobs:
                other.cancel()
            raise RequestError(
                "the answer took longer than --request-timeout; ask for fewer tokens, or when "
                "fewer others ask",
                504,
            ) from None
        except CancelledError:
            raise RequestError("the server is stopping", 503) from None

    def _encode(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        from engine.data.templates import encode_prompts, encode_text

        with self._lock:
            try:
                if isinstance(request, ChatRequest):
                    chat = [message.plain() for message in request.messages]
                    return encode_prompts(self._tokenizer, [chat], "messages")
            except (DataError, ModelError) as error:
                raise RequestError(str(error)) from None
            if not request.prompts:
                raise RequestError("prompt is empty; give a text or token ids")
            return [
                encode_text(self._tokenizer, one) if isinstance(one, str) else one
                for one in request.prompts
            ]

    def _answer(self, one: Completion) -> Answer:
        from engine.data.templates import decode_response

        ids = one.token_ids
        ended = bool(ids) and ids[-1] in self._stops
        text = decode_response(self._tokenizer, ids[:-1] if ended else ids)
        return Answer(text, len(ids), one.finish_reason)


class NativeServer(ThreadingHTTPServer):
    """The endpoint; it answers from `start` on, and with completions once it has a backend."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    identity: Identity

    def __init__(self, host: str, port: int, request_timeout: float) -> None:
        """Listen on the port; ConfigError where another process does."""
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise port_error(host, port, error) from error
        self.request_timeout, self.created = request_timeout, int(time.time())
        self.backend: Backend | None = None
        self._thread: threading.Thread | None = None

    def start(self, identity: Identity) -> None:
        """Answer requests in a thread, for the model of this identity."""
        self.identity = identity
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, and wait a moment for what is under way."""
        if self._thread is not None:
            self.shutdown()
        self.server_close()
        if self.backend is not None:
            self.backend.batcher.close(STOP_S)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what a handler raised, unless it is that the client has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            _log.exception("a request of %s failed", client_address)


def port_error(host: str, port: int, error: OSError) -> ConfigError:
    """Why a port can't be listened on, and what to do."""
    if error.errno == errno.EADDRINUSE:
        what = "is in use by another process; stop that, or choose another with --port"
    elif error.errno == errno.EACCES:
        what = "may not be used by this user; choose one above 1023 with --port"
    else:
        what = f"can't be listened on: {error.strerror or error}; check --host and --port"
    return ConfigError(f"port {port} of {host} {what} (0: any that is free)")


class _Handler(BaseHTTPRequestHandler):
    server: NativeServer
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: what clients ask is theirs."""

    def do_GET(self) -> None:
        server, backend = self.server, self.server.backend
        if self.path == "/health":
            state = "ok" if backend is not None else "loading"
            values = {"status": state, "engine": "native", "model": server.identity.to_dict()}
            self._answer(200 if backend is not None else 503, values)
        elif self.path == "/v1/models":
            context = backend.context if backend is not None else None
            self._answer(200, models(server.identity.name, server.created, context))
        else:
            self._refuse(f"there is no {self.path}", 404)

    def do_POST(self) -> None:
        kind = KINDS.get(self.path)
        try:
            body = self._body()
            if kind is None:
                raise RequestError(f"there is no {self.path}; POST to {' or '.join(KINDS)}", 404)
            backend, name = self.server.backend, self.server.identity.name
            request = parse(kind, body, name)
            if backend is None:
                raise RequestError("the model is being loaded", 503)
            deadline = time.monotonic() + self.server.request_timeout
            answers, prompt_tokens = backend.complete(request, deadline)
        except RequestError as error:
            self._refuse(str(error), error.status)
            return
        except RolloutError as error:
            self._refuse(str(error), 500)
            return
        whole = response(request, answers, prompt_tokens, name)
        if request.stream:
            self._stream(whole)
        else:
            self._answer(200, whole)

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise RequestError("the request has no Content-Length", 411)
        if int(length) > LARGEST:
            self.close_connection = True
            raise RequestError(f"the request has more than {LARGEST} bytes", 413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the request is not JSON: {error}") from None

    def _refuse(self, message: str, status: int) -> None:
        self._answer(status, error_body(message, status))

    def _answer(self, status: int, values: object) -> None:
        self._send(status, "application/json", json.dumps(values).encode())

    def _stream(self, whole: dict[str, Any]) -> None:
        events = [*map(json.dumps, chunks(whole)), "[DONE]"]
        data = "".join(f"data: {event}\n\n" for event in events).encode()
        self._send(200, "text/event-stream", data)

    def _send(self, status: int, kind: str, data: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (ConnectionError, TimeoutError):  # the client has gone
            self.close_connection = True
