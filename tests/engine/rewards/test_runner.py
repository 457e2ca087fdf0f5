import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import RewardError
from engine.rewards import calls
from engine.rewards.answers import answer_match
from engine.rewards.calls import RewardThreads

COLUMNS = {"ground_truth": ["1", "2", "3"]}


def run(reward: Any, timeout_s: float = 5.0, columns: dict[str, list[Any]] | None = None) -> Any:
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

    assert run(reward, columns={**COLUMNS, "kind": ["x", "y", "z"]}) == [1.0, 2.0, 3.0]
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

    assert run(reward) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "values", [[1, 0.5, True], np.array([1, 0.5, 1]), torch.tensor([1, 0.5, 1]), (1, 0.5, 1)]
)
def test_any_sequence_of_numbers_becomes_floats(values: Any) -> None:
    scores = run(returning(values))
    assert scores == [1.0, 0.5, 1.0]
    assert all(type(score) is float for score in scores)


@pytest.mark.parametrize("error", [ValueError("bad row 7"), SystemExit("bad row 7")])
def test_an_exception_becomes_a_reward_error(error: BaseException) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}: bad row 7") as caught:
        run(reward)
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
        run(returning(value))


def test_a_rewards_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise TimeoutError("the grader's server")

    with pytest.raises(RewardError, match="raised TimeoutError: the grader's server"):
        run(reward)


def test_a_reward_error_is_passed_on_as_it_is() -> None:
    with pytest.raises(RewardError, match=r"^row 0: ground_truth is 'x'"):
        run(answer_match, columns={"ground_truth": ["x", "1", "2"]})


def test_a_hung_function_ends_at_the_deadline() -> None:
    release = threading.Event()

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        release.wait(30)
        return [0.0] * 3

    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match=r"no answer for 3 completions within 0\.2 s"):
            run(reward, timeout_s=0.2)
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
        run(reward, timeout_s=0.2)
    assert cancelled.wait(5)


def test_columns_must_fit_the_completions() -> None:
    with pytest.raises(RewardError, match="ground_truth has 2 entries for 3 completions"):
        run(returning([0.0] * 3), columns={"ground_truth": ["1", "2"]})
    with pytest.raises(RewardError, match="prompts has 1 entries for 3 completions"):
        calls.score(RewardThreads(returning([0.0] * 3)), ["p"], ["a", "b", "c"], COLUMNS, 1.0)


def test_no_completions_need_no_call() -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [max(completions)]

    assert calls.score(RewardThreads(reward), [], [], {"ground_truth": []}, 1.0).rows == []
