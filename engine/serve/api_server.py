"""The native rollout engine behind OpenAI's API.

It listens before the model (and torch) is loaded; until then `/health` and requests answer 503.
A field that the server does not offer is refused by name, never ignored.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol, TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.openai_api import http_server, schema
from engine.openai_api.schema import Answer, Completions, RequestError, RequestLimits
from engine.serve import Identity

NOT_OFFERED = schema.UNCOMMON | schema.NO_LOGPROBS | schema.NO_TOOLS
SMALL = 64 << 10  # characters or bytes that may be read on the event loop, or before others
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ServerLimits(http_server.HttpLimits, RequestLimits):
    """Limits of the native server on connections, requests and waiting times."""

    request_timeout: float = Field(600.0, gt=0, description="Longest wait for an answer, seconds")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request whose prompts are tokens and wait for their turn."""

    prompt_tokens: int
    answers: AsyncIterator[tuple[int, Answer]]  # with their places among the choices, as they end
    log_probs: list[object]  # of the prompts, after all answers; empty where they aren't asked for
    cancel: Callable[[], None]  # computes nothing more for it


class Backend(Protocol):
    """A loaded model that answers requests: `native_backend.NativeBackend`, imported late."""

    context: int  # longest prompt plus completion, in tokens

    async def submit(self, request: Completions, limits: RequestLimits) -> Accepted:
        """Raise RequestError for a prompt that can't be completed."""

    def close(self) -> None: ...


class ApiServer:
    """The endpoint; it answers from `start` on, and with completions once it has a backend."""

    identity: Identity

    def __init__(self, host: str, port: int, limits: ServerLimits | None = None) -> None:
        """Listen on the port; ConfigError where another process does."""
        self.limits, self.created = limits or ServerLimits(), int(time.time())
        self.backend: Backend | None = None
        routes = [Route("/health", self._health), Route("/v1/models", self._models)]
        routes += [Route(path, self._complete, methods=["POST"]) for path in schema.KINDS]
        refused = dict.fromkeys(
            (EngineError, HTTPException, ClientDisconnect, TimeoutError, Exception), _refuse
        )
        app = Starlette(routes=routes, exception_handlers=refused)
        listener = http_server.listen(host, port)
        self.server_port: int = listener.getsockname()[1]
        self._http = http_server.HttpServer(app, listener, self.limits)

    def start(self, identity: Identity) -> None:
        """Answer requests in a thread, for the model of this identity."""
        self.identity = identity
        self._http.start()

    def stop(self) -> None:
        """Take no more requests, and wait a moment for what is under way."""
        self._http.stop()
        if self.backend is not None:
            self.backend.close()

    async def _health(self, request: Request) -> Response:
        state, status = ("loading", 503) if self.backend is None else ("ok", 200)
        values = {"status": state, "engine": "native", "model": asdict(self.identity)}
        return http_server.json_response(values, status)

    async def _models(self, request: Request) -> Response:
        context = None if self.backend is None else self.backend.context
        model = {"id": self.identity.name, "object": "model", "created": self.created}
        model |= {"owned_by": "hybridflyte", "max_model_len": context}
        return http_server.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.request_timeout
        data = await http_server.read_body(request, self.limits)
        parse = partial(self._parse, request.scope["path"], data)
        completions = await _in_thread(len(data) > SMALL, parse)
        try:
            return await http_server.unless_gone(request, self._respond(completions, deadline))
        except asyncio.CancelledError:
            raise RequestError("the server is stopping", 503) from None

    def _parse(self, path: str, data: bytearray) -> Completions:
        kind, name = schema.KINDS[path], self.identity.name
        return schema.parse(kind, schema.read_json(data), name, self.limits, NOT_OFFERED)

    async def _respond(self, request: Completions, deadline: float) -> Response:
        if self.backend is None:
            raise RequestError("the model is being loaded", 503)
        async with asyncio.timeout_at(deadline):
            accepted = await self.backend.submit(request, self.limits)
            reply = schema.Reply(request, self.identity.name, accepted.prompt_tokens)
            if request.stream:
                return _Stream(reply, accepted, deadline)
            try:
                answers = dict([item async for item in accepted.answers])
            finally:
                accepted.cancel()
        body = reply.whole([answers[index] for index in sorted(answers)], accepted.log_probs)
        # In pieces, as `json.dumps` holds all threads up meanwhile.
        write = partial("".join, json.JSONEncoder().iterencode(body))
        text = await _in_thread(bool(accepted.log_probs), write)
        return Response(text, media_type="application/json")


class _Stream(StreamingResponse):
    """The choices of a request as they end."""

    def __init__(self, reply: schema.Reply, accepted: Accepted, deadline: float) -> None:
        headers = {"content-type": "text/event-stream"}
        super().__init__(_events(reply, accepted, deadline), headers=headers)
        self._accepted = accepted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # its client may be gone
            self._accepted.cancel()


async def _events(reply: schema.Reply, accepted: Accepted, deadline: float) -> AsyncIterator[str]:
    answers = []
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                item = await anext(accepted.answers, None)
            if item is None:
                break
            answers.append(item[1])
            for event in reply.events(*item):
                yield schema.sse(event)
        if last := reply.last_event(answers):
            yield schema.sse(last)
    except Exception as error:  # the status of the answer has been sent
        if not isinstance(error, EngineError | TimeoutError):
            _log.exception("a stream failed")
        yield schema.sse(schema.error_body(*_described(error)))
    yield schema.sse("[DONE]")


async def _in_thread(large: bool, work: partial[T]) -> T:
    """Do what takes long for a large request beside the event loop."""
    return await asyncio.to_thread(work) if large else work()


async def _refuse(request: Request, error: Exception) -> Response:
    """Describe an error as OpenAI's clients read it; uvicorn logs one that is not foreseen."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nginx's; nobody reads it
    message, status = _described(error)
    if isinstance(error, HTTPException):
        paths, status = " or ".join(schema.KINDS), error.status_code
        message = f"there is no {request.method} {request.url.path}; POST to {paths}"
    return http_server.json_response(schema.error_body(message, status), status)


def _described(error: Exception) -> tuple[str, int]:
    if isinstance(error, TimeoutError):
        return "the answer took longer than --request-timeout; ask for fewer tokens, or later", 504
    if isinstance(error, EngineError):
        return str(error), getattr(error, "status", 500)
    return "the server failed at this request; its log says why", 500
