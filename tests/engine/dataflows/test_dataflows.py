"""The dataflows and their arithmetic."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows, training_batch

from engine.algorithms import advantages
from engine.algorithms.correction import correct_rollout
from engine.algorithms.masked import masked_whiten
from engine.batch import Batch, LazyBatch, Ready
from engine.config import AlgorithmConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo, RequiredPasses
from engine.dataflows.recipes import DynamicSampling, preference_pairs
from engine.errors import ConfigError
from engine.trainers.rl import RLTrainer


def advantages_of(batch: Batch, **sections: Any) -> Batch:
    return algo_of(settings(**sections)).advantages(LazyBatch(batch))


NO_STD = {"norm_adv_by_std_in_grpo": False}


def test_advantages_by_hand() -> None:
    batch = scored()
    out = advantages_of(batch, algorithm=NO_STD)
    sign = torch.tensor([-0.5, 0.5] * 4)[:, None]
    torch.testing.assert_close(out["advantages"], sign * batch["response_mask"])
    assert torch.equal(out["token_level_rewards"], batch["token_level_scores"])
    assert torch.equal(out["response_mask"], batch["response_mask"])


@pytest.mark.parametrize("old", ["old_log_probs", "rollout_log_probs"])
def test_kl_in_the_reward(old: str) -> None:
    batch = scored()
    if old == "rollout_log_probs":
        batch = batch.select([n for n in batch.names if n != "old_log_probs"])
    control = {"type": "adaptive", "kl_coef": 0.3, "target_kl": 100.0, "horizon": 80}
    algo = algo_of(settings(algorithm={"use_kl_in_reward": True, "kl_ctrl": control}))
    out = algo.advantages(LazyBatch(batch))
    penalty = 0.3 * (batch[old] - batch["ref_log_probs"]) * batch["response_mask"]
    torch.testing.assert_close(out["token_level_rewards"], batch["token_level_scores"] - penalty)
    assert algo.kl_control.value == pytest.approx(0.3 * (1 - 0.2 * 8 / 80))
    assert algo.take_metrics()["reward/kl_coef"] == 0.3
    assert algo.take_metrics() == {}


def test_exact_kl_in_the_reward() -> None:
    batch = scored()
    out = advantages_of(
        batch,
        algorithm={"use_kl_in_reward": True, "kl_penalty": "full", "kl_ctrl": {"kl_coef": 0.2}},
    )
    torch.testing.assert_close(
        out["token_level_rewards"], batch["token_level_scores"] - 0.2 * batch["ref_kl"]
    )


def test_shaped_rewards() -> None:
    batch = scored(8, first=-2.0)  # -2 .. 5
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0}
    out = advantages_of(batch, reward={"clip": (-1.0, 3.0), "overlong_buffer": buffer})
    lengths = batch["response_mask"].sum(1)
    wanted = torch.arange(-2.0, 6.0).clamp(-1, 3) - ((lengths - 3) / 4 * 2.0).clamp(min=0)
    torch.testing.assert_close(out["token_level_rewards"].sum(1), wanted)
    last = lengths.long() - 1
    torch.testing.assert_close(out["token_level_rewards"][torch.arange(8), last], wanted)


def test_whitened_rewards_keep_their_mean() -> None:
    batch = scored()
    out = advantages_of(batch, reward={"whiten": True})["token_level_rewards"]
    wanted = masked_whiten(batch["token_level_scores"], batch["response_mask"], shift_mean=False)
    torch.testing.assert_close(out, wanted * batch["response_mask"])


def test_rows_without_a_reward_teach_nothing_and_leave_their_group_s_statistics() -> None:
    batch = scored()
    batch = batch | {"group_ids": torch.zeros(8, dtype=torch.long)}
    failed = torch.zeros(8, dtype=torch.bool)
    failed[3] = True
    out = advantages_of(batch | {"reward_failed": failed}, algorithm=NO_STD)
    assert not out["response_mask"][3].any()
    assert not out["advantages"][3].any()
    others = advantages_of(batch.rows(~failed), algorithm=NO_STD)
    assert torch.equal(out["advantages"][~failed], others["advantages"])


def test_truncated_rows_are_not_learned_from_and_their_rewards_count() -> None:
    batch = scored() | {"truncated": torch.arange(8) == 3}
    plain = advantages_of(batch, algorithm=NO_STD)
    out = advantages_of(batch, algorithm=NO_STD | {"mask_truncated": True})
    assert not out["response_mask"][3].any()
    assert not out["advantages"][3].any()
    others = batch["truncated"].logical_not()
    for name in ("advantages", "response_mask", "returns"):
        assert torch.equal(out[name][others], plain[name][others])
    assert torch.equal(out["token_level_rewards"], plain["token_level_rewards"])
    pairs = {"algorithm": {"dataflow": "online_dpo", "mask_truncated": True}}
    algo = algo_of(settings(**pairs))
    groups = torch.zeros(8, dtype=torch.long)
    best = int(batch["token_level_scores"].sum(1).argmax())
    cut = batch | {"group_ids": groups, "truncated": torch.arange(8) == best}
    chosen = preference_pairs(LazyBatch(cut), algo)
    assert not chosen["truncated"].any()


def test_rejection_edits_the_mask_but_not_the_rewards_that_count() -> None:
    batch = scored()
    gap = torch.zeros_like(batch["response_mask"])
    gap[0] = 5.0  # the whole first completion was sampled by quite another policy
    batch = batch | {"rollout_log_probs": batch["old_log_probs"] - gap * batch["response_mask"]}
    correction = {
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.5_2.0",
    }
    algo = algo_of(settings(algorithm=NO_STD | {"rollout_correction": correction}))
    out = algo.advantages(LazyBatch(batch))
    direct = correct_rollout(
        batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"], **correction
    )
    assert direct.weights is not None
    assert not out["response_mask"][0].any()
    assert torch.equal(out["response_mask"], direct.response_mask)
    assert torch.equal(out["rollout_is_weights"], direct.weights)
    assert not out["advantages"][0].any()
    # Row 1 is still compared with row 0, whose reward is as real as before.
    torch.testing.assert_close(out["advantages"][1], 0.5 * batch["response_mask"][1])
    metrics = algo.take_metrics()
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 8)
    assert metrics["rollout_corr/k3_kl"] > 0


def test_what_a_loss_prepares_sees_the_whole_batch() -> None:
    sections = {"actor": {"policy_loss": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.3}}}
    batch = scored()
    out = advantages_of(batch, **sections)
    tokens = int(batch["response_mask"].sum())
    assert int(out["cov_selected"].sum()) == int(0.3 * tokens)
    assert not out["cov_selected"][~batch["response_mask"].bool()].any()


def test_baselines_go_to_their_prompt_s_rows() -> None:
    batch, greedy = scored(), scored(4, first=10.0)
    greedy = greedy | {"group_ids": torch.tensor([2, 0, 3, 1])}
    out = algo_of(settings(algorithm={"adv_estimator": "remax"})).baseline(
        LazyBatch(batch), LazyBatch(greedy)
    )
    assert out["baseline_rewards"].tolist() == [11, 11, 13, 13, 10, 10, 12, 12]


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


DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.usefixtures("one_thread")
def test_best_of(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "programming-model.md").read_text()
    source = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "best_of" in b)
    assert len([line for line in source.split("@register")[1].splitlines() if line.strip()]) <= 10
    (tmp_path / "best_of.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RLConfig.model_validate(
        {
            "algorithm": {"dataflow": "best_of:best_of"},
            "actor": {"policy_loss": {"loss_mode": "reinforce"}, "optim": {"lr": 1e-2}},
            "rollout": {"n": 8},
            "reward": {"name": "tiny_engine:sometimes_right", "isolation": "none"},
            "trainer": {
                "total_training_steps": 3,
                "train_batch_size": 4,
                "placement": "local",
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    with RLTrainer(tiny_folder, config, loader, max_response_length=6, max_model_len=40) as trainer:
        metrics = trainer.fit()
    assert metrics["actor/grad_norm"] > 0
    assert 0 < metrics["reward/mean"] < 1
