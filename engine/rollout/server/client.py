"""HTTP with deadlines and retries: what a rollout server is asked goes through here.

Knows nothing of tokens or weights. A request is tried again when its connection fails, its
deadline passes, the server answers 429 or 5xx, or what should be JSON is not; every other answer
that is not 2xx is the caller's mistake and final. All requests must be safe to repeat.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

import httpx

from engine.config.server import ServerConfig
from engine.errors import ConfigError, RolloutError

T = TypeVar("T")

_LONGEST_PAUSE_S = 30.0
_SHOWN = 300  # characters of a server's answer that a message repeats


class Refused(RolloutError):
    """A request that the server called wrong; `answer` is what it said."""

    def __init__(self, message: str, answer: str) -> None:
        super().__init__(message)
        self.answer = answer


class Client:
    """A server at one address. Its requests run on an event loop in a thread of its own.

    >>> client = Client(ServerConfig(url="http://127.0.0.1:8000"))
    >>> client.run(lambda: client.get("/v1/models"), "asking for the model")
    {'object': 'list', …}
    """

    def __init__(self, settings: ServerConfig) -> None:
        self.url = settings.url.rstrip("/")
        self._settings = settings
        self._headers = _authorization(settings.api_key_env)
        self._jitter = random.Random()  # the process's own generator is the trainer's
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout-server", daemon=True
        )
        self._thread.start()
        try:
            self._http = self._submit(self._open()).result()
        except httpx.InvalidURL as error:
            self._end()
            raise ConfigError(f"rollout.server.url={self.url!r}: {error}") from None

    async def _open(self) -> httpx.AsyncClient:
        most = httpx.Limits(
            max_connections=None, max_keepalive_connections=self._settings.concurrency
        )
        # Deadlines are asyncio's: httpx's own restart with every byte that a slow server sends.
        return httpx.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=None, limits=most, trust_env=False
        )

    def run(self, work: Callable[[], Awaitable[T]], doing: str) -> T:
        """Run `work` on the loop and return its result; RolloutError after `timeout_s`."""
        if self._loop.is_closed():
            raise RolloutError(f"{self.url} can't be used for {doing}: the engine was closed")

        async def within() -> T:
            seconds = self._settings.timeout_s
            last = _Last()
            token = _LAST_FAILURE.set(last)
            try:
                async with asyncio.timeout(seconds):
                    return await work()
            except TimeoutError:
                raise RolloutError(
                    f"{self.url}: {doing} did not end within rollout.server.timeout_s="
                    f"{seconds:g}{last}; look at the server's log, or raise the deadline"
                ) from None
            finally:
                _LAST_FAILURE.reset(token)

        future = self._submit(within())
        try:
            return future.result()
        except BaseException:  # Ctrl-C as well: leave no request behind
            future.cancel()
            raise

    async def get(self, path: str) -> Any:
        """The JSON that GET `path` answers."""
        return await self._ask("GET", path, None, httpx.Response.json)

    async def post(self, path: str, body: Any = None) -> Any:
        """The JSON that POST `path` answers."""
        return await self._ask("POST", path, body, httpx.Response.json)

    async def text(self, method: str, path: str, body: Any = None) -> str:
        """What a request is answered, as text. `path` may be a whole URL of another server."""
        return await self._ask(method, path, body, lambda answer: answer.text)

    async def _ask(
        self, method: str, path: str, body: Any, read: Callable[[httpx.Response], T]
    ) -> T:
        """What `read` finds in the answer to a request, which is tried again as the module says.

        Raises Refused for an answer that is final, RolloutError when the last try fails.
        """
        tries, last = self._settings.max_retries + 1, _LAST_FAILURE.get()
        name = f"{method} {path if '://' in path else self.url + path}"
        for attempt in range(tries):
            answer: httpx.Response | None = None
            try:
                async with asyncio.timeout(self._settings.request_timeout_s):
                    answer = await self._http.request(method, path, json=body)
                if answer.is_success:
                    return read(answer)
                last.cause = f"status {answer.status_code}: {_shown(answer)}"
                if answer.status_code != 429 and answer.status_code < 500:
                    text = f"{name} refused: {last.cause}{_hint(answer)}"
                    raise Refused(text, answer.text)
            except TimeoutError:
                seconds = self._settings.request_timeout_s
                last.cause = f"no answer within rollout.server.request_timeout_s={seconds:g}"
            except httpx.HTTPError as error:
                last.cause = f"{type(error).__name__}: {error}".rstrip(": ")
            except ValueError:
                assert answer is not None
                last.cause = f"{_shown(answer)!r}, which is not JSON"
            if attempt + 1 < tries:
                await asyncio.sleep(self._pause(attempt, answer))
        raise RolloutError(
            f"{name} failed {tries} times, the last with {last.cause}; see that the server is up "
            f"and rollout.server.url is its address"
        )

    def close(self) -> None:
        """Drop all connections and end the thread; safe to call twice."""
        if self._loop.is_closed():
            return
        self._submit(self._http.aclose()).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _pause(self, attempt: int, answer: httpx.Response | None) -> float:
        """Seconds: what the server asks for, or exponential backoff with full jitter."""
        asked = "" if answer is None else answer.headers.get("retry-after", "")
        if asked.isdecimal():  # it may also be a date
            return min(float(asked), _LONGEST_PAUSE_S)
        longest = min(_LONGEST_PAUSE_S, self._settings.backoff_s * 2.0**attempt)
        return self._jitter.uniform(0, longest)


class _Last:
    """Why the latest attempt failed, for the message of a deadline that passes later."""

    cause: str | None = None

    def __str__(self) -> str:
        return "" if self.cause is None else f" (the latest failure: {self.cause})"


_LAST_FAILURE: ContextVar[_Last] = ContextVar("last_failure")


def _authorization(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"rollout.server.api_key_env={variable!r} names an environment variable that is not "
            f"set; export the server's key in it, or leave api_key_env empty"
        )
    return {"Authorization": f"Bearer {key}"}


def _shown(answer: httpx.Response) -> str:
    """The server's own words, cut short."""
    text = " ".join(answer.text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def _hint(answer: httpx.Response) -> str:
    match answer.status_code:
        case 401 | 403:
            return "; name the variable with the server's key in rollout.server.api_key_env"
        case 404:
            return "; check rollout.server.url, .api and .served_model"
        case _:
            return ""
