"""HTTP with deadlines and retries: all requests to rollout servers go through `Client`.

A request is tried again when its connection fails, its deadline passes, the server answers 429 or
5xx, or what should be JSON is not; every other answer that is not 2xx is final. All requests must
be safe to repeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import urljoin

import httpx

from engine.config.rollout_engines import ServerConfig
from engine.errors import ConfigError, RolloutError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 30.0
_UP_S = 5.0  # for a first answer of a server that may be down
_CLOSING_S = 10.0  # for connections to close, and for the thread to end
_ADDRESS = "give a path on the server, or an address such as http://10.0.0.7:9000/reload"
_SHOWN = 300  # characters of a server's answer that a message repeats
_KEY = "; name the variable with the server's key in {section}.api_key_env"
_HINTS = {401: _KEY, 403: _KEY, 404: "; check {section}.url and the model's name"}
_FAILURES: ContextVar[list[str]] = ContextVar("failures")  # of this work's requests so far


class Refused(RolloutError):
    """A request that the server refused; `answer` is the body of its answer."""

    def __init__(self, message: str, answer: str) -> None:
        super().__init__(message)
        self.answer = answer


class Unreachable(RolloutError):
    """A server that gave no answer to any attempt."""


class Client:
    """A server at one address. Its requests run on an event loop in a thread of its own.

    >>> client = Client(ServerConfig(url="http://127.0.0.1:8000"))
    >>> client.run(lambda: client.get("/v1/models"), "asking for the model")
    {'object': 'list', …}
    """

    def __init__(
        self,
        settings: ServerConfig,
        url: str = "",
        beside: Client | None = None,
        section: str = "rollout.server",
    ) -> None:
        """Connect to `url`, one of the settings' addresses, which stand in `section`.

        `beside`: a client whose loop this one shares; it is closed after this one.
        """
        self.section = section
        self.url = (url or settings.addresses[0]).rstrip("/")
        self.name = self.url  # in the messages of `run`
        self._settings = settings
        self._headers = _authorization(settings.api_key_env, section)
        self._jitter = random.Random()  # the process's own generator is the trainer's
        self._closed = False
        self._thread: threading.Thread | None = None
        if beside is not None:
            self._loop: asyncio.AbstractEventLoop = beside._loop
        else:
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self._loop = runner.get_loop()
            self._thread = threading.Thread(
                target=_serve, args=(runner,), name="rollout-server", daemon=True
            )
            self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._end)
            try:
                self._http = self._submit(self._open()).result()
            except httpx.InvalidURL as error:
                raise ConfigError(f"{section}.url={self.url!r}: {error}") from None
            undo.pop_all()

    def start(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run `work` on the loop, without a deadline; its result comes later."""

        async def run() -> T:
            _FAILURES.set([])
            return await work

        return self._submit(run())

    async def is_up(self) -> bool:
        """Whether the server gives any answer now; asked once, and waited for a moment."""
        try:
            async with asyncio.timeout(_UP_S):
                await self._http.request("GET", "/v1/models")
        except (TimeoutError, httpx.HTTPError):
            return False
        return True

    async def _open(self) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=self._settings.concurrency
        )
        # Deadlines are asyncio's: httpx's own restart with every byte that a slow server sends.
        return httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=None, limits=limits, trust_env=False
        )

    def address(self, name: str, value: str) -> str:
        """Return the URL of a setting: a path on this server, or an address. ConfigError."""
        try:
            address = urljoin(self.url + "/", value)
            if httpx.URL(address).scheme not in ("http", "https"):
                raise ValueError("it is neither http:// nor https://")
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"{self.section}.{name}={value!r} is no address: {error}; {_ADDRESS}"
            ) from None
        return address

    def run(self, work: Callable[[], Awaitable[T]], doing: str) -> T:
        """Run `work` on the loop and return its result; RolloutError after `timeout_s`."""
        ended = f"{self.name} can't be used for {doing}: the engine was closed"
        if self._closed:
            raise RolloutError(ended)

        async def within() -> T:
            seconds, failures = self._settings.timeout_s, list[str]()
            _FAILURES.set(failures)
            try:
                async with asyncio.timeout(seconds):
                    return await work()
            except TimeoutError:
                latest = f" (the latest failure: {failures[-1]})" if failures else ""
                raise RolloutError(
                    f"{self.name}: {doing} did not end within "
                    f"{self.section}.timeout_s={seconds:g}{latest}; look at the server's log, or "
                    "raise the deadline"
                ) from None

        future = self._submit(within())
        try:
            return future.result()
        except BaseException as error:  # Ctrl-C as well: leave no request behind
            future.cancel()
            if self._closed and isinstance(error, RuntimeError | CancelledError):
                raise RolloutError(ended) from None
            raise

    async def get(self, path: str) -> Any:
        """Return the JSON that GET `path` answers."""
        return await self._ask("GET", path, None, httpx.Response.json)

    async def post(self, path: str, body: object = None) -> Any:
        """Return the JSON that POST `path` answers."""
        return await self._ask("POST", path, body, httpx.Response.json)

    async def text(self, method: str, path: str, body: object = None) -> str:
        """Return the answer to a request as text; `path` may be a whole URL of another server."""
        return await self._ask(method, path, body, lambda answer: answer.text)

    async def _ask(
        self, method: str, path: str, body: object, parse: Callable[[httpx.Response], T]
    ) -> T:
        """Return what `parse` makes of the answer; Refused, ConfigError, or Unreachable at last."""
        tries, seconds = self._settings.max_retries + 1, self._settings.request_timeout_s
        name, failures = f"{method} {path if '://' in path else self.url + path}", _FAILURES.get()
        for attempt in range(tries):
            answer: httpx.Response | None = None
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._http.request(method, path, json=body)
                if answer.is_success:
                    return parse(answer)
                failures.append(f"status {answer.status_code}: {_shown(answer)}")
                if answer.status_code != 429 and answer.status_code < 500:
                    hint = _HINTS.get(answer.status_code, "").format(section=self.section)
                    raise Refused(f"{name} refused: {failures[-1]}{hint}", answer.text)
            except TimeoutError:
                failures.append(f"no answer within {self.section}.request_timeout_s={seconds:g}")
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise ConfigError(f"{name} is no address: {error}; {_ADDRESS}") from None
            except httpx.HTTPError as error:
                failures.append(f"{type(error).__name__}: {error}".rstrip(": "))
            except ValueError:
                assert answer is not None
                failures.append(f"{_shown(answer)!r}, which is not JSON")
            if attempt + 1 < tries:
                await asyncio.sleep(self._pause(attempt, answer))
        raise Unreachable(
            f"{name} failed {tries} times, the last with {failures[-1]}; see that the server is up "
            f"and {self.section}.url is its address"
        )

    def close(self) -> None:
        """Drop all connections and end the thread, in some seconds at most; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        closing = self._submit(self._http.aclose())
        try:
            closing.result(_CLOSING_S)
        except TimeoutError:
            self._log_unfinished(f"its connections were not closed within {_CLOSING_S:g} s")
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            self._log_unfinished(f"its connections were not closed: {cause}")
        finally:
            closing.cancel()
            self._end()

    def _end(self) -> None:
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            problem = "as a callback such as on_progress holds it"
            self._log_unfinished(f"its thread did not end within {_CLOSING_S:g} s, {problem}")

    def _log_unfinished(self, what: str) -> None:
        _log.warning("%s: %s; it is left to the end of this process", self.url, what)

    def _submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _pause(self, attempt: int, answer: httpx.Response | None) -> float:
        """Return seconds: what the server asks for, or exponential backoff with full jitter."""
        retry_after = "" if answer is None else answer.headers.get("retry-after", "")
        if retry_after.isdecimal():  # it may also be a date
            return min(float(retry_after), _LONGEST_PAUSE_S)
        longest = min(_LONGEST_PAUSE_S, self._settings.backoff_s * 2.0**attempt)
        return self._jitter.uniform(0, longest)


def _serve(runner: asyncio.Runner) -> None:
    """Run the loop until it is stopped, and end what is under way then."""
    with runner:
        runner.get_loop().run_forever()


def _authorization(variable: str, section: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{section}.api_key_env={variable!r} names an environment variable that is not "
            f"set; export the server's key in it, or leave api_key_env empty"
        )
    if not key.isascii() or not key.isprintable():  # the message does not repeat it
        raise ConfigError(
            f"{section}.api_key_env={variable!r}: the key in that environment variable has "
            f"characters that HTTP can't send (not ASCII, or a line break); export it again"
        )
    return {"Authorization": f"Bearer {key}"}


def _shown(answer: httpx.Response) -> str:
    """Shorten the text of a server's answer for a message."""
    text = " ".join(answer.text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"
