"""The record of a model's champions, in tags of the registered model, one a move.

A move is written before the alias is set and marked as done after it, so a process that died in
between leaves one of which `reconcile` finds out whether it was made. A move by hand, in MLflow's
own pages, shows in an alias that is not where the record left it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from engine.errors import TrackingError
from engine.tracking import values

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
        """The move for a person."""
        where = f"version {self.version}" if self.version else "nowhere"
        was = f"version {self.replaced}" if self.replaced else "nowhere"
        by = f" by {self.by}" if self.by else ""
        if self.approved_by not in ("", self.by):
            by += f", approved by {self.approved_by}"
        return f"{self.at} {self.action}: {was} → {where}{by}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The corrected record, and the writes that correct it in MLflow."""

    moves: tuple[AliasMove, ...]
    write: tuple[AliasMove, ...] = ()  # new or changed
    drop: tuple[AliasMove, ...] = ()  # never made


def reconcile(moves: Sequence[AliasMove], current: str | None, now: str) -> Reconciled:
    """Correct a record, in order, by the version that the alias points to."""
    kept = list(moves)
    write: list[AliasMove] = []
    drop: list[AliasMove] = []
    if kept and not kept[-1].done:
        last = kept.pop()
        if last.version == current:
            kept.append(replace(last, done=True))
            write.append(kept[-1])
        else:
            drop.append(last)
    before = kept[-1].version if kept else None
    if before != current:
        number = kept[-1].number + 1 if kept else 1
        reason = "The alias was moved outside of promotion"
        kept.append(AliasMove(number, "by hand", current, before, reason, now))
        write.append(kept[-1])
        drop = [move for move in drop if move.number != number]  # its place is written over
    return Reconciled(tuple(kept), tuple(write), tuple(drop))


def previous_version(moves: Sequence[AliasMove]) -> str | None:
    """The version to go back to: what the present champion replaced when it was promoted.

    A second rollback therefore goes further back. None when there is none.
    """
    if not moves:
        return None
    current = moves[-1].version
    installed = [m for m in moves if m.version == current and m.action != "rollback"]
    return (installed or list(moves))[-1].replaced


def read_moves(tags: Mapping[str, str], alias: str) -> list[AliasMove]:
    """Read the moves of an alias from the tags of its model, in order."""
    pattern = re.compile(re.escape(_prefix(alias)) + r"\d+")
    moves = [_parse(key, text) for key, text in tags.items() if pattern.fullmatch(key)]
    return sorted(moves, key=lambda move: move.number)


def tag_key(alias: str, move: AliasMove) -> str:
    """The name of the tag that holds a move."""
    return f"{_prefix(alias)}{move.number:06d}"


def tag_value(move: AliasMove) -> str:
    """A move as the text of its tag."""
    return json.dumps(asdict(replace(move, reason=values.shorten(move.reason, MAX_REASON))))


def _prefix(alias: str) -> str:
    return values.name(f"history.{alias}.")


def _parse(key: str, text: str) -> AliasMove:
    try:
        return AliasMove(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise TrackingError(
            f"the tag {key!r} of the registered model is no record of a move ({error}); it was "
            "edited; delete it"
        ) from error
