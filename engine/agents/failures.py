"""Why an environment gave no observation, and what an observation must be."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from engine.agents.protocol import Message, Observation
from engine.errors import EpisodeError

FailureCause: TypeAlias = Literal[
    "raised", "deadline", "malformed", "not_finite", "crashed", "lost"
]
"""`crashed`: its process ended in the call. `lost`: its process ended for another's sake."""

_LARGEST = 3.4028234e38  # of float32, in which rewards travel
_DEEPEST = 20
_LONGEST_TRACEBACK = 8000  # characters


class EnvironmentFailure(EpisodeError):
    """An episode that can't go on; its environment has been replaced."""

    def __init__(self, cause: FailureCause, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.cause: FailureCause = cause
        self.traceback_text = traceback_text  # of the environment's own exception, if it raised

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.cause, str(self), self.traceback_text)

    @classmethod
    def of(cls, who: str, error: BaseException) -> EnvironmentFailure:
        """The failure of an environment's call that raised."""
        text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
        try:
            words = " ".join(str(error).split())[:300]
        except Exception as failed:  # a user's exception may fail in any way
            words = f"(its text can't be made: {type(failed).__name__})"
        return cls("raised", f"{who} raised {type(error).__name__}: {words}", text)


def checked_observation(who: str, value: object) -> Observation:
    """An observation of plain data; raise EnvironmentFailure for what is none."""
    if not isinstance(value, Observation):
        raise EnvironmentFailure(
            "malformed",
            f"{who} returned {type(value).__name__}; return an engine.agents.Observation",
        )
    reward = _number(value.reward)
    if not abs(reward) <= _LARGEST:
        raise EnvironmentFailure(
            "not_finite",
            f"{who} returned reward {value.reward!r:.100}; it must be a finite float",
        )
    try:
        messages = tuple(_message(one) for one in value.messages)
        info = {str(key): _told(one) for key, one in dict(value.info).items()}
        done = bool(value.done)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(
            "malformed", f"{who} returned an observation that can't be read ({error})"
        ) from None
    return Observation(messages, reward, done, info)


def _message(message: object) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('a message is a mapping with "role" and "content"')
    if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
        raise ValueError(f"the content of a {message['role']!r} message is no text")
    found = plain(message)
    assert isinstance(found, dict)
    return found


def plain(value: object, depth: int = 0) -> object:
    """The value as JSON has it, arrays as lists; raise ValueError for what has no such form."""
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in value]
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), depth + 1)
    raise ValueError(f"{type(value).__name__} is no plain value")


def _told(value: object) -> object:
    """An entry of `info`: plain, or else its text, as nothing depends on it."""
    try:
        return plain(value)
    except ValueError:
        return repr(value)[:200]


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # any object may be here, and fail in its own way
        return math.nan
