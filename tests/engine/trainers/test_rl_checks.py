"""Settings of an RL run that make no sense are refused with the reason, in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.config import RLConfig
from engine.errors import EngineError
from engine.trainers.rl_checks import check_config

CORRECTION = {"rollout_correction": {"rollout_is": "token"}}
GDPO = {"adv_estimator": "gdpo"}
APART = {"roles": ["rollout"]}
PARTS = {"name": "answer_and_format"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"n": 1}}, r"rollout.n=1 with algorithm.adv_estimator=grpo.*2 or more"),
        (
            {"algorithm": {"dataflow": "online_dpo"}, "rollout": {"n": 1}},
            r"rollout.n=1 with algorithm.dataflow=online_dpo.*2 or more",
        ),
        (
            {"algorithm": {"dataflow": "online_dpo"}, "actor": {"ppo_mini_batch_size": 1}},
            r"ppo_mini_batch_size=1 with algorithm.dataflow=online_dpo.*pairs.*an even number",
        ),
        ({"algorithm": {"adv_estimator": "grp"}}, "unknown advantage estimator 'grp'"),
        ({"algorithm": {"adv_estimator": "remax", "dataflow": "grpo"}}, "one greedy rollout"),
        ({"algorithm": {"kl_penalty": "k9"}}, "KL estimator 'k9' is unknown"),
        ({"actor": {"kl_loss_type": "k9"}}, "KL estimator 'k9' is unknown"),
        ({"rollout": {"engine": "turbo"}}, "rollout.engine='turbo' is unknown"),
        ({"reward": {"name": "praise"}}, "reward.name='praise' is unknown"),
        ({"trainer": {"threads": (os.cpu_count() or 1) * 4 + 1}}, "trainer.threads="),
        ({"plugins": ["no_such_module"]}, "plugins: module 'no_such_module' can't be imported"),
        ({"actor": {"policy_loss": {"loss_mode": "gpg"}, "clip_ratio": 0.1}}, "no effect"),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "token-mean"}},
            "the method is defined with",
        ),
        (
            {"actor": {"old_log_probs": "rollout"}, "algorithm": CORRECTION},
            "actor.old_log_probs=rollout with algorithm.rollout_correction",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs": "token_k4"}}},
            "is not a criterion",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs_threshold": 2.0}}},
            "no effect without rollout_rs",
        ),
        ({"algorithm": GDPO}, "reward.name=answer_match has none"),
        ({"reward": {"weights": {"format": 2.0}}}, "components of reward.name=answer_match"),
        ({"reward": PARTS | {"weights": {"form": 2.0}}}, r"names \['form'\]"),
        ({"reward": {"clip": [1.0, 0.0]}}, "reward.clip=.* is empty"),
        ({"algorithm": {"dataflow": "distillation"}}, "set algorithm.teacher to a model folder"),
        (
            {"algorithm": {"dataflow": "distillation", "teacher": "/nowhere"}},
            "actor.use_kl_loss with algorithm.dataflow=distillation",
        ),
        (
            {
                "algorithm": {"dataflow": "distillation", "teacher": "/nowhere"},
                "actor": {"use_kl_loss": False},
            },
            "algorithm.teacher='/nowhere' does not exist",
        ),
        (
            {"trainer": {"mode": "async"}, "rollout": {"engine": "vllm"}},
            "trainer.mode=async with rollout.engine=vllm",
        ),
        ({"trainer": {"mode": "async"}, "rollout": {"parts": 2}}, "rollout.parts=2 needs"),
        (
            {"trainer": {"mode": "async"}, "actor": {"old_log_probs": "rollout"}},
            "actor.old_log_probs=rollout with trainer.mode=async",
        ),
        (
            {"trainer": {"pools": [{"roles": ["actor", "rollout"]}]}},
            r"trainer.pools places \['actor', 'rollout'\], but this run has",
        ),
        (
            {"trainer": {"pools": [{"roles": ["actor", "reference", "reward"]}, APART]}},
            "puts rollout apart from actor",
        ),
        ({"trainer": {"staleness": 2}}, "trainer.staleness=2 has no effect"),
        ({"trainer": {"rollout_threads": 2}}, "trainer.rollout_threads=2 has no effect"),
        # settings without effect
        ({"algorithm": {"teacher": "/some"}}, "algorithm.teacher=/some has no effect"),
        (
            {"actor": {"use_kl_loss": False, "kl_loss_coef": 0.1}},
            "actor.kl_loss_coef=0.1 has no effect without actor.use_kl_loss",
        ),
        (
            {"algorithm": {"kl_penalty": "k3"}},
            "algorithm.kl_penalty=k3 has no effect without algorithm.use_kl_in_reward",
        ),
        ({"algorithm": {"kl_ctrl": {"kl_coef": 0.5}}}, "algorithm.kl_ctrl has no effect"),
        (
            {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"horizon": 5}}},
            "algorithm.kl_ctrl.horizon=5 has no effect with algorithm.kl_ctrl.type=fixed",
        ),
        ({"critic": {"ppo_epochs": 3}}, "critic.ppo_epochs=3 has no effect.* no critic"),
        (
            {"algorithm": {"preference": {"beta": 0.5}}},
            "algorithm.preference.beta=0.5 has no effect",
        ),
        (
            {"algorithm": {"filter_groups": {"max_num_gen_batches": 3}}},
            "filter_groups.max_num_gen_batches=3 has no effect",
        ),
        (
            {"algorithm": {"filter_groups": {"enable": True}, "dataflow": "grpo"}},
            "filter_groups.enable has no effect with dataflow grpo; use dapo",
        ),
        (
            {"reward": {"overlong_buffer": {"penalty_factor": 3.0}}},
            "overlong_buffer.penalty_factor=3.0 has no effect",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_is_threshold": 3.0}}},
            "rollout_is_threshold=3.0 has no effect",
        ),
        (
            {"algorithm": GDPO, "reward": PARTS | {"whiten": True}},
            "reward.whiten=True has no effect with adv_estimator=gdpo",
        ),
        (
            {"algorithm": GDPO | {"use_kl_in_reward": True}, "reward": PARTS},
            "use_kl_in_reward=True has no effect with adv_estimator=gdpo",
        ),
        (
            {"algorithm": GDPO, "reward": PARTS | {"weights": {"format": 0.5}}},
            "gdpo_reward_weights",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_config(RLConfig.model_validate(changes))


@pytest.mark.parametrize(
    ("changes", "dataflow"),
    [
        ({}, "grpo"),
        ({"algorithm": {"adv_estimator": "gae"}, "critic": {"ppo_epochs": 3}}, "ppo"),
        ({"algorithm": {"adv_estimator": "remax"}, "rollout": {"n": 1}}, "remax"),
        ({"algorithm": {"filter_groups": {"enable": True}}}, "dapo"),
        ({"algorithm": {"dataflow": "dapo", "filter_groups": {"max_num_gen_batches": 2}}}, "dapo"),
        ({"algorithm": {"dataflow": "online_dpo", "preference": {"beta": 0.2}}}, "online_dpo"),
        ({"algorithm": GDPO, "reward": PARTS}, "grpo"),
        ({"algorithm": GDPO, "reward": {"name": "tiny_engine:digits_and_brevity"}}, "grpo"),
    ],
)
def test_accepted(changes: dict[str, Any], dataflow: str) -> None:
    assert check_config(RLConfig.model_validate(changes)).name == dataflow


def test_plugins_register_estimators_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_plugin.py").write_text(
        "from engine.algorithms.advantages import AdvantageOutputs, register_advantage, to_tokens\n"
        "@register_advantage('sign')\n"
        "def sign(inputs):\n"
        "    tokens = to_tokens(inputs.scores.sign(), inputs.response_mask)\n"
        "    return AdvantageOutputs(tokens, tokens)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"plugins": ["my_plugin"], "algorithm": {"adv_estimator": "sign"}}
    assert check_config(RLConfig.model_validate(changes)).name == "grpo"
