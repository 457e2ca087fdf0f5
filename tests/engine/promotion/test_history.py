"""The record of moves: what is made of one that broke off, and of moves by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TrackingError
from engine.promotion.champions import (
    AliasMove,
    previous_version,
    read_moves,
    reconcile,
    tag_key,
    tag_value,
)

NOW = "2026-11-21T02:00:00Z"
FIRST = AliasMove(1, "promote", "1", None, "first", NOW, request="a")
SECOND = AliasMove(2, "promote", "2", "1", "better", NOW, request="b")


def test_moves_survive_their_tags_in_order() -> None:
    tags = {tag_key("champion", move): tag_value(move) for move in (SECOND, FIRST)}
    others = {"history.other.000001": tag_value(FIRST), "note": "x"}
    assert read_moves(tags | others, "champion") == [FIRST, SECOND]
    with pytest.raises(TrackingError, match="was edited"):
        read_moves({tag_key("champion", FIRST): "{}"}, "champion")


def test_a_move_that_broke_off_was_made_or_never() -> None:
    open_ = replace(SECOND, done=False)
    made = reconcile([FIRST, open_], "2", NOW)
    assert (made.moves, made.write, made.drop) == ((FIRST, SECOND), (SECOND,), ())
    never = reconcile([FIRST, open_], "1", NOW)
    assert (never.moves, never.write, never.drop) == ((FIRST,), (), (open_,))


def test_a_move_by_hand_is_recorded_as_one() -> None:
    moves = reconcile([FIRST, SECOND], "7", NOW).moves
    assert (moves[-1].action, moves[-1].version, moves[-1].replaced) == ("by hand", "7", "2")
    assert previous_version(moves) == "2"
    assert reconcile([], "3", NOW).moves[0].version == "3"
    assert reconcile([FIRST], None, NOW).moves[-1].version is None
    assert reconcile([], None, NOW).moves == ()


def test_a_second_rollback_goes_further_back() -> None:
    third = AliasMove(3, "promote", "3", "2", "best", NOW)
    back = AliasMove(4, "rollback", "2", "3", "worse in use", NOW)
    assert previous_version([FIRST, SECOND, third]) == "2"
    assert previous_version([FIRST, SECOND, third, back]) == "1"
    assert (
        previous_version([FIRST, SECOND, third, back, AliasMove(5, "rollback", "1", "2", "", NOW)])
        is None
    )
    assert previous_version([]) is None


VERSION = st.sampled_from(["1", "2", "3"])


@given(path=st.lists(VERSION), current=st.none() | VERSION, done=st.booleans())
def test_a_settled_record_is_a_chain_that_ends_where_the_alias_stands(
    path: list[str], current: str | None, done: bool
) -> None:
    before = [None, *path]
    moves = [AliasMove(i + 1, "promote", v, before[i], "", NOW) for i, v in enumerate(path)]
    if moves and not done:
        moves[-1] = replace(moves[-1], done=False)
    reconciled = reconcile(moves, current, NOW)
    at = None
    for number, move in enumerate(reconciled.moves, 1):
        assert (move.number, move.replaced, move.done) == (number, at, True)
        at = move.version
    assert at == current
    # What is written and dropped gives that very record when it is read again.
    tags = {tag_key("c", m): tag_value(m) for m in moves}
    tags |= {tag_key("c", m): tag_value(m) for m in reconciled.write}
    for move in reconciled.drop:
        del tags[tag_key("c", move)]
    assert tuple(read_moves(tags, "c")) == reconciled.moves
    assert reconcile(reconciled.moves, current, NOW) == replace(reconciled, write=(), drop=())
