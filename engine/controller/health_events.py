"""Events of rollout workers, and the actions that supervision takes on them.

Plain values: events are the input of the state machine in `health`, actions its output. The caller
reports the events and carries out the actions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's process runs and answers."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The worker now has the weights of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of a worker."""


@dataclass(frozen=True, slots=True)
class Died:
    """The worker's process ended, failed to start, or gave no result for a call."""

    cause: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """The process that Replace started exists; it isn't ready yet."""


Event = Started | Synced | Heartbeat | Died | Replaced


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process with SIGKILL, which also ends a stopped one."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Reissue:
    """Sample the unfinished prompts of this process elsewhere (`Admission.lost`)."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new process, whose events have this `attempt`."""

    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SyncWeights:
    """Send the trainer's weights. A worker with these or newer ones ignores them."""

    worker: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run (for a trainer: its attempt) with this cause."""

    cause: str


Action = Kill | Reissue | Replace | SyncWeights | Stop
