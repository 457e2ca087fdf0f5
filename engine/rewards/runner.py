"""Calling a reward function so that it can't hang a run or corrupt a batch.

What to do with an error (drop, zero, fail) is the caller's decision.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import RewardError
from engine.rewards.protocol import RewardFunction


def score(
    reward_fn: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    timeout_s: float,
) -> list[float]:
    """Return one finite float a completion (B in, B out), within `timeout_s` seconds.

    `columns` are the rows' other columns, `ground_truth` among them. Raises RewardError when the
    function raises, hangs past the deadline, or returns anything but B finite numbers. A
    coroutine is cancelled at the deadline; a hung plain function can't be stopped in Python, so
    its daemon thread is left behind.
    """
    name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
    _check_lengths(prompts, completions, columns)
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            result = reward_fn(prompts, completions, **columns)
            if inspect.isawaitable(result):
                result = asyncio.run(_within(result, timeout_s))
            outcome.put((result, None))
        except BaseException as error:  # whatever it is, it must not end the run in this thread
            outcome.put((None, error))

    late = (
        f"reward {name!r} gave no answer for {len(completions)} completions within {timeout_s:g} "
        "s; make it faster, or raise reward.timeout_s"
    )
    thread = threading.Thread(target=call, name=f"reward-{name}", daemon=True)
    thread.start()
    try:
        result, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise RewardError(late) from None
    if isinstance(error, RewardError):
        raise error
    if isinstance(error, _DeadlinePassed):
        raise RewardError(late) from None
    if error is not None:
        raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
    return _check_result(name, result, len(completions))


class _DeadlinePassed(Exception):
    """Our own deadline, told apart from a TimeoutError of the reward's own making."""


async def _within(result: Any, timeout_s: float) -> Any:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await result
    except TimeoutError:
        if deadline.expired():
            raise _DeadlinePassed from None
        raise


def _check_lengths(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> None:
    sizes = {"prompts": len(prompts), **{name: len(values) for name, values in columns.items()}}
    for name, size in sizes.items():
        if size != len(completions):
            raise RewardError(
                f"{name} has {size} entries for {len(completions)} completions; give one for each"
            )


def _check_result(name: str, result: Any, size: int) -> list[float]:
    """Hold a result to one finite float a completion; nothing is broadcast or dropped."""
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
        raise RewardError(
            f"reward {name!r} returned {type(result).__name__}; it must return a list of floats"
        )
    if len(result) != size:
        raise RewardError(
            f"reward {name!r} returned {len(result)} values for {size} completions; return "
            "exactly one for each"
        )
    scores = []
    for i, value in enumerate(result):
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardError(
                f"reward {name!r} returned {value!r} for completion {i}; it must be a finite float"
            )
        scores.append(number)
    return scores
