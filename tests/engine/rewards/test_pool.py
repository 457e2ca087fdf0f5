"""A pool of processes: a deadline a completion, and processes that are made again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engine.rewards import open_reward, score
from engine.rewards.calls import RewardPool, RewardRows

PATTERN = r"(a+)+$|(?P<answer>\d+)"  # a text such as aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab takes ages
HANGS = "a" * 60 + "b"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    opened = open_reward(
        "regular_expression", {"pattern": PATTERN}, processes=2, sample_timeout_s=0.3
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
    assert "'regular_expression' gave no answer for a completion within 0.3 s" in str(
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
