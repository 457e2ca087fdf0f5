"""Finished groups are scored in one call, and each gets its own scores."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from invariants import check_admission

from engine.batch import Batch, Future
from engine.controller.rollout_queue import AdmissionLimits, RolloutQueue
from engine.errors import EngineError, RewardError

N = 2  # completions a group


class Reward(Future[Batch]):
    """Scores a token with its id, once `ready`."""

    def __init__(self, groups: Batch) -> None:
        self.groups, self.ready, self.error = groups, False, None

    error: EngineError | None

    def done(self) -> bool:
        return self.ready

    def failure(self) -> EngineError | None:
        return self.error if self.ready else None

    def result(self, until: float | None = None) -> Batch:
        if self.error is not None:
            raise self.error
        return Batch({"token_level_scores": self.groups["responses"].float()})


@pytest.fixture
def calls() -> list[Reward]:
    return []


@pytest.fixture
def queue(calls: list[Reward]) -> RolloutQueue:
    def score(groups: Batch) -> Reward:
        calls.append(Reward(groups))
        return calls[-1]

    keys = count()
    return RolloutQueue(
        AdmissionLimits(batch=2, staleness=1),
        0,
        next_prompt=lambda: Batch({}, {"prompt_ids": [[next(keys)]]}),
        score=score,
    )


def group(key: int, width: int) -> Batch:
    """All tokens of group `key` are 10 + key."""
    shape = (N, width)
    return Batch(
        {
            "group_ids": torch.full((N,), key),
            "responses": torch.full(shape, 10 + key),
            "response_mask": torch.ones(shape),
            "policy_version": torch.zeros(N, dtype=torch.long),
            "token_versions": torch.zeros(shape, dtype=torch.long),
        }
    )


def test_groups_of_one_poll_are_scored_in_one_call_at_their_own_width(
    queue: RolloutQueue, calls: list[Reward]
) -> None:
    queue.begin("a", 0, 3)
    queue.finish("a", [group(0, 3), group(1, 5)])
    queue.finish("a", [])
    assert len(calls) == 1
    assert len(calls[0].groups) == 2 * N
    assert not queue.poll_scores()
    assert queue.take() is None
    calls[0].ready = True
    assert queue.poll_scores()
    narrow, wide = (queue._scored[key]["token_level_scores"] for key in (0, 1))
    assert narrow.tolist() == [[10.0] * 3] * N
    assert wide.tolist() == [[11.0] * 5] * N
    taken = queue.take()
    assert taken is not None
    assert taken[1]["group_ids"].tolist() == [0, 0, 1, 1]
    assert queue.completions == 2 * N
    assert queue.tokens == 8 * N


def test_a_group_given_up_while_it_is_scored_is_sampled_again_and_the_others_count(
    queue: RolloutQueue, calls: list[Reward]
) -> None:
    queue.begin("a", 0, 1)
    queue.begin("b", 0, 2)
    queue.finish("a", [group(0, 3), group(1, 3)])  # the second is not a's
    assert len(calls[0].groups) == N
    queue.finish("b", [group(1, 4), group(2, 2)])
    queue.worker_lost("a")
    for call in calls:
        call.ready = True
    queue.poll_scores()
    assert sorted(queue._scored) == [1, 2]
    assert queue._scored[2]["token_level_scores"].tolist() == [[12.0] * 2] * N
    [again] = queue.begin("c", 0, 1)
    assert again["group_ids"].tolist() == [0]
    assert list(again.columns["prompt_ids"][0]) == [0]
    check_admission(queue.admission)


def test_a_failed_scoring_is_raised(queue: RolloutQueue, calls: list[Reward]) -> None:
    queue.begin("a", 0, 1)
    queue.finish("a", [group(0, 3)])
    calls[0].ready, calls[0].error = True, RewardError("no server")
    with pytest.raises(RewardError, match="no server"):
        queue.poll_scores()
