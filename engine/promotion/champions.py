"""Move a model's alias: check it, compare and set it under a lock, and record the move.

Everything is kept in tags of MLflow's registered model: the lock in `lock.<owner>`, and each move
of an alias in `history.<alias>.<number>`. A move is written before the alias is set and marked as
done after it, so that `reconcile` finds out whether it was made.
"""

import contextlib
import json
import logging
import os
import random
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from engine.errors import ChampionChangedError, LineageError, TrackingError
from engine.storage.artifacts import read_manifest
from engine.tracking import connection
from engine.tracking.model_versions import ModelRegistry, ModelVersion, intact_copy


def require_intact_copy(
    registry: ModelRegistry, version: ModelVersion, trusted: Collection[str] | None = None
) -> None:
    """Raise LineageError unless the registry's copy, which is served, is as the tags name it.

    trusted: the public keys by which its manifest must be signed; None: it need not be.
    """
    with tempfile.TemporaryDirectory(prefix="hybridflyte-promotion-") as scratch:
        try:
            copy = intact_copy(registry, version, Path(scratch))
            if trusted is not None and (fault := read_manifest(copy).signature_fault(trusted)):
                raise LineageError(
                    f"MLflow's copy of {version.name} version {version.version}: {fault}, and "
                    "delete the version"
                )
        except LineageError as error:
            raise error.with_message(f"{error}; nothing was moved") from error


WRITE_SECONDS = 300.0  # the longest that a call and its retries take: 4 tries of 60 s, and pauses
WAIT_SECONDS = 900.0  # longer than a lease, so that a dead holder is outlived
TAG_PREFIX = "lock."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LockTimeouts:
    """Seconds that a lock lasts and is waited for, and by which clocks may differ."""

    lease: float = 600.0
    wait: float = WAIT_SECONDS
    skew: float = 30.0


@dataclass(frozen=True, slots=True)
class ModelLock:
    model_name: str
    owner: str  # host, process and a random part
    until: float  # seconds since the epoch
    margin: float  # seconds that a write and its retries may take

    def check(self) -> None:
        """Raise TrackingError when a write that begins now might end after the lock does."""
        if time.time() + self.margin > self.until:
            raise TrackingError(
                f"the lock of {self.model_name!r} ran out; nothing more was written; do it again"
            )


@contextlib.contextmanager
def lock_model(
    registry: ModelRegistry, model_name: str, timeouts: LockTimeouts = LockTimeouts()
) -> Iterator[ModelLock]:
    """Hold the lock of a registered model for the block, so that one process moves its aliases.

    MLflow can't compare and set. A process claims the lock with a tag of its own that holds the
    claim's end, and then reads all tags: it has the lock if there is no other live claim, else it
    takes its own back and tries again. The next holder deletes the claims of the dead. Nothing
    rules out a holder that sleeps between `check` and its write; a lock outlasts a call's retries.

    Raises TrackingError, which names a holder that has the lock for longer than `timeouts.wait`.
    """
    owner = connection.name(f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    deadline, until = time.monotonic() + timeouts.wait, 0.0
    try:
        while True:
            claims = _other_claims(registry, model_name, owner)
            if not _live(claims, timeouts):
                until = time.time() + timeouts.lease
                registry.set_model_tag(model_name, TAG_PREFIX + owner, repr(until))
                claims = _other_claims(registry, model_name, owner)
                if not _live(claims, timeouts):
                    break
                registry.delete_model_tag(model_name, TAG_PREFIX + owner)
            if time.monotonic() > deadline:
                holders = [f"{k} (until {_utc(end)})" for k, end in _live(claims, timeouts).items()]
                raise TrackingError(
                    f"{', '.join(holders) or 'another process'} holds the lock of {model_name!r}; "
                    "nothing was moved; try again later"
                )
            time.sleep(random.uniform(0.05, 0.3))
        for dead in claims:
            registry.delete_model_tag(model_name, TAG_PREFIX + dead)
        yield ModelLock(model_name, owner, until, min(WRITE_SECONDS, timeouts.lease / 2))
    finally:
        try:
            if until:
                registry.delete_model_tag(model_name, TAG_PREFIX + owner)
        except TrackingError as error:
            # The block has done its work, and the lock expires by itself.
            _log.warning("%s; the lock of %s ends at %s", error, model_name, _utc(until))


def _other_claims(registry: ModelRegistry, model_name: str, owner: str) -> dict[str, float]:
    """Return the end of each other process's claim, in seconds since the epoch, by its owner."""
    tags = registry.require_model(model_name).tags
    try:
        return {
            key.removeprefix(TAG_PREFIX): float(end)
            for key, end in tags.items()
            if key.startswith(TAG_PREFIX) and key != TAG_PREFIX + owner
        }
    except ValueError:
        raise TrackingError(
            f"a tag {TAG_PREFIX}… of the registered model {model_name!r} is no time in seconds; it "
            "was edited; delete it when nobody promotes"
        ) from None


def _live(claims: dict[str, float], timeouts: LockTimeouts) -> dict[str, float]:
    now = time.time()
    return {owner: until for owner, until in claims.items() if now <= until + timeouts.skew}


MAX_REASON = 2000  # characters; a tag of MLflow's registry holds 5,000 in some databases

# forced: to a version that never was champion, past the gate
Action = Literal["promote", "rollback", "forced", "by hand"]


@dataclass(frozen=True, slots=True)
class AliasMove:
    """An alias went from one version to another."""

    number: int  # counts from 1 a model and alias
    action: Action
    version: str | None  # where it went, e.g. "4"; None: the alias was removed by hand
    replaced: str | None  # where it was; None: nowhere
    reason: str
    at: str  # UTC, e.g. "2026-11-21T02:00:00Z"
    by: str = ""  # run, execution or person
    request: str = ""  # the same request is not done twice
    approved_by: str = ""  # who agreed; empty: nobody
    done: bool = True

    def sentence(self) -> str:
        where = f"version {self.version}" if self.version else "nowhere"
        previous = f"version {self.replaced}" if self.replaced else "nowhere"
        by = f" by {self.by}" if self.by else ""
        if self.approved_by not in ("", self.by):
            by += f", approved by {self.approved_by}"
        return f"{self.at} {self.action}: {previous} → {where}{by}: {self.reason}"


def reconcile(
    moves: Sequence[AliasMove], current: str | None, now: str
) -> tuple[list[AliasMove], list[AliasMove]]:
    """Correct a record by the version that the alias points to; it may have been moved by hand.

    Returns the record and those of `moves` that were never made and have no other in their place.
    """
    record = list(moves)
    if record and not record[-1].done:
        last = record.pop()
        if last.version == current:
            record.append(replace(last, done=True))
    before = record[-1].version if record else None
    if before != current:
        number, reason = _number(record), "The alias was moved outside of promotion"
        record.append(AliasMove(number, "by hand", current, before, reason, now))
    numbers = {move.number for move in record}
    return record, [move for move in moves if move.number not in numbers]


def _number(moves: Sequence[AliasMove]) -> int:
    return moves[-1].number + 1 if moves else 1


def previous_version(moves: Sequence[AliasMove]) -> str | None:
    """Return what the present champion replaced when it was promoted; None when there is none."""
    installed = [m for m in moves if m.version == moves[-1].version and m.action != "rollback"]
    return (installed or list(moves))[-1].replaced if moves else None


def read_moves(tags: Mapping[str, str], alias: str) -> list[AliasMove]:
    """Read the moves of an alias from the tags of its model, in order."""
    pattern = re.compile(re.escape(connection.name(f"history.{alias}.")) + r"\d+")
    moves = []
    for key, text in tags.items():
        if pattern.fullmatch(key):
            try:
                moves.append(AliasMove(**json.loads(text)))
            except (ValueError, TypeError) as error:
                raise TrackingError(
                    f"the tag {key!r} is no record of a move ({error}); it was edited; delete it"
                ) from error
    return sorted(moves, key=lambda move: move.number)


def tag_key(alias: str, move: AliasMove) -> str:
    return connection.name(f"history.{alias}.") + f"{move.number:06d}"


def tag_value(move: AliasMove) -> str:
    return json.dumps(asdict(replace(move, reason=connection.shorten(move.reason, MAX_REASON))))


PROMOTED_TAG, REPLACED_TAG, REASON_TAG = "promoted_at", "replaced", "promotion_reason"


@dataclass(frozen=True, slots=True)
class Champions:
    """The versions that an alias of a model pointed to and points to."""

    registry: ModelRegistry
    model_name: str
    alias: str = "champion"
    timeouts: LockTimeouts = LockTimeouts()

    def history(self) -> list[AliasMove]:
        """Return all moves, oldest first; nothing is written."""
        return reconcile(*self._read(), _utc())[0]

    def find(self, request: str) -> AliasMove | None:
        """Return the move that a request has led to, if it has."""
        return _find(self.history(), request)

    def promote(
        self,
        version: str,
        expected: str | None,
        reason: str,
        *,
        request: str,
        by: str = "",
        approved_by: str = "",
    ) -> AliasMove:
        """Move the alias to `version` if it still points to `expected` (None: to no version).

        The same `request` again changes nothing. Raises ChampionChangedError, naming the champion.
        """
        with lock_model(self.registry, self.model_name, self.timeouts) as lock:
            moves = self._reconcile(lock)
            if (done := _find(moves, request)) is not None:
                return done
            last = moves[-1] if moves else None
            if (last.version if last else None) == expected:
                who = (by, request, approved_by)
                number, now = _number(moves), _utc()
                move = AliasMove(number, "promote", version, expected, reason, now, *who)
                return self._apply(lock, move)
            where = f"version {expected} was compared with" if expected else "there was none before"
            state, way_out = f"points to no version where {where}", "promote again"
            if last is not None:
                state = f"is on version {last.version} now, where {where} ({last.sentence()})"
                way_out = "evaluate against the present champion and promote again"
            raise ChampionChangedError(
                f"alias {self.alias!r} of {self.model_name!r} {state}; version {version} was not "
                f"promoted; {way_out}"
            )

    def rollback(
        self,
        reason: str,
        *,
        to: str = "",
        expected: str = "",
        request: str = "",
        by: str = "",
        verify: bool = True,
        force: bool = False,
        approved_by: str = "",
        dry_run: bool = False,
    ) -> AliasMove:
        """Put the alias back on the previous champion, or on version `to`, which was one.

        expected: the version to replace; empty: whichever the alias points to. verify: re-hash
        MLflow's copy of what is restored. force: `to` need not have been champion. approved_by: for
        a model whose champions need approval. dry_run: return the move that would be made. A
        request that was done changes nothing, nor does one whose `to` is the champion already.
        Raises TrackingError for a version that none of this allows, or that is missing.
        """
        if not reason.strip():
            raise TrackingError("reason is empty; say why the champion is rolled back")
        with lock_model(self.registry, self.model_name, self.timeouts) as lock:
            moves = self._reconcile(lock)
            if (done := _find(moves, request)) is not None:
                return done
            alias = f"alias {self.alias!r} of {self.model_name!r}"
            last = moves[-1] if moves else None
            if last is None or last.version is None:
                raise TrackingError(f"{alias} points to no version; there is nothing to roll back")
            if to and last.version == to:
                return last
            if expected and last.version != expected:
                # A repeated call without a request id returns the move that was made.
                if last.action == "rollback" and last.replaced == expected and not to:
                    return last
                raise TrackingError(
                    f"{alias} is on version {last.version}, not on {expected}: {last.sentence()}; "
                    "nothing was moved"
                )
            target = to or previous_version(moves)
            if target is None:
                raise TrackingError(
                    f"version {last.version} of {self.model_name!r} is the first {self.alias}, so "
                    "there is no previous one; name a version to go to"
                )
            former_version = self.registry.model_version(f"models:/{self.model_name}/{target}")
            former = list(dict.fromkeys(move.version for move in moves if move.version))
            if target not in former and not force:
                raise TrackingError(
                    f"version {target} of {self.model_name!r} never was {self.alias}, so that this "
                    "is no rollback; nothing was moved; name one that was "
                    f"({', '.join(former)}), promote it through the gate, or force it (--force)"
                )
            approver = approved_by.strip()
            approvers = [move.approved_by for move in moves if move.version == target]
            if self._approval_rule() != "none" and not any(approvers) and not approver:
                raise TrackingError(
                    f"{self.model_name!r} has promote.approval=required, and nobody approved of "
                    f"version {target}; nothing was moved; say who does (--approved-by NAME)"
                )
            if verify:
                require_intact_copy(self.registry, former_version)
            action: Action = "rollback" if target in former else "forced"
            number, current, why, now = _number(moves), last.version, reason.strip(), _utc()
            who = (by, request, approver)
            move = AliasMove(number, action, target, current, why, now, *who)
            return move if dry_run else self._apply(lock, move)

    def record_approval_rule(self, rule: str) -> None:
        """Record on the model whether its champions need approval, which `rollback` obeys."""
        if self._approval_rule("") != rule:
            key = connection.name(f"approval.{self.alias}")
            self.registry.set_model_tag(self.model_name, key, rule)

    def _approval_rule(self, otherwise: str = "none") -> str:
        # A rule that can't be read counts as the stricter one.
        tags = self.registry.require_model(self.model_name).tags
        return tags.get(connection.name(f"approval.{self.alias}"), otherwise)

    def _read(self) -> tuple[list[AliasMove], str | None]:
        """Return the record as it is written, and the version that the alias points to."""
        model = self.registry.require_model(self.model_name)
        at = model.aliases.get(self.alias)
        return read_moves(model.tags, self.alias), None if at is None else str(at)

    def _reconcile(self, lock: ModelLock) -> list[AliasMove]:
        moves, current = self._read()
        record, never_made = reconcile(moves, current, _utc())
        for move in record:
            if move not in moves:
                self._record(lock, move)
        for move in never_made:
            lock.check()
            self.registry.delete_model_tag(self.model_name, tag_key(self.alias, move))
        return record

    def _apply(self, lock: ModelLock, move: AliasMove) -> AliasMove:
        """Record the move, set the alias, look at it, and record that it is done."""
        self._record(lock, replace(move, done=False))
        lock.check()
        version = str(move.version)
        self.registry.set_alias(self.model_name, self.alias, version, move.replaced)
        if (now := self._read()[1]) != version:
            raise TrackingError(
                f"alias {self.alias!r} of {self.model_name!r} is on version {now} right after it "
                f"was set to {version}; another process moves it without the lock"
            )
        self._record(lock, move)
        notes = {PROMOTED_TAG: move.at, REPLACED_TAG: move.replaced or "", REASON_TAG: move.reason}
        with self.registry.translated("tag a model version"):
            for key, value in connection.tags(notes).items():
                self.registry.client.set_model_version_tag(self.model_name, version, key, value)
        return move

    def _record(self, lock: ModelLock, move: AliasMove) -> None:
        lock.check()
        self.registry.set_model_tag(self.model_name, tag_key(self.alias, move), tag_value(move))


def _find(moves: Sequence[AliasMove], request: str) -> AliasMove | None:
    return next((m for m in reversed(moves) if request and m.request == request), None)


def _utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
