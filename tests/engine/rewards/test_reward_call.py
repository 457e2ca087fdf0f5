import asyncio
import queue
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from engine.errors import RewardError
from engine.rewards.calls import DeadlinePassed, RewardCall, RewardOutcome, RewardRows

ROWS = RewardRows(["p", "q"], ["a", "bb"], {"ground_truth": ["1", "2"]})


def start(reward: Any, seconds: float = 5.0) -> tuple[RewardCall, queue.SimpleQueue[RewardOutcome]]:
    outcomes: queue.SimpleQueue[RewardOutcome] = queue.SimpleQueue()
    return RewardCall(reward, ROWS, time.monotonic() + seconds, outcomes, row=3), outcomes


def test_rows_must_fit_each_other() -> None:
    with pytest.raises(RewardError, match="prompts has 1 entries for 2 completions"):
        RewardRows(["p"], ["a", "b"], {})
    with pytest.raises(RewardError, match="kind has 3 entries for 2 completions"):
        RewardRows(["p"] * 2, ["a", "b"], {"kind": [1, 2, 3]})
    with pytest.raises(RewardError, match="column 'prompts' has the name of an argument of every"):
        RewardRows(["p"], ["a"], {"prompts": [1]})
    assert ROWS.row(1) == RewardRows(["q"], ["bb"], {"ground_truth": ["2"]})


def test_a_call_that_empties_its_lists_leaves_the_rows_alone() -> None:
    def reward(prompts: Any, completions: Any, ground_truth: Any, **columns: Any) -> list[float]:
        for values in (prompts, completions, ground_truth):
            values.clear()
        return []

    _, outcomes = start(reward)
    assert outcomes.get(timeout=5) == RewardOutcome(3, [])
    assert ROWS.completions == ["a", "bb"]
    assert ROWS.columns["ground_truth"] == ["1", "2"]


def test_a_function_that_spins_is_stopped_once_abandoned() -> None:
    entered, left = threading.Event(), threading.Event()

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        entered.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            left.set()

    call, outcomes = start(reward)
    assert entered.wait(5)
    call.abandon()
    assert left.wait(5)
    assert isinstance(outcomes.get(timeout=5).error, SystemExit)


def test_abandoning_what_has_ended_harms_no_other_thread() -> None:
    call, outcomes = start(lambda *args, **columns: [0.0, 0.0])
    outcomes.get(timeout=5)
    second, more = start(lambda *args, **columns: [sum(range(1000)) for _ in range(2000)])
    for _ in range(100):
        call.abandon()
    assert more.get(timeout=5).error is None
    second.abandon()


def test_a_coroutine_is_cancelled_at_the_deadline_and_not_broken_off() -> None:
    cleaned = threading.Event()

    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.2)
            cleaned.set()
        return [0.0, 0.0]

    call, outcomes = start(reward, 0.1)
    time.sleep(0.2)
    call.abandon()
    assert cleaned.wait(5)
    assert isinstance(outcomes.get(timeout=5).error, DeadlinePassed)


def test_threads_of_a_coroutine_work_and_hand_back_errors() -> None:
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [await asyncio.to_thread(float, text) for text in columns["ground_truth"]]

    async def failing(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [await asyncio.to_thread(float, text) for text in completions]

    assert start(reward)[1].get(timeout=5).result == [1.0, 2.0]
    assert isinstance(start(failing)[1].get(timeout=5).error, ValueError)


HUNG = """
import asyncio, queue, time
from engine.rewards.calls import RewardCall, RewardRows

def hang(*args, **columns):
    time.sleep(60)

async def hang_in_thread(*args, **columns):
    await asyncio.to_thread(time.sleep, 60)

outcomes = queue.SimpleQueue()
for reward in (hang, hang_in_thread):
    call = RewardCall(reward, RewardRows(["p"], ["c"], {}), time.monotonic() + 0.1, outcomes)
    time.sleep(0.3)
    call.abandon()
print("end", flush=True)
"""


def test_python_exits_though_calls_hang() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert time.monotonic() - start < 40
