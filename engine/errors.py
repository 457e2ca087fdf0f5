"""Every error that the engine raises on purpose, under one base.

A message is one sentence or two: what is wrong, where (field, file, row), and what to do. It holds
no credentials and no control characters, whatever it quotes.
`tasks/` turns these into failed Flyte tasks.
"""

import traceback
from collections.abc import Callable
from typing import Self, TypeVar

from engine.redaction import presentable

_LONGEST_TRACEBACK = 8000  # characters that travel to another process


class EngineError(Exception):
    """Base of all errors raised by HybridFlyte on purpose.

    Pickled by message and attributes; the cause travels as the text of its traceback.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(presentable(a) if isinstance(a, str) else a for a in arguments))

    def with_message(self, message: str) -> Self:
        """Return this error with another message, to be raised from this one.

        Notes stay with this one, which a traceback shows as the cause.
        """
        error = _restored(type(self), (presentable(message),))
        error.__dict__ |= {k: v for k, v in self.__dict__.items() if k != "__notes__"}
        return error

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[object, ...], dict[str, object]]:
        state = dict(self.__dict__)
        if self.__cause__ is not None:
            text = "".join(traceback.format_exception(self.__cause__))[-_LONGEST_TRACEBACK:]
            state["__cause__"] = RuntimeError(f"as text\n{presentable(text)}")
        return _restored, (type(self), self.args), state


E = TypeVar("E", bound=EngineError)


def _restored(kind: type[E], arguments: tuple[object, ...]) -> E:
    error = kind.__new__(kind)
    error.args = arguments
    return error


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 step" or "2 steps"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type's name where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ConfigError(EngineError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(EngineError):
    """Input data is missing, malformed, or breaks the data contract."""


class EmptyFileError(DataError):
    """A data file has no rows."""


class ModelError(EngineError):
    """A model folder is incomplete, or a model and its tokenizer disagree."""


class RolloutError(EngineError):
    """A rollout engine can't serve: stale or half-written weights, dead engine, bad request."""


class DivergedError(EngineError):
    """Training has diverged: weights, gradients or logits are not finite."""


class DivergedRolloutError(DivergedError, RolloutError):
    """A rollout engine's logits are NaN: the weights that it was given have diverged."""


class WeightSyncError(RolloutError):
    """A rollout process can't apply the weights that it received; a full sync repairs it."""


class RewardError(EngineError):
    """A reward function raised, hung, or returned something that is not one float a sample."""


class EpisodeError(EngineError):
    """An environment raised, hung, died, or returned what is no observation."""


class WorkerError(EngineError):
    """A rank of a worker group failed; carries role, rank and the remote traceback."""


class PlacementError(EngineError):
    """The cluster can't hold what was asked for."""


class TrackingError(EngineError):
    """The MLflow server or registry can't be reached, or refused a write."""


class ChampionChangedError(TrackingError):
    """Another version became champion since a promotion was decided; deciding again repairs it."""


class LineageError(EngineError):
    """A manifest is missing, unreadable, or does not match its artifact's content."""


class StorageError(EngineError):
    """An artifact could not be written or read completely (disk full, missing folder)."""


class CheckpointError(EngineError):
    """A checkpoint can't be written, found, read, or does not fit what it is loaded into."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or was changed: a file is missing or differs from its checksum."""


class LockedCheckpointsError(EngineError):
    """Another run writes into the same folder of checkpoints."""


class PreemptedError(EngineError):
    """The process was pre-empted (SIGTERM); the run can be resumed from its checkpoints."""
