"""The record of a model's champions, in tags of the registered model, one a move.

A move is written before the alias is set and marked as done after it, so a process that died in
between leaves a move that `settle` can tell: made, or never made. A move of the alias by hand, in
MLflow's own pages, is told from the alias's not being where the record left it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.errors import TrackingError
from engine.tracking import values

MAX_REASON = 2000  # characters; a tag of MLflow's registry holds 5,000 in some databases

Action = Literal["promote", "rollback", "by hand"]


@dataclass(frozen=True, slots=True)
class Move:
    """An alias went from one version to another."""

    number: int  # counts from 1 a model and alias
    action: Action
    version: str | None  # where it went, e.g. "4"; None: the alias was removed by hand
    replaced: str | None  # where it was; None: nowhere
    reason: str
    at: str  # UTC, e.g. "2026-11-21T02:00:00Z"
    by: str = ""  # run, execution or person
    request: str = ""  # the same request is not done twice
    done: bool = True

    def sentence(self) -> str:
        """The move for a person."""
        where = f"version {self.version}" if self.version else "nowhere"
        was = f"version {self.replaced}" if self.replaced else "nowhere"
        by = f" by {self.by}" if self.by else ""
        return f"{self.at} {self.action}: {was} → {where}{by}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Settled:
    """The record as it truly is, and what must be written for it to say so."""

    moves: tuple[Move, ...]
    write: tuple[Move, ...] = ()  # new or changed
    drop: tuple[Move, ...] = ()  # never made


def settle(moves: Sequence[Move], current: str | None, now: str) -> Settled:
    """Bring a record, in order, into line with the version that the alias stands on."""
    kept = list(moves)
    write: list[Move] = []
    drop: list[Move] = []
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
        kept.append(Move(number, "by hand", current, before, reason, now))
        write.append(kept[-1])
        drop = [move for move in drop if move.number != number]  # its place is written over
    return Settled(tuple(kept), tuple(write), tuple(drop))


def predecessor(moves: Sequence[Move]) -> str | None:
    """The version to go back to: what the present champion replaced when it was promoted.

    So a second rollback goes further back, not forth again. None when there is none.
    """
    if not moves:
        return None
    current = moves[-1].version
    installed = [m for m in moves if m.version == current and m.action != "rollback"]
    return (installed or list(moves))[-1].replaced


def read_moves(tags: Mapping[str, str], alias: str) -> list[Move]:
    """Read the moves of an alias from the tags of its model, in order."""
    pattern = re.compile(re.escape(_prefix(alias)) + r"\d+")
    moves = [_parse(key, text) for key, text in tags.items() if pattern.fullmatch(key)]
    return sorted(moves, key=lambda move: move.number)


def tag_key(alias: str, move: Move) -> str:
    """The name of the tag that holds a move."""
    return f"{_prefix(alias)}{move.number:06d}"


def tag_value(move: Move) -> str:
    """A move as the text of its tag."""
    return json.dumps(asdict(replace(move, reason=values.shorten(move.reason, MAX_REASON))))


def _prefix(alias: str) -> str:
    return values.name(f"history.{alias}.")


def _parse(key: str, text: str) -> Move:
    try:
        fields: dict[str, Any] = json.loads(text)
        return Move(**fields)
    except (ValueError, TypeError) as error:
        raise TrackingError(
            f"the tag {key!r} of the registered model is no record of a move ({error}); it was "
            "edited; delete it"
        ) from error
