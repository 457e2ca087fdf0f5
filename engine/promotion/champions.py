"""Moving a model's alias: compare and set under the model's lock, rollback, and a forced move.

Every call ends in one of: moved and recorded, moved before by the same request, or an error and
nothing moved. Whether a model should be promoted is for `rules`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import ChampionChangedError, TrackingError
from engine.promotion.checks import require_intact_copy
from engine.promotion.history import (
    Action,
    AliasMove,
    previous_version,
    read_moves,
    reconcile,
    tag_key,
    tag_value,
)
from engine.promotion.lock import LockTimeouts, ModelLock, lock_model
from engine.tracking import values

if TYPE_CHECKING:
    from engine.tracking.registry import ModelRegistry

PROMOTED_TAG, REPLACED_TAG, REASON_TAG = "promoted_at", "replaced", "promotion_reason"


@dataclass(frozen=True, slots=True)
class Champions:
    """The versions that an alias of a model pointed to and points to."""

    registry: ModelRegistry
    model_name: str
    alias: str = "champion"
    timeouts: LockTimeouts = LockTimeouts()  # noqa: RUF009 (frozen)

    def history(self) -> tuple[AliasMove, ...]:
        """All moves, oldest first; nothing is written."""
        moves, current = self._read()
        return reconcile(moves, current, _now()).moves

    def find(self, request: str) -> AliasMove | None:
        """The move that a request has led to, if it has."""
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

        request: what makes a second call with it the same request, which changes nothing.
        approved_by: who agreed, where the gate asked. Raises ChampionChangedError, naming the
        present champion, when the alias points elsewhere.
        """
        with lock_model(self.registry, self.model_name, self.timeouts) as lock:
            moves = self._reconcile(lock)
            done = _find(moves, request)
            if done is not None:
                return done
            current = moves[-1].version if moves else None
            if current != expected:
                raise ChampionChangedError(self._conflict(moves, version, expected))
            move = AliasMove(
                _next(moves), "promote", version, current, reason, _now(), by, request, approved_by
            )
            return self._apply(lock, move)

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
    ) -> AliasMove:
        """Put the alias back on the previous champion, or on version `to`, which was one.

        expected: the version to replace; empty: whichever the alias points to. verify: re-hash
        MLflow's copy of what is restored. force: `to` need not have been champion; the move is
        recorded as forced. approved_by: who agrees, for a model whose champions need approval and
        a version that has none. A request that was done changes nothing, nor does one whose `to`
        is the champion already. Raises TrackingError for a version that none of this allows, and
        when there is no previous one.
        """
        if not reason.strip():
            raise TrackingError("reason is empty; say why the champion is rolled back")
        with lock_model(self.registry, self.model_name, self.timeouts) as lock:
            moves = self._reconcile(lock)
            done = _find(moves, request)
            if done is not None:
                return done
            if not moves or moves[-1].version is None:
                raise TrackingError(
                    f"alias {self.alias!r} of {self.model_name!r} points to no version, so there "
                    "is nothing to roll back; check the names"
                )
            last = moves[-1]
            if to and last.version == to:
                return last
            if expected and last.version != expected:
                # The same call again, without a request id, is the move that was made.
                if last.action == "rollback" and last.replaced == expected and not to:
                    return last
                raise TrackingError(
                    f"alias {self.alias!r} of {self.model_name!r} is on version {last.version}, "
                    f"not on {expected}: {last.sentence()}; nothing was moved"
                )
            target = to or previous_version(moves)
            if target is None:
                raise TrackingError(
                    f"version {last.version} of {self.model_name!r} is the first {self.alias}, so "
                    "there is no previous one; name a version to go to"
                )
            found = self.registry.model_version(f"models:/{self.model_name}/{target}")
            action = self._allowed(moves, target, force, approved_by)
            if verify:
                require_intact_copy(self.registry, found)
            why, number = reason.strip(), _next(moves)
            agreed = approved_by.strip()
            move = AliasMove(number, action, target, last.version, why, _now(), by, request, agreed)
            return self._apply(lock, move)

    def record_approval_rule(self, rule: str) -> None:
        """Note on the model whether its champions need approval, which `rollback` holds to."""
        if self.registry.require_model(self.model_name).tags.get(self._approval_tag) != rule:
            with self.registry.translated("tag a model"):
                self.registry.client.set_registered_model_tag(
                    self.model_name, self._approval_tag, rule
                )

    @property
    def _approval_tag(self) -> str:
        return values.name(f"approval.{self.alias}")

    def _allowed(
        self, moves: Sequence[AliasMove], version: str, force: bool, approved_by: str
    ) -> Action:
        """What a move to `version` is; TrackingError where it may not be made."""
        was = list(dict.fromkeys(move.version for move in moves if move.version))
        if version not in was and not force:
            raise TrackingError(
                f"version {version} of {self.model_name!r} never was {self.alias}, so that this is "
                f"no rollback; nothing was moved; name one that was ({', '.join(was)}), "
                "promote it through the gate, or force it (--force)"
            )
        agreed = [move.approved_by for move in moves if move.version == version]
        # A rule that can't be read counts as the stricter one.
        rule = self.registry.require_model(self.model_name).tags.get(self._approval_tag, "none")
        if rule != "none" and not any(agreed) and not approved_by.strip():
            raise TrackingError(
                f"{self.model_name!r} has promote.approval=required, and nobody approved of "
                f"version {version}; nothing was moved; say who does (--approved-by NAME)"
            )
        return "rollback" if version in was else "forced"

    def _read(self) -> tuple[list[AliasMove], str | None]:
        """The record as it is written, and the version that the alias points to."""
        model = self.registry.require_model(self.model_name)
        at = model.aliases.get(self.alias)
        return read_moves(model.tags, self.alias), None if at is None else str(at)

    def _reconcile(self, lock: ModelLock) -> tuple[AliasMove, ...]:
        """Write into the record what it lacks, and return it."""
        moves, current = self._read()
        reconciled = reconcile(moves, current, _now())
        for move in reconciled.write:
            self._record(lock, move)
        for move in reconciled.drop:
            lock.check()
            with self.registry.translated("write the history"):
                self.registry.client.delete_registered_model_tag(
                    self.model_name, tag_key(self.alias, move)
                )
        return reconciled.moves

    def _apply(self, lock: ModelLock, move: AliasMove) -> AliasMove:
        """Record, set the alias, look at it, and record that it is done."""
        assert move.version is not None
        self._record(lock, replace(move, done=False))
        lock.check()
        self.registry.set_alias(self.model_name, self.alias, move.version, move.replaced)
        now = self._read()[1]
        if now != move.version:
            raise TrackingError(
                f"alias {self.alias!r} of {self.model_name!r} is on version {now} right after it "
                f"was set to {move.version}; another process moves it without the lock"
            )
        self._record(lock, move)
        notes = {PROMOTED_TAG: move.at, REPLACED_TAG: move.replaced or "", REASON_TAG: move.reason}
        with self.registry.translated("tag a model version"):
            for key, value in values.tags(notes).items():
                self.registry.client.set_model_version_tag(
                    self.model_name, move.version, key, value
                )
        return move

    def _record(self, lock: ModelLock, move: AliasMove) -> None:
        lock.check()
        with self.registry.translated("write the history"):
            self.registry.client.set_registered_model_tag(
                self.model_name, tag_key(self.alias, move), tag_value(move)
            )

    def _conflict(self, moves: Sequence[AliasMove], version: str, expected: str | None) -> str:
        """The error of a promotion whose champion was replaced meanwhile."""
        compared = f"version {expected} was compared with" if expected else "there was none before"
        if not moves:
            return (
                f"alias {self.alias!r} of {self.model_name!r} points to no version where "
                f"{compared}; version {version} was not promoted; promote again"
            )
        last = moves[-1]
        return (
            f"alias {self.alias!r} of {self.model_name!r} is on version {last.version} now, where "
            f"{compared} ({last.sentence()}); version {version} was not promoted; evaluate against "
            "the present champion and promote again"
        )


def _find(moves: Sequence[AliasMove], request: str) -> AliasMove | None:
    return next((m for m in reversed(moves) if request and m.request == request), None)


def _next(moves: Sequence[AliasMove]) -> int:
    return moves[-1].number + 1 if moves else 1


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
