"""Splits of the GPUs between processes that compute and processes that decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_search import GRPO_7B, QWEN_05B, gpus

from engine.errors import PlacementError
from engine.planner import Cluster, PlacementPlan, explain, search, search_apart
from engine.planner.layout_search import priced_samplers
from engine.planner.sizes import Workload

AHEAD = replace(GRPO_7B, runs_ahead=True, samplers=1, sampler_bytes=2.0)
SMALL = replace(AHEAD, shape=QWEN_05B)


def planned(work: Workload, cluster: Cluster, **choices: Any) -> PlacementPlan:
    return search_apart(work, cluster, search, **choices)


def every_split(work: Workload, cluster: Cluster) -> dict[int, float]:
    """Seconds of a step for each number of GPUs that decode, looked at one by one."""
    found = {}
    for count in range(1, cluster.gpus):
        samplers = priced_samplers(work, cluster, count, 1)
        assert samplers is not None
        try:
            plan = search(replace(work, ahead=samplers), cluster.less_gpus(count))
        except PlacementError:
            continue
        found[count] = plan.chosen.price.total
    return found


@pytest.mark.parametrize("response", [256, 2048, 8192])
def test_the_split_is_the_best_of_all(response: int) -> None:
    cluster = gpus(8, 80)
    work = replace(SMALL, response_length=response)
    plan = planned(work, cluster)
    best = min(every_split(work, cluster).values())
    assert plan.chosen.price.total == pytest.approx(best)
    chosen = plan.splits[0]
    assert chosen.price.total == pytest.approx(best)
    assert chosen.allocation.ranks + chosen.work.ahead.gpus <= 8


def test_longer_completions_get_more_gpus() -> None:
    cluster = gpus(8, 80)
    taken = [
        planned(replace(SMALL, response_length=length, passes=passes), cluster)
        .splits[0]
        .work.ahead.gpus
        for length, passes in ((128, 6), (4096, 0))
    ]
    assert taken[0] < taken[1]


def test_a_step_is_the_slower_of_both_and_says_why() -> None:
    plan = planned(SMALL, gpus(8, 80))
    price = plan.chosen.price
    assert price.total == max(price.trainer, price.ahead)
    assert price.ahead > 0
    assert price.rollout == 0
    said = explain(replace(plan, together=99.0))
    decode = "decodes" if plan.splits[0].work.ahead.count == 1 else "decode"
    assert f"{plan.splits[0].work.ahead} {decode} for" in said
    assert "taking turns on all GPUs (trainer.mode=sync) 99 s" in said


def test_samplers_of_vllm_need_their_share_to_hold_weights_and_a_row() -> None:
    cluster = gpus(8, 80)
    long = replace(AHEAD, response_length=8192, decode_rows=2048)
    assert priced_samplers(long, cluster, 1, 1) is None, "all rows at once are too many"
    assert priced_samplers(replace(long, memory_share=0.5), cluster, 1, 1) is not None
    small = replace(AHEAD, memory_share=0.15)  # 12 GiB, less than the weights
    with pytest.raises(PlacementError, match=r"gpu_memory_utilization=0.15 of a GPU is 12.00 GiB"):
        planned(small, cluster)
    assert planned(small, cluster, tps=[1, 2, 4]).splits[0].work.ahead.tp > 1


def test_a_model_too_large_for_one_gpu_is_decoded_by_several_or_refused() -> None:
    large = replace(AHEAD, sampler_bytes=12.0)  # 85 GiB of weights
    with pytest.raises(PlacementError, match=r"only decode .*rollout.vllm.in_process=false"):
        planned(large, gpus(8, 80))
    found = planned(large, gpus(8, 80), tps=[1, 2, 4]).splits[0].work.ahead
    assert found.tp in (2, 4)
    assert str(found).endswith("GPUs")


def test_what_is_set_stays() -> None:
    found = planned(SMALL, gpus(8, 80), counts=[3], tps=[2]).splits
    assert [(split.work.ahead.count, split.work.ahead.tp) for split in found] == [(3, 2)]


def test_no_room_for_the_trainer_is_told() -> None:
    with pytest.raises(PlacementError, match="finds no layout that fits on"):
        planned(replace(AHEAD, decode_rows=32), gpus(2, 40), counts=[1])


def test_a_large_cluster_is_split_without_looking_at_every_number() -> None:
    machines = tuple(replace(gpus(8, 80).machines[0], name=f"m{i}") for i in range(4))
    asked: list[int] = []

    def counting(work: Workload, cluster: Cluster) -> PlacementPlan:
        asked.append(cluster.gpus)
        return search(work, cluster)

    plan = search_apart(SMALL, Cluster(machines), counting)
    assert plan.chosen.allocation.ranks + plan.splits[0].work.ahead.gpus <= 32
    assert len(asked) <= 7
