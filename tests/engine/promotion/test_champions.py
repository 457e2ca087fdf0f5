"""Moves of an alias in a real registry: one winner, a way back, and no half-made move."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import LineageError, TrackingError
from engine.promotion.__main__ import main
from engine.promotion.champions import (
    TAG_PREFIX,
    AliasMove,
    Champions,
    LockTimeouts,
    lock_model,
    previous_version,
    read_moves,
    reconcile,
    tag_key,
    tag_value,
)
from engine.tracking import Tracker

PointsTo = Callable[[], str | None]
QUICK = LockTimeouts(lease=20, wait=60, skew=0)


def on_a_server(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run with a server's registry alone, in the quick tests as well."""
    choose = pytest.mark.parametrize("tracker", ["mlflow_address"], indirect=True)
    return pytest.mark.usefixtures("mlflow_address")(choose(test))


@pytest.fixture
def champions(tracker: Tracker, model: str) -> Champions:
    return Champions(tracker, model, timeouts=QUICK)


def promoter(uri: str, model: str, version: str, start: float, results: Queue[str]) -> None:
    """A process that promotes `version` against version 1 at the moment `start`."""
    champions = Champions(Tracker(uri), model, timeouts=QUICK)
    champions.history()  # imports and connections are made by now
    time.sleep(max(0.0, start - time.time()))
    try:
        champions.promote(version, "1", f"v{version} is better", request=version, by=f"p{version}")
        results.put("won " + version)
    except TrackingError as error:
        results.put(f"lost {version}: {error}")


@pytest.mark.slow
@on_a_server
def test_of_two_promoters_at_once_one_wins_and_the_other_learns_who(
    mlflow_address: str, model: str, champions: Champions, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="first")
    context = multiprocessing.get_context("spawn")
    results: Queue[str] = context.Queue()
    start = time.time() + 20
    processes = [
        context.Process(target=promoter, args=(mlflow_address, model, version, start, results))
        for version in ("2", "3", "2", "3")
    ]
    for process in processes:
        process.start()
    said = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    winner = points_to()
    assert winner in ("2", "3")
    # The same request may have been sent twice: it is one promotion.
    assert said[2:] == [f"won {winner}"] * 2
    for loser in said[:2]:
        assert f"on version {winner} now, where version 1 was compared with" in loser
        assert f"by p{winner}: v{winner} is better" in loser
        assert "evaluate against the present champion" in loser
    assert [move.version for move in champions.history()] == ["1", winner]


def test_a_champion_that_changed_since_the_evaluation_stays(
    champions: Champions, points_to: PointsTo
) -> None:
    with pytest.raises(TrackingError, match="points to no version"):
        champions.promote("2", "1", "", request="a")
    champions.promote("1", None, "first", request="b")
    with pytest.raises(TrackingError, match="is on version 1 now, where there was none before"):
        champions.promote("2", None, "", request="c")
    assert points_to() == "1"


def test_history_is_in_tags_and_a_request_is_done_once(
    champions: Champions, tracker: Tracker, model: str, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    move = champions.promote("2", "1", "gain +3", request="b", by="run-7")
    assert champions.promote("2", "1", "gain +3", request="b") == move
    assert champions.find("b") == move
    tags = tracker.model_version(f"models:/{model}/2").tags
    assert (tags["replaced"], tags["promotion_reason"]) == ("1", "gain +3")
    assert tags["promoted_at"] == move.at
    champions.rollback("wrong answers in use", request="r")
    assert champions.rollback("wrong answers in use", request="r").number == 3
    assert champions.promote("2", "1", "gain +3", request="b") == move  # a late retry
    assert points_to() == "1"
    assert [(m.action, m.version) for m in champions.history()] == [
        ("promote", "1"), ("promote", "2"), ("rollback", "1"),
    ]  # fmt: skip


def test_rollback_goes_back_step_by_step_and_ends_at_the_first(
    champions: Champions, points_to: PointsTo
) -> None:
    with pytest.raises(TrackingError, match="points to no version"):
        champions.rollback("why")
    for version, before in (("1", None), ("2", "1"), ("3", "2")):
        champions.promote(version, before, "better", request=version)
    with pytest.raises(TrackingError, match="reason is empty"):
        champions.rollback(" ")
    with pytest.raises(TrackingError, match="not on 2"):
        champions.rollback("why", expected="2")
    with pytest.raises(TrackingError, match="has no models:/"):
        champions.rollback("why", to="9")
    planned = champions.rollback("a", expected="3", dry_run=True)
    assert (planned.version, points_to()) == ("2", "3")
    assert champions.rollback("a", expected="3").version == "2"
    assert champions.rollback("a", expected="3").number == 4  # the same words: done already
    assert champions.rollback("b").version == "1"
    with pytest.raises(TrackingError, match="is the first champion"):
        champions.rollback("c")
    assert champions.rollback("d", to="3").replaced == "1"
    assert champions.rollback("d", to="3").number == 6
    assert points_to() == "3"


def test_a_version_that_never_was_champion_is_no_rollback(
    champions: Champions, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    champions.promote("2", "1", "better", request="b")
    with pytest.raises(TrackingError, match=r"3 of .* never was champion.*name one .*\(1, 2\)"):
        champions.rollback("why", to="3")
    with pytest.raises(TrackingError, match="reason is empty"):
        champions.rollback("", to="3", force=True)
    assert points_to() == "2"
    forced = champions.rollback("the only whole one", to="3", force=True, by="ada")
    assert (forced.action, forced.replaced, points_to()) == ("forced", "2", "3")
    assert "forced: version 2 → version 3 by ada: the only whole one" in forced.sentence()
    assert champions.rollback("worse").version == "2"
    assert champions.rollback("it was one by now", to="3").action == "rollback"


def test_approval_is_asked_for_of_a_rollback_and_of_a_forced_move(
    champions: Champions, tracker: Tracker, model: str, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    champions.promote("2", "1", "better", request="b", approved_by="ada")
    champions.record_approval_rule("required")
    for to, force in (("", False), ("3", True)):
        with pytest.raises(TrackingError, match=r"approval=required, and nobody approved of vers"):
            champions.rollback("why", to=to, force=force, approved_by=" ")
    assert points_to() == "2"
    forced = champions.rollback("why", to="3", force=True, by="bob", approved_by="eve")
    assert "by bob, approved by eve: why" in forced.sentence()
    assert champions.history()[-1].approved_by == "eve"
    assert champions.rollback("why").version == "2", "ada approved of it"
    tracker.client.set_registered_model_tag(model, "approval.champion", "?")
    with pytest.raises(TrackingError, match="nobody approved of version 1"):
        champions.rollback("why")
    champions.record_approval_rule("none")
    assert champions.rollback("why").version == "1"


def test_a_promoter_that_died_before_or_after_the_alias_is_told_apart(
    champions: Champions, tracker: Tracker, model: str, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    died = AliasMove(
        2, "promote", "2", "1", "died", "2026-11-21T02:00:00Z", request="b", done=False
    )
    tracker.client.set_registered_model_tag(model, tag_key("champion", died), tag_value(died))
    assert [m.version for m in champions.history()] == ["1"]
    champions.promote("2", "1", "again", request="b")
    assert [m.reason for m in champions.history()] == ["first", "again"]
    late = AliasMove(
        3, "promote", "3", "2", "died late", "2026-11-21T02:00:00Z", request="c", done=False
    )
    tracker.client.set_registered_model_tag(model, tag_key("champion", late), tag_value(late))
    tracker.client.set_registered_model_alias(model, "champion", "3")
    assert champions.promote("3", "2", "again", request="c").reason == "died late"
    assert points_to() == "3"


def test_an_alias_moved_by_hand_is_seen(
    champions: Champions, tracker: Tracker, model: str, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    tracker.client.set_registered_model_alias(model, "champion", "3")
    with pytest.raises(TrackingError, match=r"on version 3 now.*outside of promotion"):
        champions.promote("2", "1", "better", request="b")
    assert champions.rollback("hands off").version == "1"
    assert [m.action for m in champions.history()] == ["promote", "by hand", "rollback"]


@on_a_server
def test_a_damaged_copy_is_not_restored(
    tmp_path: Path, champions: Champions, tracker: Tracker, model: str, points_to: PointsTo
) -> None:
    champions.promote("1", None, "first", request="a")
    champions.promote("2", "1", "better", request="b")
    version = tracker.model_version(f"models:/{model}/1")
    place = version.source.removeprefix("mlflow-artifacts:/")
    poison = tmp_path / "model.safetensors"
    poison.write_text("poison")
    tracker.client.log_artifact(version.run_id, str(poison), place.split("/artifacts/", 1)[1])
    with pytest.raises(LineageError, match=r"copy of .* version 1 is damaged.*nothing was moved"):
        champions.rollback("why")
    assert points_to() == "2"
    assert champions.rollback("in need", verify=False).version == "1"


@on_a_server
def test_a_dead_holder_is_outlived_and_a_live_one_is_waited_for_and_named(
    tracker: Tracker, empty_model: str
) -> None:
    with (
        lock_model(tracker, empty_model, LockTimeouts(lease=1000)) as lock,
        pytest.raises(
            TrackingError, match=rf"{lock.owner} \(until .* holds the lock .* nothing was moved"
        ),
        lock_model(tracker, empty_model, LockTimeouts(wait=0.2)),
    ):
        raise AssertionError("two hold the lock")
    dead = lock_model(tracker, empty_model, LockTimeouts(lease=1.0, skew=0))
    late = dead.__enter__()
    started = time.monotonic()
    with lock_model(tracker, empty_model, LockTimeouts(skew=0)) as next_:
        assert time.monotonic() - started < 30
        with pytest.raises(TrackingError, match="ran out"):
            late.check()
        # One that wakes up late releases its own lock, not this one.
        dead.__exit__(None, None, None)
        next_.check()
        with (
            pytest.raises(TrackingError, match=next_.owner),
            lock_model(tracker, empty_model, LockTimeouts(wait=0.2)),
        ):
            raise AssertionError("two hold the lock")
        models = tracker.client.search_registered_models(f"name LIKE '{empty_model}%'")
        assert [m.name for m in models] == [empty_model], "a lock is listed as a registered model"
    tags = tracker.client.get_registered_model(empty_model).tags
    assert not [key for key in tags if key.startswith(TAG_PREFIX)], "a lock was left"


@on_a_server
def test_of_many_that_claim_a_lock_at_once_one_at_a_time_holds_it(
    tracker: Tracker, empty_model: str
) -> None:
    holders: list[str] = []
    most: list[int] = []

    def hold(_: int) -> None:
        with lock_model(tracker, empty_model, LockTimeouts(lease=60, wait=60, skew=0)) as lock:
            holders.append(lock.owner)
            most.append(len(holders))
            time.sleep(0.1)
            holders.remove(lock.owner)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(hold, range(3)))
    assert most == [1] * 3


def test_a_lock_that_was_edited_is_named(tracker: Tracker, empty_model: str) -> None:
    tracker.client.set_registered_model_tag(empty_model, f"{TAG_PREFIX}somebody", "soon")
    with (
        pytest.raises(TrackingError, match=r"was edited; delete it when nobody promotes"),
        lock_model(tracker, empty_model, QUICK),
    ):
        raise AssertionError("an unreadable lock was taken")


def test_the_command(
    tracker: Tracker, model: str, champions: Champions, points_to: PointsTo,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
    champions.promote("1", None, "first", request="a")
    words = ["rollback", "--model", model, "--reason", "drift", "--from", "2"]
    assert main(words) == 1
    assert "nothing was moved" in capsys.readouterr().err
    champions.promote("2", "1", "better", request="b")
    assert main(words) == 0
    assert "rollback: version 2 → version 1" in capsys.readouterr().out
    assert main(words) == 0
    assert points_to() == "1"
    capsys.readouterr()
    assert main(["history", "--model", model, "--json"]) == 0
    moves = json.loads(capsys.readouterr().out)
    assert [(m["version"], m["reason"]) for m in moves] == [
        ("1", "first"), ("2", "better"), ("1", "drift"),
    ]  # fmt: skip
    assert main([*words[:4], "drift", "--to", "3"]) == 1
    assert "--force" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[:4], "drift", "--force"])
    assert main([*words[:4], "drift", "--to", "3", "--force"]) == 0
    assert "forced: version 1 → version 3" in capsys.readouterr().out
    for command in (["history"], ["rollback", "--reason", "r"]):
        assert main([*command, "--model", "nobody"]) == 1
        assert "has no model 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["rollback", "--help"], ["history", "--help"]])
def test_help_says_how_it_ends(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert "exit status" in capsys.readouterr().out


def test_no_server_and_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["history", "--model", "m"]) == 1
    assert "there is no MLflow store" in capsys.readouterr().err
    assert list(tmp_path.glob("mlflow*")) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert main(["rollback", "--model", "m", "--reason", "r"]) == 1
    assert "connection refused" in capsys.readouterr().err


# The record of moves: what is made of one that broke off, and of moves by hand.

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
    assert reconcile([FIRST, open_], "2", NOW) == ([FIRST, SECOND], [])
    assert reconcile([FIRST, open_], "1", NOW) == ([FIRST], [open_])


def test_a_move_by_hand_is_recorded_as_one() -> None:
    moves, _ = reconcile([FIRST, SECOND], "7", NOW)
    assert (moves[-1].action, moves[-1].version, moves[-1].replaced) == ("by hand", "7", "2")
    assert previous_version(moves) == "2"
    assert reconcile([], "3", NOW)[0][0].version == "3"
    assert reconcile([FIRST], None, NOW)[0][-1].version is None
    assert reconcile([], None, NOW) == ([], [])


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
    record, never_made = reconcile(moves, current, NOW)
    at = None
    for number, move in enumerate(record, 1):
        assert (move.number, move.replaced, move.done) == (number, at, True)
        at = move.version
    assert at == current
    # What is written and dropped gives that very record when it is read again.
    tags = {tag_key("c", m): tag_value(m) for m in moves}
    tags |= {tag_key("c", m): tag_value(m) for m in record if m not in moves}
    for move in never_made:
        del tags[tag_key("c", move)]
    assert read_moves(tags, "c") == record
    assert reconcile(record, current, NOW) == (record, [])
