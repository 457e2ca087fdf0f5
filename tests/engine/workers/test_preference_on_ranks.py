"""Preferences on many ranks: every layout trains as one rank does, and writes the same folder.

Real gloo ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import random_completions, write_tiny_folder
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from engine.batch import Batch
from engine.config import LoRAConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.controller.worker_host import shard_rows
from engine.data.training_examples import (
    LabelledExample,
    PairExample,
    collate_preferences,
    collate_scored,
    with_others,
)
from engine.parallel.layout import Layout
from engine.runtime.policy_runtime import StartModel
from engine.workers.role import WorkerContext
from engine.workers.supervised import PreferenceWorker, RewardModelWorker

Case = tuple[str, dict[str, Any]]  # what is trained, and its layout
STEPS = 2
TWO_RANKS: list[Case] = [
    ("kto", {"fsdp": 2}),
    ("sigmoid", {"tp": 2}),
    ("adapters", {"fsdp": 2}),
    ("reward_model", {"fsdp": 2}),
    ("reward_model", {"tp": 2}),
    ("likelihood adapters", {"fsdp": 2}),
]
MORE_ON_TWO: list[Case] = [("sigmoid", {"dp": 2}), ("likelihood", {"tp": 2})]
FOUR_RANKS: list[Case] = [
    ("kto", {"dp": 2, "pp": 2}),
    ("sigmoid", {"sp": 2, "dp": 2}),
    ("adapters", {"dp": 4}),
    ("reward_model", {"fsdp": 2, "tp": 2}),
    ("reward_model", {"pp": 2, "dp": 2}),
    ("likelihood", {"pp": 2, "dp": 2}),
    ("likelihood", {"fsdp": 2, "tp": 2}),
]
OPTIM = {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0}


def batch_of(method: str, rows: int, seed: int) -> Batch:
    prompts, one = random_completions(rows, seed)
    _, two = random_completions(rows, seed + 50)
    if method == "kto":
        every = zip(prompts, one, strict=True)
        labelled = [LabelledExample(p, r, i % 3 > 0) for i, (p, r) in enumerate(every)]
        return collate_preferences(with_others(labelled), 0)
    pairs = [PairExample(*ids, margin=0.1) for ids in zip(prompts, one, two, strict=True)]
    return collate_scored(pairs, 0) if method == "reward_model" else collate_preferences(pairs, 0)


def course(folder: str, case: Case, out: str = "") -> tuple[list[dict[str, float]], Any]:
    """Two updates of pairs that don't go into two; metrics, and the weights at the end, whole."""
    method, parallel = case
    values = {"parallel": parallel, "optim": OPTIM, "max_tokens_per_micro_batch": 64}
    lora = LoRAConfig(rank=4 if "adapters" in method else 0)
    start = StartModel(folder, "float32", lora)
    layout = Layout(**parallel)
    context = WorkerContext("preference", dist.get_rank(), dist.get_world_size(), layout=layout)
    worker: PreferenceWorker | RewardModelWorker
    if method == "reward_model":
        config = RewardModelTrainingConfig.model_validate(values)
        worker = RewardModelWorker(context, model=start, config=config, seed=0)
    else:
        own: dict[str, Any] = {"loss": "kto" if method == "kto" else "sigmoid"}
        own |= {"reference": "live", "beta": 0.3}
        if "likelihood" in method:  # as LikelihoodRewardTrainer
            own = {"loss": "likelihood", "sft_weight": 1.0}
        policy = PreferenceTrainingConfig.model_validate(values | own)
        worker = PreferenceWorker(context, model=start, config=policy, seed=0)
    worker.begin(STEPS)
    share = layout.data_shard(context.rank)
    metrics = [
        worker.update(shard_rows(batch_of(method, 5 - step, step), share, unit=2, pad=True)[0])
        for step in range(STEPS)
    ]
    weights = {name: tensor.clone() for name, tensor in worker.sharded.full_tensors()}
    if out:
        worker.save(out, folder)
    return metrics, weights


def courses(folder: str, cases: list[Case]) -> list[Any]:
    return [course(folder, case) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("preference-ranks") / "model"))


@pytest.mark.parametrize(
    ("world", "cases"),
    and_slow([(2, TWO_RANKS)], [(2, MORE_ON_TWO), (4, FOUR_RANKS)]),
    ids=("two", "more on two", "four"),
)
def test_every_layout_trains_as_one_rank(folder: str, world: int, cases: list[Case]) -> None:
    methods = sorted({method for method, _ in cases})
    [courses_alone] = run_ranks(1, courses, folder, [(method, {}) for method in methods])
    alone = dict(zip(methods, courses_alone, strict=True))
    for rank in run_ranks(world, courses, folder, cases):
        for case, (metrics, weights) in zip(cases, rank, strict=True):
            wanted, whole = alone[case[0]]
            for found, one in zip(metrics, wanted, strict=True):
                if abs(one.get("rewards/margins", 1.0)) < 1e-6:
                    # Before the first step policy and reference are equal but for rounding, which
                    # decides the pairs' order.
                    found, one = (x | {"rewards/accuracies": 0.0} for x in (found, one))
                assert found == pytest.approx(one, rel=2e-3, abs=2e-5), case
            for name, tensor in whole.items():
                # An Adam step moves a weight by up to lr = 1e-2, whatever its gradient's size.
                torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_two_ranks_write_the_reward_model_that_one_does(folder: str, tmp_path: Path) -> None:
    saved: list[dict[str, Tensor]] = []
    for world, parallel in ((1, {}), (2, {"fsdp": 2})):
        out = str(tmp_path / str(world))
        run_ranks(world, course, folder, ("reward_model", parallel), out)
        saved.append(AutoModelForSequenceClassification.from_pretrained(out).state_dict())
    assert saved[0].keys() == saved[1].keys()
    assert saved[0]["score.weight"].abs().sum() > 0
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-3, atol=5e-4)
