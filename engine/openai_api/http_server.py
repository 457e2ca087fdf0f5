"""An HTTP server whose clients may be slow, greedy or gone: Starlette on uvicorn, with deadlines.

uvicorn has no deadline for a request's head, nor for a client that reads nothing. `_Connection`
adds what nginx calls client_header_timeout and send_timeout; and where all connections are taken,
the oldest one that has not sent a whole request makes room.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.config.base import Section
from engine.errors import ConfigError
from engine.openai_api.schema import RequestError

T = TypeVar("T")
STOP_S = 3  # for requests under way when the server ends


class HttpLimits(Section):
    """Limits on a client's connections and on the time and size of its requests."""

    max_body_mib: float = Field(8.0, gt=0, le=1024, description="Size of a request")
    header_timeout: float = Field(10.0, gt=0, le=3600)
    """Seconds for a client to send a request's head"""
    body_timeout: float = Field(60.0, gt=0, le=3600)
    """Seconds for a client to send the rest of its request"""
    write_timeout: float = Field(60.0, gt=0, le=3600)
    """Seconds for a client to read what it is sent, 64 KiB at a time"""
    keep_alive: int = Field(5, ge=1, le=3600)
    """Seconds that a connection stays open between requests"""
    max_connections: int = Field(512, ge=1, le=65_536)
    """Connections at once, each an open file (ulimit -n); of more, the oldest without a whole
    request is dropped"""


class _Connection(H11Protocol):
    """uvicorn's connection, with deadlines that `HttpServer` looks at."""

    def __init__(self, limits: HttpLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self.since = time.monotonic()  # of the connection, or of the head that is being sent
        self._awaits_head = True
        self._unread, self._unread_since = 0, self.since  # bytes that the client has yet to take

    @property
    def droppable(self) -> bool:
        """Tell whether no whole request of its client is being answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self._limits.max_connections:
            return
        open_ones = (c for c in self.connections if isinstance(c, _Connection) and c is not self)
        oldest = min((c for c in open_ones if c.droppable), key=lambda c: c.since, default=self)
        if oldest is self:
            self._end("503 Service Unavailable")
        else:
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._awaits_head and (self.cycle is None or self.cycle.response_complete):
            self._awaits_head, self.since = True, time.monotonic()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._awaits_head = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = time.monotonic()

    def end_if_late(self, now: float) -> None:
        """Close the connection if its client has passed a deadline."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread <= self._unread - HIGH_WATER_LIMIT:
            self._unread, self._unread_since = unread, now
        self._unread = max(self._unread, unread)
        if now - self._unread_since > self._limits.write_timeout:
            self.transport.abort()
        elif self._awaits_head and now - self.since > self._limits.header_timeout:
            self._end("408 Request Timeout")

    def _end(self, status: str) -> None:
        """Close, with a status where no answer is under way."""
        if self.cycle is None and not self.transport.is_closing():
            self.transport.write(
                f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
            )
        self.transport.close()


class HttpServer:
    """An ASGI app behind a port, in a thread."""

    def __init__(self, app: Starlette, listener: socket.socket, limits: HttpLimits) -> None:
        """Serve `app` on a socket that listens."""
        self._listener = listener
        # Requests are private: no access log.
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=partial(_Connection, limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.keep_alive,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _Server(config)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, and wait a moment for what is under way."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_S + 1)
        self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which looks at deadlines on each of its ticks."""

    async def on_tick(self, counter: int) -> bool:
        if counter % 5 == 0:  # twice a second
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection):
                    connection.end_if_late(now)
        return await super().on_tick(counter)


async def read_body(request: Request, limits: HttpLimits) -> bytearray:
    """Return the bytes of a request; RequestError for what is too large or too slow."""
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for part in request.stream():
                data += part
                if len(data) > limits.max_body_mib * 2**20:
                    raise RequestError(
                        f"the request has more than {limits.max_body_mib:g} MiB, the server's "
                        "--max-body-mib; send several smaller ones",
                        413,
                    )
    except TimeoutError:
        message = f"the request did not come within {limits.body_timeout:g} s"
        raise RequestError(message, 408) from None
    return data


def json_response(values: object, status: int = 200) -> Response:
    """An answer of JSON in ASCII, as a text may have surrogates, which UTF-8 has not."""
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(json.dumps(values), status, headers, media_type="application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, for a request that has been read; ClientDisconnect once its client is gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
