"""The arithmetic between rollout and update: shaping, KL, correction, masks; by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_dataflow_steps import algo_of, scored, settings

from engine.algorithms.correction import correct_rollout
from engine.algorithms.masked import masked_whiten
from engine.batch import Batch, LazyBatch


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
