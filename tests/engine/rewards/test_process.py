"""The processes that rewards run in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from once import OwnEntries

from engine.errors import ConfigError, RewardError
from engine.registry import import_plugins
from engine.rewards import (
    RewardThreads,
    Scores,
    calls,
    open_reward,
    resolve_reward,
    reward_function,
    score,
)
from engine.rewards.answers import answer_match
from engine.rewards.calls import RewardPool, RewardProcess, RewardRows

MODULE = '''
import ctypes, os, random, re, subprocess, sys, time

def by_text(prompts, completions, *, ground_truth, **columns):
    """Score digits; a text says what else happens."""
    for text in completions:
        if text == "exit": os._exit(3)
        if text == "crash": ctypes.string_at(0)
        if text == "kill": os.kill(0, 9)
        if text == "raise": raise ValueError("no judge")
        if text == "spin": re.match("(a+)+$", "a" * 60 + "b")
        if text == "child": subprocess.Popen(["sleep", "987"], start_new_session=True)
        if text == "pid": return [float(os.getpid())] * len(completions)
        if text == "float64": __import__("torch").set_default_dtype(__import__("torch").float64)
        if text == "torch": return [float("torch" in sys.modules)] * len(completions)
    return [float(text.isdigit()) for text in completions]

def draws(prompts, completions, **columns):
    import numpy
    return [random.random() + numpy.random.rand() for _ in completions]

def draws_or_fails(prompts, completions, **columns):
    found = draws(prompts, completions)
    if "raise" in completions: raise ValueError
    return found

async def later(prompts, completions, *, scale: float = 1.0, **columns):
    return {"length": [scale * len(text) for text in completions]}
'''


PLUGIN = """
from engine.rewards import register_reward
from rewards_of_a_process import draws, later
register_reward("later_of_a_plugin", components=("length",))(later)
"""


BAD_IMPORT = "import os\nos._exit(4)"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_of_a_process.py").write_text(MODULE)
    (folder / "plugin_of_a_process.py").write_text(PLUGIN)
    (folder / "rewards_that_exit.py").write_text(BAD_IMPORT)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


Open = Callable[..., RewardProcess]


@pytest.fixture(scope="module")
def opened(modules: Path) -> Iterator[Open]:
    """Opens each reward once."""
    found: dict[str, RewardProcess] = {}

    def open_once(name: str, **options: Any) -> RewardProcess:
        if name not in found:
            reward = open_reward(f"rewards_of_a_process:{name}", options)
            assert isinstance(reward, RewardProcess)
            found[name] = reward
        return found[name]

    yield open_once
    for reward in found.values():
        reward.close()


def run(reward: Any, texts: list[str], timeout_s: float = 20.0, on_error: Any = "drop") -> Scores:
    columns = {"ground_truth": texts}
    return score(reward, ["p"] * len(texts), texts, columns, timeout_s, on_error=on_error)


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def wait_until(done: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow  # it imports torch there
def test_torch_s_global_state_is_that_of_its_process(modules: Path) -> None:
    import torch

    before = torch.get_default_dtype()
    reward = open_reward("rewards_of_a_process:by_text")
    try:
        assert run(reward, ["float64", "1"]).rows == [[0.0], [1.0]]
    finally:
        reward.close()
    assert torch.get_default_dtype() is before


def test_only_what_ends_the_process_has_no_score(opened: Open) -> None:
    texts = ["1", "exit", "a", "crash", "raise", "kill", "2"]
    scores = run(opened("by_text"), texts)
    assert [row for (row,) in scores.rows] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert {texts[row]: failure.cause for row, failure in scores.failures.items()} == {
        "exit": "crashed",
        "crash": "crashed",
        "raise": "raised",
        "kill": "crashed",
    }
    assert "ended with exit status 3 while it scored 1 completion" in str(scores.failures[1])
    assert "was ended by SIGSEGV" in str(scores.failures[3])
    assert "no judge" in str(scores.failures[4].__cause__), "the traceback"
    with pytest.raises(RewardError, match="ended with exit status 3 while it scored 2 completions"):
        run(opened("by_text"), ["1", "exit"], on_error="fail")
    assert run(opened("by_text"), ["7"]).rows == [[1.0]]


def test_one_process_keeps_its_state_and_has_no_torch(opened: Open) -> None:
    reward = opened("by_text")
    assert run(reward, ["pid"]).rows == run(reward, ["pid"]).rows != [[float(os.getpid())]]
    assert run(reward, ["torch"]).rows == [[0.0]]


def test_what_spins_in_c_ends_within_twice_the_deadline(opened: Open) -> None:
    reward = opened("by_text")
    start = time.monotonic()
    scores = run(reward, ["1", "spin", "2"], 0.5)
    assert time.monotonic() - start < 1.0 + 3.0, "a busy machine"
    assert scores.failures[1].cause == "deadline"
    assert run(reward, ["1"]).rows == [[1.0]]


@pytest.mark.slow
def test_what_spins_in_c_costs_its_sample_alone(opened: Open) -> None:
    scores = run(opened("by_text"), ["1"] * 5 + ["spin"] + ["2"] * 5, 16.0)
    assert list(scores.failures) == [5]


def test_a_stopped_process_that_takes_no_rows_is_late(opened: Open) -> None:
    reward = opened("by_text")
    (process,) = run(reward, ["pid"]).rows[0]
    os.kill(int(process), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RewardError, match="gave no answer"):
        run(reward, ["1" * 4_000_000], 1.0, on_error="fail")  # more than a socket holds
    assert time.monotonic() - started < 10
    assert run(reward, ["7"]).rows == [[1.0]]


def test_children_that_it_leaves_behind_are_ended(modules: Path) -> None:
    reward = open_reward("rewards_of_a_process:by_text")
    try:
        run(reward, ["child"])
        [pid] = run(reward, ["pid"]).rows[0]
        [child] = below(int(pid))
        run(reward, ["exit"])
        assert not child.is_running()
        run(reward, ["child"])
        left = below(reward._process._guard.pid)  # type: ignore[attr-defined]
        assert len(left) == 2
    finally:
        reward.close()
    assert not any(process.is_running() for process in left)


KILLED = """
import os, signal, sys
from engine.rewards import open_reward, score
reward = open_reward("rewards_of_a_process:by_text")
score(reward, ["p"], ["child"], {"ground_truth": [1]}, 20.0)
print(reward._process._guard.pid, flush=True)
if sys.argv[1] == "spin":
    score(reward, ["p"], ["spin"], {"ground_truth": [1]}, 500.0)
signal.pause()
"""


def test_nothing_outlives_a_run_that_is_killed(modules: Path) -> None:
    paths = os.pathsep.join([str(modules), *sys.path])
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, "spin"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert program.stdout is not None
    guard = psutil.Process(int(program.stdout.readline()))
    left = [guard, *guard.children(recursive=True)]
    assert len(left) == 3
    program.send_signal(signal.SIGKILL)
    program.wait()
    wait_until(lambda: not any(process.is_running() for process in left))
    program.stdout.close()


def test_a_guard_that_is_killed_is_replaced(opened: Open) -> None:
    reward = opened("later")
    guard = reward._process._guard
    assert guard is not None
    guard.kill()
    guard.wait()
    assert run(reward, ["a", "bb"]).rows == [[1.0], [2.0]]


def test_draws_are_those_of_the_rows(modules: Path, opened: Open) -> None:
    reward = opened("draws")
    first, other = run(reward, ["a", "b"]), run(reward, ["c", "b"])
    again = open_reward("rewards_of_a_process:draws")
    try:
        assert run(again, ["c", "b"]).rows == other.rows
        assert run(again, ["a", "b"]).rows == first.rows != other.rows
    finally:
        again.close()


def test_draws_on_single_rows_are_repeatable_too(opened: Open) -> None:
    texts = [str(i) for i in range(20)] + ["raise"]
    first = run(opened("draws_or_fails"), texts)
    assert list(first.failures) == [20]
    assert run(opened("draws_or_fails"), texts).rows == first.rows


def test_results_are_those_of_the_runs_own_process(opened: Open) -> None:
    reward = opened("later")
    texts = ["", "a", "\ud800", "ccc" * 1000]
    inside = RewardThreads(resolve_reward("rewards_of_a_process:later"))
    assert run(reward, texts) == run(inside, texts)
    assert run(reward, texts).components == ("length",)


def test_what_can_t_be_loaded_is_said_before_any_call(modules: Path) -> None:
    with pytest.raises(ConfigError, match=r"rewards_of_a_process.* has no 'nothing'"):
        open_reward("rewards_of_a_process:nothing")
    with pytest.raises(ConfigError, match=r"reward.options.scal: .*did you mean 'scale'"):
        open_reward("rewards_of_a_process:later", {"scal": 1})
    with pytest.raises(RewardError, match="ended with exit status 4 while it imported"):
        open_reward("rewards_that_exit:reward")
    with pytest.raises(ConfigError, match=r"set reward.isolation=none"):
        open_reward("__main__:reward")
    assert "rewards_that_exit" not in sys.modules


def test_a_reward_that_a_plugin_registers(modules: Path, own_entries: OwnEntries) -> None:
    own_entries(reward_function._registry)
    plugin = ("plugin_of_a_process",)
    import_plugins(plugin)
    reward = open_reward("later_of_a_plugin", {"scale": 2}, plugins=plugin)
    try:
        assert reward.components == ("length",)
        assert run(reward, ["a", "bb"]).rows == [[2.0], [4.0]]
    finally:
        reward.close()


def test_the_engines_own_rewards_stay_in_the_process(modules: Path) -> None:
    assert isinstance(open_reward("answer_match"), RewardThreads)
    outside = open_reward("rewards_of_a_process:by_text", isolation="none")
    assert isinstance(outside, RewardThreads)


PATTERN = r"(a+)+$|(?P<answer>\d+)"  # a text such as aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab takes ages


HANGS = "a" * 60 + "b"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    opened = open_reward(
        "regular_expression", {"pattern": PATTERN}, processes=2, sample_timeout_s=1.0
    )
    assert isinstance(opened, RewardPool)
    opened.score_all(RewardRows([""], ["1"], {"ground_truth": ["1"]}), 60.0)
    yield opened
    opened.close()


def test_each_completion_has_its_own_deadline(pool: RewardPool) -> None:
    texts = ["1", HANGS, "2", HANGS, "3", "4"]
    columns = {"ground_truth": ["1", "1", "2", "1", "3", "0"]}
    began = time.monotonic()
    scores = score(pool, [""] * 6, texts, columns, 30.0, on_error="zero")
    assert time.monotonic() - began < 10
    assert [row[0] for row in scores.rows] == [1, 0, 1, 0, 1, 0]
    assert {row: failure.cause for row, failure in scores.failures.items()} == {
        1: "deadline",
        3: "deadline",
    }
    assert "'regular_expression' gave no answer for 1 completion within 1 s" in str(
        scores.failures[1]
    )


def test_the_batchs_deadline_ends_what_waits(pool: RewardPool) -> None:
    texts = [HANGS] * 40
    began = time.monotonic()
    scores = pool.score_all(RewardRows([""] * 40, texts, {"ground_truth": [""] * 40}), 0.5)
    assert time.monotonic() - began < 5
    assert len(scores.failures) == 40


def test_a_reward_that_raises_keeps_its_process(pool: RewardPool) -> None:
    broken = open_reward("regular_expression", {"pattern": "("}, processes=1)
    rows = RewardRows(["", ""], ["1", "2"], {"ground_truth": ["1", "2"]})
    scores = broken.score_all(rows, 60.0)
    broken.close()
    assert [failure.cause for failure in scores.failures.values()] == ["raised", "raised"]
    assert "is no pattern" in str(scores.failures[0])


COLUMNS = {"ground_truth": ["1", "2", "3"]}


def scores_of(
    reward: Any, timeout_s: float = 5.0, columns: dict[str, list[Any]] | None = None
) -> Any:
    """One strict call on three completions; their scores."""
    texts = ["a", "bb", "ccc"]
    scores = calls.score(RewardThreads(reward), ["p"] * 3, texts, columns or COLUMNS, timeout_s)
    assert scores.components == ()
    assert scores.failures == {}
    return [value for (value,) in scores.rows]


def returning(value: Any) -> Any:
    def reward(prompts: Any, completions: Any, *, ground_truth: Any, **columns: Any) -> Any:
        return value

    return reward


def test_a_plain_function_gets_all_columns() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [len(text) for text in completions]

    assert scores_of(reward, columns={**COLUMNS, "kind": ["x", "y", "z"]}) == [1.0, 2.0, 3.0]
    assert seen == {
        "prompts": ["p"] * 3,
        "completions": ["a", "bb", "ccc"],
        "ground_truth": ["1", "2", "3"],
        "kind": ["x", "y", "z"],
    }


def test_a_coroutine_function_is_awaited() -> None:
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        lengths = [asyncio.sleep(0.01, len(text)) for text in completions]
        return list(await asyncio.gather(*lengths))

    assert scores_of(reward) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "values", [[1, 0.5, True], np.array([1, 0.5, 1]), torch.tensor([1, 0.5, 1]), (1, 0.5, 1)]
)
def test_any_sequence_of_numbers_becomes_floats(values: Any) -> None:
    scores = scores_of(returning(values))
    assert scores == [1.0, 0.5, 1.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize("error", [ValueError("bad row 7"), SystemExit("bad row 7")])
def test_an_exception_becomes_a_reward_error(error: BaseException) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}: bad row 7") as caught:
        scores_of(reward)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "2 values for 3 completions"),
        ([1.0, float("nan"), 0.0], "nan for completion 1"),
    ],
)
def test_a_wrong_result_is_raised(value: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        scores_of(returning(value))


def test_a_rewards_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise TimeoutError("the grader's server")

    with pytest.raises(RewardError, match="raised TimeoutError: the grader's server"):
        scores_of(reward)


def test_a_reward_error_is_passed_on_as_it_is() -> None:
    with pytest.raises(RewardError, match=r"^row 0: ground_truth is 'x'"):
        scores_of(answer_match, columns={"ground_truth": ["x", "1", "2"]})


def test_a_hung_function_ends_at_the_deadline() -> None:
    release = threading.Event()

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        release.wait(30)
        return [0.0] * 3

    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match=r"no answer for 3 completions within 0\.2 s"):
            scores_of(reward, timeout_s=0.2)
    finally:
        release.set()
    assert time.monotonic() - start < 5


def test_a_hung_coroutine_is_cancelled_at_the_deadline() -> None:
    cancelled = threading.Event()

    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()
        return [0.0] * 3

    with pytest.raises(RewardError, match="no answer for 3 completions"):
        scores_of(reward, timeout_s=0.2)
    assert cancelled.wait(5)


def test_columns_must_fit_the_completions() -> None:
    with pytest.raises(RewardError, match="ground_truth has 2 entries for 3 completions"):
        scores_of(returning([0.0] * 3), columns={"ground_truth": ["1", "2"]})
    with pytest.raises(RewardError, match="prompts has 1 entries for 3 completions"):
        calls.score(RewardThreads(returning([0.0] * 3)), ["p"], ["a", "b", "c"], COLUMNS, 1.0)


def test_no_completions_need_no_call() -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [max(completions)]

    assert calls.score(RewardThreads(reward), [], [], {"ground_truth": []}, 1.0).rows == []
