"""Dynamic sampling over several rollouts, and pairs from groups."""

from __future__ import annotations

import pytest
import torch
from test_dataflow_steps import algo_of, scored, settings

from engine.batch import Batch, LazyBatch
from engine.dataflows.recipes import DynamicSampling, preference_pairs

PROMPTS = Batch({"group_ids": torch.arange(4)})


def rollout(*signal: bool) -> Batch:
    """Groups of two completions; those without signal score 1 twice."""
    batch = scored(2 * len(signal))
    scores = torch.zeros_like(batch["response_mask"])
    for group, has in enumerate(signal):
        scores[2 * group : 2 * group + 2, 0] = torch.tensor([0.0, 1.0]) if has else torch.ones(2)
    return batch | {"token_level_scores": scores}


def sampled(
    rollouts: list[Batch], bound: int = 10, wanted: int = 4
) -> tuple[Batch, dict[str, float], int]:
    asked: list[int] = []

    def more() -> Batch:
        asked.append(1)
        return PROMPTS

    filters = {"enable": True, "max_num_gen_batches": bound}
    algo = algo_of(settings(algorithm={"filter_groups": filters}), more_prompts=more)
    sampling = DynamicSampling(algo, wanted)
    source = iter(rollouts)
    for prompts in sampling.rounds(PROMPTS):
        assert prompts is PROMPTS
        sampling.add(LazyBatch(next(source)))
    return sampling.batch(), algo.take_metrics(), len(asked)


def test_full_at_once() -> None:
    batch, metrics, asked = sampled([rollout(True, True, True, True)])
    assert asked == 0
    assert len(batch) == 8
    assert metrics == {
        "sampling/rollouts": 1.0,
        "sampling/groups_sampled": 4.0,
        "sampling/groups_kept": 4.0,
    }


def test_refill_keeps_groups_apart_and_drops_the_surplus() -> None:
    first, second = rollout(True, False, True, False), rollout(False, True, True, True)
    batch, metrics, asked = sampled([first, second])
    assert asked == 1
    assert batch["group_ids"].tolist() == [0, 0, 2, 2, 5, 5, 6, 6]
    assert batch["token_level_scores"].sum(1).tolist() == [0, 1] * 4
    assert metrics["sampling/groups_sampled"] == 8


def test_the_bound_ends_it() -> None:
    empty = rollout(False, False, False, False)
    batch, metrics, asked = sampled([empty, rollout(False, True, False, False), empty], bound=3)
    assert asked == 2
    assert batch["group_ids"].tolist() == [5, 5]
    assert metrics["sampling/groups_kept"] == 1


def test_no_group_at_all_leaves_the_last_rollout() -> None:
    empty = rollout(False, False)
    batch, metrics, _ = sampled([empty, empty], bound=2, wanted=2)
    assert len(batch) == 4
    assert metrics["sampling/groups_kept"] == 0


def test_without_a_source_of_prompts_there_is_one_round() -> None:
    sampling = DynamicSampling(algo_of(settings(algorithm={"filter_groups": {"enable": True}})), 4)
    rounds = sampling.rounds(PROMPTS)
    next(rounds)
    sampling.add(LazyBatch(rollout(False, True)))
    assert list(rounds) == []
    assert len(sampling.batch()) == 2


def test_pairs_are_a_group_s_best_and_worst() -> None:
    batch = scored(8)
    scores = torch.zeros_like(batch["response_mask"])
    scores[:, 0] = torch.tensor([3.0, 1.0, 2.0, 9.0, 5.0, 5.0, 0.0, 4.0])
    groups = torch.tensor([7, 7, 7, 7, 3, 3, 9, 9])
    failed = torch.zeros(8, dtype=torch.bool)
    failed[3] = True
    batch = batch | {"token_level_scores": scores, "group_ids": groups, "reward_failed": failed}
    algo = algo_of(settings(algorithm={"dataflow": "online_dpo"}))
    pairs = preference_pairs(LazyBatch(batch), algo)
    assert pairs["token_level_scores"].sum(1).tolist() == [3.0, 1.0, 4.0, 0.0]
    assert algo.take_metrics() == {
        "preference/pairs": 2.0,
        "preference/groups_with_pair": pytest.approx(2 / 3),
    }
