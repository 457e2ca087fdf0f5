"""Requests to servers that score: several at once, with a deadline and retries.

A request that the server can't take now (429, 5xx, no connection, no answer in time) is sent again
after a pause that doubles; one that it refuses (other 4xx) is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx

from engine.errors import RewardError
from engine.redaction import redact

T = TypeVar("T")
_PAUSE_S = 0.25  # before the first retry
_LONGEST_PAUSE_S = 10.0
logger = logging.getLogger("engine.rewards")


class Caller:
    """Posts JSON to one server; an async context manager."""

    def __init__(
        self, reward: str, *, concurrency: int, retries: int, timeout_s: float, api_key_env: str
    ) -> None:
        """`api_key_env` names the environment variable with the server's key, if it is set."""
        if concurrency < 1 or retries < 0 or timeout_s <= 0:
            raise RewardError(
                f"reward {reward!r} has concurrency={concurrency}, retries={retries} and "
                f"request_timeout_s={timeout_s:g}; they must be at least 1, at least 0, and above 0"
            )
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers)
        self._turn = asyncio.Semaphore(concurrency)
        self._timeout_s, self._retries, self._reward = timeout_s, retries, reward

    async def post(self, url: str, content: object) -> object:
        """The JSON that answers; raise RewardError where there is none after all retries."""
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (attempt - 1)))
            try:
                async with self._turn, asyncio.timeout(self._timeout_s):
                    response = await self._client.post(url, json=content)
                if response.status_code < 400:
                    return response.json()
                problem = f"HTTP {response.status_code}: {response.text[:200]}"
                if response.status_code < 500 and response.status_code not in (408, 425, 429):
                    break
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(
            f"reward {self._reward!r}: {redact(url)} gave no score ({redact(problem)})"
        )

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()


async def each(reward: str, count: int, call: Callable[[int], Awaitable[float]]) -> Sequence[float]:
    """Call for each of `count` completions at once; NaN where that failed, and one warning."""
    results = await asyncio.gather(*(call(i) for i in range(count)), return_exceptions=True)
    failed = [one for one in results if isinstance(one, BaseException)]
    if failed:
        if not isinstance(failed[0], RewardError):
            raise failed[0]
        logger.warning("%d of %d completions have no score: %s", len(failed), count, failed[0])
    return [float("nan") if isinstance(one, BaseException) else one for one in results]
