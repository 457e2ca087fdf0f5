import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from engine.errors import RewardError
from engine.rewards.calls import DeadlinePassed, RewardRows, call_reward, on_daemon_thread

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
from engine.rewards.calls import RewardRows, call_reward, on_daemon_thread

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
