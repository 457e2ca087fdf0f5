"""Which dataflow an estimator runs on, and what each calls in which order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import training_batch

from engine.algorithms import advantages
from engine.batch import Batch, LazyBatch, Ready
from engine.config import AlgorithmConfig, RLConfig
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo, RequiredPasses
from engine.errors import ConfigError

PROMPTS = Batch({"group_ids": torch.arange(4)})


def scored(rows: int = 8, first: float = 0.0) -> Batch:
    """Four groups of two completions, as they are after scoring; all groups have signal."""
    batch = training_batch(rows)
    mask = batch["response_mask"]
    scores = torch.zeros_like(mask)
    scores[torch.arange(rows), mask.sum(1).long() - 1] = first + torch.arange(rows).float()
    return batch | {
        "rollout_log_probs": batch["old_log_probs"] - 0.1 * mask,
        "token_level_scores": scores,
        "reward_failed": torch.zeros(rows, dtype=torch.bool),
        "group_ids": torch.arange(rows) // 2,
        "ref_kl": mask * 0.5,
        "sum_pi_squared": mask * 0.3,
    }


class Role:
    """Answers each call with the fields it is asked for and records what it was given."""

    def __init__(self, name: str, calls: list[tuple[str, set[str]]], source: Batch) -> None:
        self.name, self.calls, self.source = name, calls, source

    def __getattr__(self, method: str) -> Any:
        rollout = ["input_ids", "attention_mask", "responses", "response_mask", "group_ids"]
        gives = {
            "generate": [*rollout, "rollout_log_probs"],
            "generate_greedy": [*rollout, "rollout_log_probs"],
            "score": ["token_level_scores", "reward_failed"],
            "values": ["values"],
            "full_kl": ["ref_kl"],
            "log_probs": ["ref_log_probs"]
            if self.name == "reference"
            else ["old_log_probs", "sum_pi_squared"],
        }

        def call(argument: Any) -> Ready:
            given = argument.resolve() if isinstance(argument, LazyBatch) else argument
            self.calls.append((f"{self.name}.{method}", set(given.names)))
            if method.startswith("update"):
                return Ready({f"{self.name}/done": 1.0})
            whole = self.source.select(gives[method])
            return Ready(whole if len(given) in (len(whole), 4) else whole.rows(range(len(given))))

        return call


class AllRoles:
    def __init__(self, source: Batch | None = None) -> None:
        self.calls: list[tuple[str, set[str]]] = []
        for name in ("actor", "rollout", "reference", "critic", "reward"):
            setattr(self, name, Role(name, self.calls, source or scored()))

    @property
    def order(self) -> list[str]:
        return [call for call, _ in self.calls]


def settings(**sections: Any) -> RLConfig:
    return RLConfig.model_validate(sections)


def algo_of(config: RLConfig, **options: Any) -> Algo:
    needs = RequiredPasses.of(config, choose_dataflow(config.algorithm))
    return Algo(config, needs, max_response_length=7, **options)


ACTOR_ONLY = {"use_kl_loss": False}
START = ["rollout.generate", "reward.score"]


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, [*START, "reference.log_probs", "actor.update"]),
        ({"actor": ACTOR_ONLY}, [*START, "actor.update"]),
        ({"actor": {"kl_loss_type": "full"}}, [*START, "actor.update"]),
        (
            {
                "actor": ACTOR_ONLY,
                "algorithm": {"use_kl_in_reward": True, "kl_penalty": "full"},
            },
            [*START, "reference.full_kl", "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY, "rollout": {"top_k": 5}},
            [*START, "actor.log_probs", "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY, "rollout": {"top_p": 0.9}},
            [*START, "actor.log_probs", "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY | {"old_log_probs": "rollout"}, "rollout": {"top_p": 0.9}},
            [*START, "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY | {"old_log_probs": "trainer"}},
            [*START, "actor.log_probs", "actor.update"],
        ),
        (
            {
                "actor": ACTOR_ONLY,
                "algorithm": {"rollout_correction": {"rollout_is": "token"}},
            },
            [*START, "actor.log_probs", "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY, "algorithm": {"adv_estimator": "optimal_token_baseline"}},
            [*START, "actor.log_probs", "actor.update"],
        ),
        (
            {"algorithm": {"adv_estimator": "gae"}},
            [*START, "critic.values", "reference.log_probs", "critic.update", "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY, "algorithm": {"adv_estimator": "remax"}},
            [
                "rollout.generate",
                "rollout.generate_greedy",
                "reward.score",
                "reward.score",
                "actor.update",
            ],
        ),
        (
            {"algorithm": {"dataflow": "online_dpo"}},
            [*START, "reference.log_probs", "actor.update_pairs"],
        ),
        (
            {"algorithm": {"dataflow": "online_dpo", "preference": {"loss": "simpo"}}},
            [*START, "actor.update_pairs"],
        ),
        (
            {"actor": ACTOR_ONLY, "algorithm": {"filter_groups": {"enable": True}}},
            [*START, "actor.update"],
        ),
        (
            {"actor": ACTOR_ONLY, "algorithm": {"adv_estimator": "rloo"}},
            [*START, "actor.update"],
        ),
    ],
)
def test_a_step_calls_what_its_settings_need_and_no_more(
    sections: dict[str, Any], wanted: list[str]
) -> None:
    config, roles = settings(**sections), AllRoles()
    dataflow = choose_dataflow(config.algorithm)
    algo = algo_of(config)
    result = dataflow.step(roles, PROMPTS, algo)
    assert roles.order == wanted
    called = {call.split(".")[0] for call in roles.order}
    started = algo.needs.roles(dataflow)
    # With kl_loss_type=full the actor itself asks the reference in its process.
    assert called <= started
    assert started - called <= ({"reference"} if "full" in str(sections) else set())
    assert [update.result() for update in result.updates][-1] == {"actor/done": 1.0}


def test_updates_get_what_the_passes_gave() -> None:
    config, roles = settings(algorithm={"adv_estimator": "gae"}), AllRoles()
    result = choose_dataflow(config.algorithm).step(roles, PROMPTS, algo_of(config))
    given = roles.calls[-1][1]
    assert {"advantages", "returns", "values", "ref_log_probs", "token_level_rewards"} <= given
    assert "old_log_probs" not in given
    assert "advantages" in result.batch.resolve()


@pytest.mark.parametrize("name", advantages.names())
def test_every_estimator_has_a_dataflow(name: str) -> None:
    needs = advantages.requires(name)
    special = {"gae": "ppo", "gae_turn": "ppo", "remax": "remax", "rloo": "rloo"}
    assert choose_dataflow(AlgorithmConfig(adv_estimator=name)).name == special.get(name, "grpo")
    assert ("values" in needs) == (name.startswith("gae"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataflow": "grpo", "adv_estimator": "remax"}, "needs what dataflow 'grpo' doesn't"),
        ({"dataflow": "remax", "adv_estimator": "gae"}, "a critic that gives values"),
        ({"dataflow": "grop"}, "algorithm.dataflow='grop' is unknown"),
        ({"dataflow": "nowhere:step"}, "can't be imported"),
        ({"dataflow": "engine.dataflows.recipes:DynamicSampling"}, "is not registered"),
    ],
)
def test_dataflows_that_can_t_run_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_dataflow(AlgorithmConfig.model_validate(changes))


def test_a_dataflow_from_outside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_flow.py").write_text(
        "from engine.dataflows import register_dataflow\n"
        "@register_dataflow('mine', roles={'rollout'})\n"
        "def step(roles, prompts, algo):\n"
        "    return 'stepped'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    dataflow = choose_dataflow(AlgorithmConfig(dataflow="my_flow:step"))
    assert dataflow.step(None, None, None) == "stepped"
    assert dataflow.roles == {"rollout"}
    assert choose_dataflow(AlgorithmConfig(dataflow="mine")) is dataflow
    sys.modules.pop("my_flow")
