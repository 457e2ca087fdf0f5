"""Calls of a reward: results and failures."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RewardError
from engine.rewards import calls as runner
from engine.rewards.calls import (
    AT_ONCE,
    DeadlinePassed,
    RewardRows,
    RewardThreads,
    call_reward,
)
from engine.rewards.reward_function import RewardFailure, Scores, read_result, require_components
from engine.worker_process import on_daemon_thread

ROWS = RewardRows(["p", "q"], ["a", "bb"], {"ground_truth": ["1", "2"]})


def start(reward: Any, seconds: float = 5.0) -> Future[object]:
    return on_daemon_thread(call_reward, reward, ROWS, time.monotonic() + seconds)


def test_rows_must_fit_each_other() -> None:
    with pytest.raises(RewardError, match="prompts has 1 entries for 2 completions"):
        RewardRows(["p"], ["a", "b"], {})
    with pytest.raises(RewardError, match="kind has 3 entries for 2 completions"):
        RewardRows(["p"] * 2, ["a", "b"], {"kind": [1, 2, 3]})
    with pytest.raises(RewardError, match="column 'prompts' has the name of an argument of every"):
        RewardRows(["p"], ["a"], {"prompts": [1]})
    assert ROWS.select([1]) == RewardRows(["q"], ["bb"], {"ground_truth": ["2"]})


def test_a_call_that_empties_its_lists_leaves_the_rows_alone() -> None:
    def reward(prompts: Any, completions: Any, ground_truth: Any, **columns: Any) -> list[float]:
        for values in (prompts, completions, ground_truth):
            values.clear()
        return []

    assert start(reward).result(5) == []
    assert ROWS.completions == ["a", "bb"]
    assert ROWS.columns["ground_truth"] == ["1", "2"]


def test_a_coroutine_is_cancelled_at_the_deadline_and_not_broken_off() -> None:
    cleaned = threading.Event()

    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.2)
            cleaned.set()
        return [0.0, 0.0]

    call = start(reward, 0.1)
    assert cleaned.wait(5)
    assert isinstance(call.exception(5), DeadlinePassed)


def test_threads_of_a_coroutine_work_and_hand_back_errors() -> None:
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [await asyncio.to_thread(float, text) for text in columns["ground_truth"]]

    async def failing(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [await asyncio.to_thread(float, text) for text in completions]

    assert start(reward).result(5) == [1.0, 2.0]
    assert isinstance(start(failing).exception(5), ValueError)


def test_whatever_a_call_raises_is_the_futures() -> None:
    assert isinstance(on_daemon_thread(sys.exit, 3).exception(5), SystemExit)


HUNG = """
import asyncio, time
from engine.rewards.calls import RewardRows, call_reward
from engine.worker_process import on_daemon_thread

def hang(*args, **columns):
    time.sleep(60)

async def hang_in_thread(*args, **columns):
    await asyncio.to_thread(time.sleep, 60)

for reward in (hang, hang_in_thread):
    rows = RewardRows(["p"], ["c"], {})
    on_daemon_thread(call_reward, reward, rows, time.monotonic() + 0.1)
    time.sleep(0.3)
print("end", flush=True)
"""


def test_python_exits_though_calls_hang() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert time.monotonic() - start < 40


TWO = {"answer": [1.0, 0.0, 1.0], "format": [0.5, 0.5, 0.0]}


class Broken:
    def __float__(self) -> float:
        raise KeyError("no value")


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ([1.0, math.nan, 0.0], 1),
        ([1.0, 0.0, math.inf], 2),
        (["1", 0.0, 0.0], 0),
        ([[1.0], 0.0, 0.0], 0),
        ([10**400, 0.0, 0.0], 0),
        ([10**5000, 0.0, 0.0], 0),
        ([0.0, 0.0, 1e300], 2),
        ([0.0, torch.ones(2), 0.0], 1),
        ([0.0, Broken(), 0.0], 1),
        (np.array([0.0, -np.inf, 0.0]), 1),
    ],
)
def test_a_wrong_value_costs_its_row_alone(value: Any, row: int) -> None:
    scores = read_result("r", value, 3)
    assert list(scores.failures) == [row]
    assert scores.failures[row].cause == "not_finite"
    assert f"for completion {row}; it must be a finite float" in str(scores.failures[row])
    healthy = [i for i in range(3) if i != row]
    assert [scores.rows[i] for i in healthy] == [[float(value[i])] for i in healthy]
    assert scores.rows[row] == [0.0]


def test_the_value_and_its_component_are_named() -> None:
    scores = read_result("r", {"answer": [1.0, 1.0], "format": [0.0, math.nan]}, 2, range(7, 9))
    assert str(scores.failures[1]) == (
        "reward 'r' returned nan as 'format' for completion 8; it must be a finite float, or "
        "None where it doesn't apply"
    )
    assert scores.rows == [[1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("result", "rows", "without"),
    [
        ([1.0, None, 0.0], [[1.0], [0.0], [0.0]], [1]),
        (np.array([1.0, None, 0.0], dtype=object), [[1.0], [0.0], [0.0]], [1]),
        ({"a": [1.0, None, None], "b": [None, None, 2.0]}, [[1.0, None], [0, 0], [None, 2.0]], [1]),
        ({"a": [1.0, None, None], "b": [math.nan, None, 2.0]}, [[0, 0], [0, 0], [None, 2.0]], [1]),
        ([None] * 3, [[0.0]] * 3, [0, 1, 2]),
    ],
)
def test_none_says_that_a_component_doesn_t_apply(
    result: Any, rows: list[list[float | None]], without: list[int]
) -> None:
    scores = read_result("r", result, 3, [5, 6, 7])
    assert [[None if math.isnan(x) else x for x in row] for row in scores.rows] == rows
    causes = {row: failure.cause for row, failure in scores.failures.items()}
    assert {row for row in causes if causes[row] == "not_applicable"} == {*without}
    assert f"returned None for completion {5 + without[0]}" in str(scores.failures[without[0]])


def test_components_become_columns_in_the_order_of_their_keys() -> None:
    scores = read_result("r", TWO, 3)
    assert scores.components == ("answer", "format")
    assert scores.rows == [[1.0, 0.5], [0.0, 0.5], [1.0, 0.0]]
    assert read_result("r", {"b": torch.ones(1), "a": np.zeros(1)}, 1).rows == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "reward 'r' returned 2 values for 3 completions"),
        ([1.0] * 4, "4 values for 3 completions"),
        (1.0, "returned float; it must return a list"),
        (torch.tensor(1.0), "returned Tensor; it must return a list"),
        (None, "returned NoneType"),
        ("abc", "returned str"),
        ({1.0, 2.0, 3.0}, "returned set"),
        ((x for x in [1.0, 2.0, 3.0]), "returned generator"),
        ({"a": 1, "b": 2, "c": 3}, "component 'a', returned int; it must return a list"),
        ({"a": [1.0] * 3, "b": [1.0] * 2}, "component 'b', returned 2 values for 3"),
        ({"a": {"x": 1}}, "component 'a', returned dict"),
        ({}, "at least one component"),
        ({0: [1.0] * 3}, r"keys \[0\]; it must have at least one component, each named by a"),
    ],
)
def test_a_wrong_form_is_wrong_as_a_whole(value: Any, message: str) -> None:
    with pytest.raises(RewardFailure, match=message) as caught:
        read_result("r", value, 3)
    assert caught.value.cause == "malformed"


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        (TWO, (), r"components \['answer', 'format'\] where a plain list was"),
        ([1.0] * 3, ("answer",), r"a plain list where components \['answer'\] was"),
        (TWO, ("format", "answer"), r"where components \['format', 'answer'\] was .* same order"),
        ({"answer": [0.0] * 3}, ("answer", "format"), r"returned components \['answer'\] where"),
    ],
)
def test_other_names_than_before_are_refused(
    value: Any, expected: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RewardFailure, match=message):
        require_components("r", read_result("r", value, 3).components, expected)


def test_only_a_batch_without_any_score_is_an_error() -> None:
    first, second = RewardFailure("raised", "first"), RewardFailure("deadline", "second")
    Scores.of((), {1: [1.0]}, {0: first}).raise_if_none()
    Scores((), [], {}).raise_if_none()
    with pytest.raises(RewardError, match=r"^first; none of the 2 completions") as caught:
        Scores.of((), {}, {0: first, 1: second}).raise_if_none()
    assert caught.value.__cause__ is first


def test_a_failure_travels_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(RewardFailure("deadline", "late")))
    assert (copy.cause, str(copy)) == ("deadline", "late")


Reward = Callable[..., Any]


RELEASE = threading.Event()  # ends what hangs, after each test


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    RELEASE.clear()
    yield
    RELEASE.set()


def run(
    reward: Reward,
    texts: list[str],
    timeout_s: float = 5.0,
    on_error: Any = "drop",
    components: tuple[str, ...] | None = None,
) -> Scores:
    columns = {"ground_truth": list(range(len(texts)))}
    scorer = RewardThreads(reward, components)
    return runner.score(scorer, ["p"] * len(texts), texts, columns, timeout_s, on_error)


def by_text(prompts: Any, completions: Any, *, ground_truth: Any, **columns: Any) -> list[float]:
    """Score digits; a text says how it fails."""
    scores = [math.nan if text == "nan" else float(text.isdigit()) for text in completions]
    if "raise" in completions:
        raise ValueError(f"no judge for row {ground_truth[completions.index('raise')]}")
    if "hang" in completions:
        RELEASE.wait(30)
    return scores[1:] if "short" in completions else scores


async def by_text_async(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    if "hang" in completions:
        await asyncio.sleep(30)
    others = ["x" if text == "hang" else text for text in completions]
    return await asyncio.sleep(0.001, by_text(prompts, others, **columns))


def in_parts(prompts: Any, completions: Any, **columns: Any) -> dict[str, list[float]]:
    scores = by_text(prompts, completions, **columns)
    return {"digits": scores, "length": [len(text) / 10 for text in completions]}


CAUSES = {"raise": "raised", "hang": "deadline", "short": "malformed", "nan": "not_finite"}


HANG_S = 1.5  # a deadline that is waited for: what doesn't hang ends in it on a busy machine too


def deadline_s(fault: str) -> float:
    return HANG_S if fault == "hang" else 30.0


@pytest.mark.parametrize("reward", [by_text, by_text_async])
@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("on_error", ["drop", "zero"])
def test_only_the_culprit_has_no_score(reward: Reward, fault: str, on_error: str) -> None:
    scores = run(reward, ["1", "a", fault, "2"], deadline_s(fault), on_error=on_error)
    assert {row: failure.cause for row, failure in scores.failures.items()} == {2: CAUSES[fault]}
    assert scores.rows == [[1.0], [0.0], [0.0], [1.0]]
    assert scores.components == ()


@pytest.mark.parametrize("reward", [by_text, by_text_async])
@pytest.mark.parametrize("fault", CAUSES)
def test_with_fail_the_first_failure_ends_it(reward: Reward, fault: str) -> None:
    start = time.monotonic()
    with pytest.raises(RewardFailure) as caught:
        run(reward, ["1", "a", fault, "2"], deadline_s(fault), on_error="fail")
    assert caught.value.cause == CAUSES[fault]
    assert time.monotonic() - start < HANG_S + 5


def test_all_kinds_at_once_are_told_apart() -> None:
    texts = ["1", "raise", "hang", "2", "short", "nan", "raise", "x"]
    scores = run(by_text, texts, HANG_S)
    causes = [scores.failures[i].cause if i in scores.failures else "" for i in range(len(texts))]
    assert causes == [CAUSES.get(text, "") for text in texts]
    assert [row for (row,) in scores.rows] == [float(text.isdigit()) for text in texts]
    assert str(scores.failures[6]).endswith("raised ValueError: no judge for row 6")
    assert isinstance(scores.failures[6].__cause__, ValueError)


class NoText(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text either")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoText(), r"raised NoText: \(its text can't be made: SystemExit\)$"),
        (ValueError("long\n" * 1000), r"raised ValueError: (long ){20,60}.{0,5}…$"),
        (RewardError("r" * 5000), r"^r{300}…$"),
    ],
)
def test_any_exception_is_one_cut_sentence(error: Exception, text: str) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise error

    [failure] = run(reward, ["1"]).failures.values()
    assert re.search(text, str(failure))
    assert failure.cause == "raised"


def test_a_result_that_can_t_be_read_costs_its_rows() -> None:
    class Unreadable(list[float]):
        def __len__(self) -> int:
            raise KeyError("no length")

    [failure] = run(lambda *args, **columns: Unreadable(), ["1"]).failures.values()
    assert failure.cause == "malformed"
    assert "returned Unreadable, which can't be read (KeyError: 'no length')" in str(failure)


def test_components_fail_together() -> None:
    scores = run(in_parts, ["11", "raise", "nan"])
    assert scores.components == ("digits", "length")
    assert scores.rows == [[1.0, 0.2], [0.0, 0.0], [0.0, 0.0]]
    assert [scores.failures[i].cause for i in (1, 2)] == ["raised", "not_finite"]


def test_values_that_aren_t_finite_need_no_second_call() -> None:
    calls = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        calls.append(list(completions))
        return by_text(prompts, completions, **columns)

    assert list(run(reward, ["nan", "1", "nan"]).failures) == [0, 2]
    assert calls == [["nan", "1", "nan"]]


def test_a_single_completion_is_not_tried_twice() -> None:
    calls = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        calls.append(list(completions))
        raise ValueError

    scores = run(reward, ["1"], components=("a", "b"))
    assert (scores.rows, list(scores.failures)) == ([[0.0, 0.0]], [0])
    assert calls == [["1"]]


def test_names_that_differ_between_samples_cost_those_that_came_later() -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> dict[str, list[float]]:
        names = {text[0] for text in completions}
        if len(names) > 1:
            raise ValueError("can't score both")
        return {name: [1.0] * len(completions) for name in names}

    scores = run(reward, ["a1", "b1", "a2"])
    assert scores.components == ("a",)
    assert {row: failure.cause for row, failure in scores.failures.items()} == {1: "malformed"}
    assert "where components ['a'] was" in str(scores.failures[1])


def test_declared_names_are_held_to() -> None:
    with pytest.raises(RewardError, match=r"where components \['length', 'digits'\] was declared"):
        run(in_parts, ["1", "2"], components=("length", "digits")).raise_if_none()
    with pytest.raises(RewardError, match="a plain list where"):
        run(by_text, ["1", "2"], components=("digits",), on_error="fail")


def test_many_that_hang_don_t_starve_the_others() -> None:
    texts = ["hang"] * (AT_ONCE * 2) + ["1"] * 20
    start = time.monotonic()
    scores = run(by_text, texts, HANG_S)
    assert time.monotonic() - start < 10
    assert {text for i, text in enumerate(texts) if i in scores.failures} == {"hang"}
    assert len(scores.failures) == AT_ONCE * 2
    assert scores.rows[-20:] == [[1.0]] * 20


def test_single_rows_run_side_by_side_on_a_bounded_number_of_threads() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        nonlocal now, most
        if len(completions) > 1:
            raise ValueError("one at a time")
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return [1.0]

    scores = run(reward, ["1"] * 40, 20.0)
    assert scores.failures == {}
    assert 2 <= most <= AT_ONCE


def test_slow_single_rows_end_at_one_common_deadline() -> None:
    start = time.monotonic()
    scores = run(by_text, ["hang"] * 40, 0.3)
    assert time.monotonic() - start < 5
    assert {failure.cause for failure in scores.failures.values()} == {"deadline"}
    assert len(scores.failures) == 40


def assert_only_left(threads: set[threading.Thread]) -> None:
    """All others end within seconds. Polled: a loop that closes may just be starting one."""
    end = time.monotonic() + 5
    while others := set(threading.enumerate()) - threads:
        assert time.monotonic() < end, others
        time.sleep(0.01)


def test_no_thread_is_left_that_python_would_wait_for() -> None:
    before = set(threading.enumerate())
    run(by_text, ["hang", "1"], 0.15)
    run(by_text_async, ["hang", "1"], 0.15)
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    RELEASE.set()
    assert_only_left(before)


def test_one_warning_a_batch_with_count_cause_and_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="engine.rewards"):
        run(by_text, ["1", "nan", "raise", "raise"])
        run(by_text, ["1", "2"])
    assert [record.name for record in caplog.records] == ["engine.rewards"]
    message = caplog.records[0].getMessage()
    assert "failed for 3 of 4 completions (not_finite 1, raised 2)" in message
    assert "left out of learning (reward.on_error=drop)" in message
    assert "first, completion 1: reward 'by_text' returned nan" in message
    assert "no judge for row 2" in caplog.text
    assert "in by_text" in caplog.text, "the traceback"


def test_a_batch_that_only_fails_as_a_whole_is_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [1.0]

    assert run(reward, ["a", "b"], on_error="zero").rows == [[1.0], [1.0]]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "all 2 completions at once, though for none by itself: " in caplog.text
    assert "returned 1 values for 2 completions" in caplog.text


@given(
    texts=st.lists(st.sampled_from(["1", "a", "nan", "raise", "short"]), max_size=8),
    cut=st.integers(0, 8),
    parts=st.booleans(),
)
def test_parts_scored_apart_equal_the_whole(texts: list[str], cut: int, parts: bool) -> None:
    score = functools.partial(run, in_parts if parts else by_text)
    names = ("digits", "length") if parts else ()
    whole = score(texts, components=names)
    first, second = score(texts[:cut], components=names), score(texts[cut:], components=names)
    assert first.rows + second.rows == whole.rows
    size = len(first.rows)
    failed = [*first.failures, *(size + row for row in second.failures)]
    assert failed == sorted(whole.failures)
    alone = [score([text], components=names).rows[0] for text in texts]
    assert whole.rows == alone
