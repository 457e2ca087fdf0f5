"""The words of supervision: what is told to the state machines of `health`, and what they ask for.

Events go in, actions come out; both are plain values. What they lead to is in `health`; who sends
the events and does the actions is the caller's subject.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's process is up and answers."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The worker now has the weights of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Died:
    """The worker's process ended, never came up, or gave no result for a call."""

    cause: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The process that Replace asked for exists; it isn't up yet."""


Event = Started | Synced | Heartbeat | Died | Replaced


@dataclass(frozen=True, slots=True)
class Kill:
    """End what is left of the process with SIGKILL, which reaches a stopped one too."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Reissue:
    """Sample the unfinished prompts of this process elsewhere (`Admission.lost`)."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new process; its events have to carry this `attempt`."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SyncWeights:
    """Send the trainer's weights. A worker that has them, or newer ones, keeps what it has."""

    worker: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run (for a trainer: its attempt) with this cause."""

    cause: str


Action = Kill | Reissue | Replace | SyncWeights | Stop
