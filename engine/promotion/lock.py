"""One process at a time may move a model's aliases: a lock made of MLflow's unique model names.

MLflow can't compare and set an alias, but of two calls that create a registered model of one name
exactly one succeeds. So the lock of model NAME is a registered model `NAME--lock-<number>` with its
owner and its end in tags. The creator of the next number holds the lock and releases it by a tag.

Numbers only grow, and a lock object is deleted only by the holder of a later one. The lock of a
holder that died ends by its deadline: the next number is created then, so two that find it dead
can't both get in, and one that wakes up late can't release another's lock. The last object stays.

What no lock outside the store can rule out is a holder that sleeps between its last look at the
clock and its write. It looks right before each write, and a lock lasts longer than any call of the
client with its retries. The clocks of promoters must agree to within `SKEW_SECONDS`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import TrackingError
from engine.tracking.registry import all_pages

if TYPE_CHECKING:
    from engine.tracking.registry import ModelRegistry

LEASE_SECONDS = 600.0
WRITE_SECONDS = 300.0  # the longest that a call and its retries take: 4 tries of 60 s, and pauses
WAIT_SECONDS = 900.0  # longer than a lease, so that a dead holder is outlived
SKEW_SECONDS = 30.0
OWNER_TAG, UNTIL_TAG, RELEASED_TAG = "lock_owner", "lock_until", "lock_released"
PAGE = 100

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

    name: str  # of the lock object, e.g. "hybridflyte-policy--lock-12"
    model_name: str
    owner: str
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
    """Hold the lock of a model for the block.

    Raises TrackingError, naming the holder, when it is not free within `timeouts.wait`, and when
    MLflow does not answer.
    """
    lock = _acquire(registry, model_name, timeouts)
    try:
        yield lock
    finally:
        try:
            with registry.translated("release a lock"):
                registry.client.set_registered_model_tag(lock.name, RELEASED_TAG, _now())
        except TrackingError as error:
            # What was to be done is done; the lock ends by itself.
            _log.warning("%s; the lock of %s ends at %s", error, model_name, _clock(lock.until))


def _acquire(registry: ModelRegistry, model_name: str, timeouts: LockTimeouts) -> ModelLock:
    owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    deadline = time.monotonic() + timeouts.wait
    with registry.translated("lock a model"):
        while True:
            number, tags = _latest(registry, model_name)
            if _is_free(tags, timeouts):
                lock = _create(registry, model_name, number + 1, owner, timeouts)
                if lock is not None:
                    return lock
            elif time.monotonic() > deadline:
                raise TrackingError(
                    f"{tags.get(OWNER_TAG)} holds the lock of {model_name!r} until "
                    f"{_clock(float(tags[UNTIL_TAG]))}; nothing was moved; try again then"
                )
            time.sleep(random.uniform(0.05, 0.3))


def _create(
    registry: ModelRegistry, model_name: str, number: int, owner: str, timeouts: LockTimeouts
) -> ModelLock | None:
    """Create the lock of this number; None when another process has it, or a later one."""
    from mlflow.exceptions import MlflowException

    name = f"{model_name}--lock-{number}"
    until = time.time() + timeouts.lease
    tags = {OWNER_TAG: owner, UNTIL_TAG: repr(until)}
    try:
        registry.client.create_registered_model(
            name, tags, description=f"Lock of {model_name}; see engine/promotion/lock.py"
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        # A call whose answer was lost is sent again by the client and meets its own lock.
        if _tags(registry, name).get(OWNER_TAG) != owner:
            return None
    locks = _locks(registry, model_name)
    if max(locks, default=number) > number:  # what was looked at before was an old state
        registry.client.delete_registered_model(name)
        return None
    for other in locks:
        if other < number:
            with contextlib.suppress(MlflowException):  # deleted by a former holder just now
                registry.client.delete_registered_model(f"{model_name}--lock-{other}")
    return ModelLock(name, model_name, owner, until, min(WRITE_SECONDS, timeouts.lease / 2))


def _is_free(tags: dict[str, str], timeouts: LockTimeouts) -> bool:
    if not tags or RELEASED_TAG in tags:
        return True
    try:
        until = float(tags[UNTIL_TAG])
    except (KeyError, ValueError):
        raise TrackingError(
            f"a lock in MLflow has no readable tag {UNTIL_TAG!r}; delete the registered model "
            "whose name ends in --lock-<number> when nobody promotes"
        ) from None
    return time.time() > until + timeouts.skew


def _latest(registry: ModelRegistry, model_name: str) -> tuple[int, dict[str, str]]:
    """Return number and tags of the last lock; 0 and no tags when there was none yet."""
    locks = _locks(registry, model_name)
    number = max(locks, default=0)
    return number, locks.get(number, {})


def _locks(registry: ModelRegistry, model_name: str) -> dict[int, dict[str, str]]:
    """Return the tags of all lock objects of a model by their number."""
    pattern = re.compile(re.escape(model_name) + r"--lock-(\d+)")
    quoted = model_name.replace("'", "''")
    models = all_pages(
        lambda token: registry.client.search_registered_models(
            f"name LIKE '{quoted}--lock-%'", max_results=PAGE, page_token=token
        )
    )
    return {
        int(match[1]): dict(model.tags)
        for model in models
        if (match := pattern.fullmatch(model.name))
    }


def _tags(registry: ModelRegistry, name: str) -> dict[str, str]:
    found = registry.find_model(name)
    return dict(found.tags) if found is not None else {}


def _now() -> str:
    return _clock(time.time())


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
