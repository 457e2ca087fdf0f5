"""One process at a time may move a model's aliases: a lock made of the registered model's tags.

MLflow can't compare and set. So who wants the lock of a model claims it, with a tag of its own
`lock.<owner>` that holds the claim's end, and then reads all tags: it has the lock if there is no
other claim, else it takes its own back and tries again later. Of two that claim at once the one
whose tag came second sees the other's, so never both have it. To release is to delete one's tag.

The claim of a holder that died ends by its deadline, and the next holder deletes it. A holder that
wakes up late finds no claim but its own to release.

What no lock outside the store can rule out is a holder that sleeps between its last look at the
clock and its write. It looks right before each write, and a lock lasts longer than any call of the
client with its retries. The clocks of promoters must agree to within `SKEW_SECONDS`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import TrackingError
from engine.tracking import values

if TYPE_CHECKING:
    from engine.tracking.registry import ModelRegistry

LEASE_SECONDS = 600.0
WRITE_SECONDS = 300.0  # the longest that a call and its retries take: 4 tries of 60 s, and pauses
WAIT_SECONDS = 900.0  # longer than a lease, so that a dead holder is outlived
SKEW_SECONDS = 30.0
TAG_PREFIX = "lock."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LockTimeouts:
    """How long a lock lasts and is waited for, in seconds."""

    lease: float = LEASE_SECONDS
    wait: float = WAIT_SECONDS
    skew: float = SKEW_SECONDS


@dataclass(frozen=True, slots=True)
class ModelLock:
    """A lock that this process holds."""

    model_name: str
    owner: str  # host, process and a random part
    until: float  # seconds since the epoch
    margin: float = field(default=WRITE_SECONDS)

    def check(self) -> None:
        """Raise TrackingError when a write that begins now might end after the lock does."""
        if time.time() + self.margin > self.until:
            raise TrackingError(
                f"the lock of {self.model_name!r} ran out while it was held; nothing more was "
                "written; do it again"
            )


@contextlib.contextmanager
def lock_model(
    registry: ModelRegistry, model_name: str, timeouts: LockTimeouts = LockTimeouts()
) -> Iterator[ModelLock]:
    """Hold the lock of a registered model for the block.

    Raises TrackingError when there is no such model; naming the holder, when the lock is not free
    within `timeouts.wait`; and when MLflow does not answer.
    """
    lock = _acquire(registry, model_name, timeouts)
    try:
        yield lock
    finally:
        try:
            _delete(registry, model_name, lock.owner)
        except TrackingError as error:
            # What was to be done is done; the lock ends by itself.
            _log.warning("%s; the lock of %s ends at %s", error, model_name, _clock(lock.until))


def _acquire(registry: ModelRegistry, model_name: str, timeouts: LockTimeouts) -> ModelLock:
    owner = values.name(f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    deadline = time.monotonic() + timeouts.wait
    while True:
        held = _held(_claims(registry, model_name), timeouts)
        lock = None if held else _claim(registry, model_name, owner, timeouts)
        if lock is not None:
            return lock
        if time.monotonic() > deadline:
            holders = [f"{other} (until {_clock(until)})" for other, until in held.items()]
            raise TrackingError(
                f"{', '.join(holders) or 'another process'} holds the lock of {model_name!r}; "
                "nothing was moved; try again later"
            )
        time.sleep(random.uniform(0.05, 0.3))


def _claim(
    registry: ModelRegistry, model_name: str, owner: str, timeouts: LockTimeouts
) -> ModelLock | None:
    """Claim the lock; None, and no claim is left, when another process claims it as well."""
    until = time.time() + timeouts.lease
    try:
        with registry.translated("lock a model"):
            registry.client.set_registered_model_tag(model_name, TAG_PREFIX + owner, repr(until))
        others = {k: v for k, v in _claims(registry, model_name).items() if k != owner}
    except TrackingError:
        with contextlib.suppress(TrackingError):  # so that the cause is shown, not this
            _delete(registry, model_name, owner)
        raise
    if _held(others, timeouts):
        _delete(registry, model_name, owner)
        return None
    for dead in others:
        _delete(registry, model_name, dead)
    return ModelLock(model_name, owner, until, min(WRITE_SECONDS, timeouts.lease / 2))


def _claims(registry: ModelRegistry, model_name: str) -> dict[str, float]:
    """Return the end of each claim, in seconds since the epoch, by its owner."""
    tags = registry.require_model(model_name).tags
    claims = {k: v for k, v in tags.items() if k.startswith(TAG_PREFIX)}
    try:
        return {key.removeprefix(TAG_PREFIX): float(end) for key, end in claims.items()}
    except ValueError:
        raise TrackingError(
            f"a tag {TAG_PREFIX}… of the registered model {model_name!r} is no time in seconds; it "
            "was edited; delete it when nobody promotes"
        ) from None


def _held(claims: dict[str, float], timeouts: LockTimeouts) -> dict[str, float]:
    """The claims that have not ended by any promoter's clock."""
    now = time.time()
    return {owner: until for owner, until in claims.items() if now <= until + timeouts.skew}


def _delete(registry: ModelRegistry, model_name: str, owner: str) -> None:
    """Delete a claim; it may be gone already."""
    from mlflow.exceptions import MlflowException

    with registry.translated("release a lock"):
        try:
            registry.client.delete_registered_model_tag(model_name, TAG_PREFIX + owner)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
