"""Which dataflow an estimator runs on, what it calls in which order, and its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engine import training_batch

from engine.algorithms import advantages
from engine.batch import Batch
from engine.config import AlgorithmConfig
from engine.controller.futures import LazyBatch, Ready
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo
from engine.errors import ConfigError

PROMPTS = Batch({"group_ids": torch.arange(4)})


def scored(rows: int = 8) -> Batch:
    """Four groups of two completions, as they are after scoring."""
    batch = training_batch(rows)
    mask = batch["response_mask"]
    scores = torch.zeros_like(mask)
    scores[torch.arange(rows), mask.sum(1).long() - 1] = torch.arange(rows).float()
    return batch | {"token_level_scores": scores, "group_ids": torch.arange(rows) // 2}


class Role:
    """Answers each call with the fields it is asked for and records what it was given."""

    def __init__(self, name: str, calls: list[tuple[str, set[str]]], source: Batch) -> None:
        self.name, self.calls, self.source = name, calls, source

    def __getattr__(self, method: str) -> Any:
        gives = {
            "generate": ["input_ids", "attention_mask", "responses", "response_mask", "group_ids"],
            "score": ["token_level_scores"],
            "values": ["values"],
            "log_probs": ["ref_log_probs" if self.name == "reference" else "old_log_probs"],
        }

        def call(argument: Any) -> Ready:
            given = argument.resolve() if isinstance(argument, LazyBatch) else argument
            self.calls.append((f"{self.name}.{method}", set(given.names)))
            if method == "update":
                return Ready({f"{self.name}/done": 1.0})
            return Ready(self.source.select(gives[method]))

        return call


class AllRoles:
    def __init__(self) -> None:
        self.calls: list[tuple[str, set[str]]] = []
        for name in ("actor", "rollout", "reference", "critic", "reward"):
            setattr(self, name, Role(name, self.calls, scored()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_a_step_calls_its_roles_and_hands_on_what_they_gave(name: str, recompute: bool) -> None:
    roles = AllRoles()
    dataflow = choose_dataflow(name)
    algo = Algo(AlgorithmConfig(adv_estimator=name), recompute_old_log_probs=recompute)
    result = dataflow.step(roles, PROMPTS, algo)
    order = [call for call, _ in roles.calls]
    wanted = ["rollout.generate", "reward.score", "reference.log_probs"]
    wanted += ["critic.values"] if name == "gae" else []
    wanted += ["actor.log_probs"] if recompute else []
    wanted += ["critic.update"] if name == "gae" else []
    assert order == [*wanted, "actor.update"]
    assert {call.split(".")[0] for call in order} == dataflow.roles
    given = roles.calls[-1][1]
    assert {"advantages", "returns", "ref_log_probs", "token_level_rewards"} <= given
    assert ("old_log_probs" in given) == recompute
    assert ("values" in given) == (name == "gae")
    assert [update.result() for update in result.updates][-1] == {"actor/done": 1.0}
    assert "advantages" in result.batch.resolve()


@pytest.mark.parametrize("name", advantages.names())
def test_every_estimator_has_a_dataflow_or_is_refused(name: str) -> None:
    needs = advantages.requires(name)
    if needs - {"values"}:
        with pytest.raises(ConfigError, match=f"adv_estimator={name} needs"):
            choose_dataflow(name)
    else:
        assert choose_dataflow(name).name == ("ppo" if "values" in needs else "grpo")


def test_advantages_by_hand() -> None:
    batch = scored()
    out = Algo(AlgorithmConfig(norm_adv_by_std_in_grpo=False)).advantages(LazyBatch(batch))
    sign = torch.tensor([-0.5, 0.5] * 4)[:, None]
    torch.testing.assert_close(out["advantages"], sign * batch["response_mask"])
    assert torch.equal(out["token_level_rewards"], batch["token_level_scores"])


@pytest.mark.parametrize("old", ["old_log_probs", "rollout_log_probs"])
def test_kl_in_the_reward(old: str) -> None:
    batch = scored()
    if old == "rollout_log_probs":
        batch = batch.select([n for n in batch.names if n != "old_log_probs"])
    settings = AlgorithmConfig.model_validate(
        {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.3, "target_kl": 100.0, "horizon": 80},
        }
    )
    algo = Algo(settings)
    out = algo.advantages(LazyBatch(batch))
    penalty = 0.3 * (batch[old] - batch["ref_log_probs"]) * batch["response_mask"]
    torch.testing.assert_close(out["token_level_rewards"], batch["token_level_scores"] - penalty)
    assert algo.kl_control.value == pytest.approx(0.3 * (1 - 0.2 * 8 / 80))
