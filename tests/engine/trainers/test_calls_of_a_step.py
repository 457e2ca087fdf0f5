"""What a step's calls are answered with in each mode: by rollout that ran ahead, or by the group.

And steps that learn nothing, which rollout that runs ahead must not wait for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.batch import Batch, LazyBatch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo, RequiredPasses, StepResult
from engine.dataflows.recipes import DynamicSampling
from engine.errors import ConfigError
from engine.trainers.rl import RLTrainer
from engine.trainers.rollout_modes import SignalFilter
from engine.trainers.run_spec import RolloutSource, register_rollout_source

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(folder: Path, mode: str, steps: int, **sections: Any) -> RLTrainer:
    base: dict[str, Any] = {
        "rollout": {"n": 2},
        "trainer": {
            "mode": mode,
            "total_training_steps": steps,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 2,
            "step_timeout_s": 60.0,
        },
    }
    for name, content in sections.items():
        base[name] = base.get(name, {}) | content
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    config = RLConfig.model_validate(base)
    return RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_steps_without_a_pair_stop_nobody_and_age_nothing(tiny_folder: Path, mode: str) -> None:
    sections = {
        "algorithm": {"dataflow": "online_dpo"},
        "reward": {"name": "tiny_engine:always_one", "isolation": "none"},
        "trainer": {"delta_sync": mode != "sync"},
    }
    with trainer(tiny_folder, mode, steps=5, **sections) as run:
        run.fit()
        assert [row["preference/pairs"] for row in run.history] == [0.0] * 5
        behind = [row["staleness/max"] for row in run.history]
    assert max(behind) <= (0 if mode == "sync" else 1)


def test_a_refill_beside_a_sampler_is_of_the_prompts_that_it_asked_for(tiny_folder: Path) -> None:
    asked: list[list[str]] = []
    learned: list[Batch] = []
    sections = {
        "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
        "reward": {"name": "tiny_engine:sometimes_right", "isolation": "none"},
    }
    with trainer(tiny_folder, "one_step_off", steps=2, **sections) as run:
        step, more = run.dataflow.step, run.algo.more_prompts
        assert more is not None

        def noting(prompts: Batch) -> Batch:
            asked[-1] += [row[0]["content"] for row in prompts.columns["prompt"]]
            return prompts

        def watched(roles: Any, prompts: Batch, algo: Algo) -> StepResult:
            asked.append([])
            noting(prompts)
            result: StepResult = step(roles, prompts, algo)
            learned.append(result.batch.resolve())
            return result

        run.algo.more_prompts = lambda: noting(more())
        run.dataflow = replace(run.dataflow, step=watched)
        run.fit()
        assert [row["sampling/rollouts"] for row in run.history] == [3.0, 3.0]
    for mine, batch in zip(asked, learned, strict=True):
        assert len(mine) == 12
        for group, prompt in zip(batch["group_ids"], batch.columns["prompt"], strict=True):
            assert prompt[0]["content"] == mine[int(group)]
    last = learned[-1]  # its first four groups are of the sampler, one version behind
    versions = last["policy_version"].tolist()
    assert versions == [int(group >= 4) for group in last["group_ids"]]
    assert 1 in versions


def test_a_baseline_in_async_has_completions_and_scores_of_its_own(tiny_folder: Path) -> None:
    sections = {
        "algorithm": {"adv_estimator": "remax"},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    }
    with trainer(tiny_folder, "async", steps=2, **sections) as run:
        metrics = run.fit()
    assert metrics["actor/grad_norm"] > 0


@register_rollout_source("every_batch_twice")
class EveryBatchTwice(RolloutSource):
    """A source from outside the engine, as a user's plugin has it."""

    off_policy = True
    _batch: Batch | None = None

    def next_prompts(self) -> Batch:
        batch, self._batch = self._batch, None
        if batch is None:
            batch = self._batch = self.prompts.next_batch()
        return batch


def test_a_mode_of_ones_own_is_one_class(tiny_folder: Path) -> None:
    asked: list[list[str]] = []
    with trainer(tiny_folder, "every_batch_twice", steps=4) as run:
        step = run.dataflow.step

        def watched(roles: Any, prompts: Batch, algo: Algo) -> StepResult:
            asked.append([row[0]["content"] for row in prompts.columns["prompt"]])
            return step(roles, prompts, algo)

        run.dataflow = replace(run.dataflow, step=watched)
        metrics = run.fit()
    assert asked[0] == asked[1] != asked[2] == asked[3]
    assert "rollout_corr/rollout_is_mean" in metrics, "off-policy completions are weighted"


def test_an_unknown_mode_is_refused_with_those_that_there_are(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.mode='asink' is unknown.*async, .*sync"):
        trainer(tiny_folder, "asink", steps=1)


def keeps(metric: str, scores: list[float], lengths: list[int], failed: list[bool]) -> bool:
    """Whether asynchronous rollout keeps a group; the sync mode must decide the same."""
    config = RLConfig.model_validate(
        {
            "algorithm": {"filter_groups": {"enable": True, "metric": metric}},
            "reward": {"overlong_buffer": {"enable": True, "len": 4}},
            "trainer": {"mode": "async"},
        }
    )
    needs = RequiredPasses.of(config, choose_dataflow(config.algorithm))
    algo = Algo(config, needs, max_response_length=8)
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).float()
    on_last = torch.zeros_like(mask)
    on_last[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    group = Batch(
        {
            "group_ids": torch.zeros(len(scores), dtype=torch.long),
            "response_mask": mask,
            "token_level_scores": on_last,
            "reward_failed": torch.tensor(failed),
        }
    )
    kept = SignalFilter(algo).accepts(group)
    assert algo.metrics == {}
    sampling = DynamicSampling(algo, wanted=1)
    sampling.add(LazyBatch(group))
    sampling.batch()
    assert kept == (algo.metrics["sampling/groups_kept"] == 1)
    return kept


def test_async_keeps_the_groups_that_sync_keeps() -> None:
    well, one_failed = [False] * 3, [False, False, True]
    assert keeps("score", [0.0, 1.0, 1.0], [3, 3, 3], well)
    assert not keeps("score", [1.0, 1.0, 0.0], [3, 3, 3], one_failed)
    assert not keeps("score", [1.0, 1.0, 1.0], [3, 3, 8], well)
    assert keeps("reward", [1.0, 1.0, 1.0], [3, 3, 8], well)
