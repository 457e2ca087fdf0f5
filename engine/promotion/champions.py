"""Moving a model's alias: compare and set under the model's lock, and going back.

Every move is one of: done and recorded, done before by the same request, or an error and nothing
moved. Whether a move is deserved is for `rules`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import TrackingError
from engine.promotion.checks import require_whole_copy
from engine.promotion.history import Move, predecessor, read_moves, settle, tag_key, tag_value
from engine.promotion.lock import Held, Terms, hold
from engine.tracking import values

if TYPE_CHECKING:
    from engine.tracking.registry import Registry

PROMOTED_TAG, REPLACED_TAG, REASON_TAG = "promoted_at", "replaced", "promotion_reason"


@dataclass(frozen=True, slots=True)
class Champions:
    """The versions that an alias of a model stood on and stands on."""

    registry: Registry
    model_name: str
    alias: str = "champion"
    terms: Terms = Terms()  # noqa: RUF009 (frozen)

    def history(self) -> tuple[Move, ...]:
        """All moves, oldest first; nothing is written."""
        moves, current = self._read()
        return settle(moves, current, _now()).moves

    def made(self, request: str) -> Move | None:
        """The move that a request has led to, if it has."""
        return _made(self.history(), request)

    def promote(
        self, version: str, expected: str | None, reason: str, *, request: str, by: str = ""
    ) -> Move:
        """Move the alias to `version` if it still stands on `expected` (None: nowhere).

        request: what makes a second call with it the same request, which changes nothing. Raises
        TrackingError, naming the champion of now, when the alias stands elsewhere.
        """
        with hold(self.registry, self.model_name, self.terms) as held:
            moves = self._settle(held)
            done = _made(moves, request)
            if done is not None:
                return done
            current = moves[-1].version if moves else None
            if current != expected:
                raise TrackingError(self._lost(moves, version, expected))
            number = _next(moves)
            move = Move(number, "promote", version, current, reason, _now(), by, request)
            return self._make(held, move)

    def rollback(
        self,
        reason: str,
        *,
        to: str = "",
        expected: str = "",
        request: str = "",
        by: str = "",
        verify: bool = True,
    ) -> Move:
        """Put the alias back on the previous champion, or on version `to`.

        expected: the version to go away from; empty: whatever the alias stands on. verify: re-hash
        MLflow's copy of what is restored. A request that was done changes nothing, nor does one
        whose `to` is the champion already. Raises TrackingError when there is no previous one.
        """
        if not reason.strip():
            raise TrackingError("reason is empty; say why the champion is rolled back")
        with hold(self.registry, self.model_name, self.terms) as held:
            moves = self._settle(held)
            done = _made(moves, request)
            if done is not None:
                return done
            if not moves or moves[-1].version is None:
                raise TrackingError(
                    f"alias {self.alias!r} of {self.model_name!r} stands nowhere, so there is "
                    "nothing to roll back; check the names"
                )
            last = moves[-1]
            if to and last.version == to:
                return last
            if expected and last.version != expected:
                # The same words again, without a request's name, mean the move that is made.
                if last.action == "rollback" and last.replaced == expected and not to:
                    return last
                raise TrackingError(
                    f"alias {self.alias!r} of {self.model_name!r} is on version {last.version}, "
                    f"not on {expected}: {last.sentence()}; nothing was moved"
                )
            target = to or predecessor(moves)
            if target is None:
                raise TrackingError(
                    f"version {last.version} of {self.model_name!r} is the first {self.alias}, so "
                    "there is no previous one; name a version to go to"
                )
            found = self.registry.model_version(f"models:/{self.model_name}/{target}")
            if verify:
                require_whole_copy(self.registry, found)
            why, number = reason.strip(), _next(moves)
            move = Move(number, "rollback", target, last.version, why, _now(), by, request)
            return self._make(held, move)

    def _read(self) -> tuple[list[Move], str | None]:
        """The record as it is written, and the version that the alias stands on."""
        with self.registry.talking("look up a model"):
            model = self.registry.find_model(self.model_name)
        if model is None:
            raise TrackingError(
                f"MLflow {self.registry.uri} has no model {self.model_name!r}; check the name"
            )
        at = model.aliases.get(self.alias)
        return read_moves(model.tags, self.alias), None if at is None else str(at)

    def _settle(self, held: Held) -> tuple[Move, ...]:
        """Write into the record what it lacks, and return it."""
        moves, current = self._read()
        settled = settle(moves, current, _now())
        for move in settled.write:
            self._record(held, move)
        for move in settled.drop:
            held.check()
            with self.registry.talking("write the history"):
                self.registry.client.delete_registered_model_tag(
                    self.model_name, tag_key(self.alias, move)
                )
        return settled.moves

    def _make(self, held: Held, move: Move) -> Move:
        """Record, set the alias, look at it, and record that it is done."""
        assert move.version is not None
        self._record(held, replace(move, done=False))
        held.check()
        self.registry.set_alias(self.model_name, self.alias, move.version, move.replaced)
        now = self._read()[1]
        if now != move.version:
            raise TrackingError(
                f"alias {self.alias!r} of {self.model_name!r} is on version {now} right after it "
                f"was set to {move.version}; somebody moves it without the lock"
            )
        self._record(held, move)
        notes = {PROMOTED_TAG: move.at, REPLACED_TAG: move.replaced or "", REASON_TAG: move.reason}
        with self.registry.talking("tag a model version"):
            for key, value in values.tags(notes).items():
                self.registry.client.set_model_version_tag(
                    self.model_name, move.version, key, value
                )
        return move

    def _record(self, held: Held, move: Move) -> None:
        held.check()
        with self.registry.talking("write the history"):
            self.registry.client.set_registered_model_tag(
                self.model_name, tag_key(self.alias, move), tag_value(move)
            )

    def _lost(self, moves: Sequence[Move], version: str, expected: str | None) -> str:
        """The sentence for a promoter who was too late."""
        compared = f"version {expected} was compared with" if expected else "there was none before"
        if not moves:
            return (
                f"alias {self.alias!r} of {self.model_name!r} stands nowhere where {compared}; "
                f"version {version} was not promoted; promote again"
            )
        last = moves[-1]
        return (
            f"alias {self.alias!r} of {self.model_name!r} is on version {last.version} now, where "
            f"{compared} ({last.sentence()}); version {version} was not promoted; evaluate against "
            "the present champion and promote again"
        )


def _made(moves: Sequence[Move], request: str) -> Move | None:
    return next((m for m in reversed(moves) if request and m.request == request), None)


def _next(moves: Sequence[Move]) -> int:
    return moves[-1].number + 1 if moves else 1


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
