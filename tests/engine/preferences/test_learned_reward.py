"""RL by a reward model: what the settings of a run become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import RLConfig
from engine.preferences import by_reward_model
from engine.rewards import Scorer

PPO = {"algorithm": {"adv_estimator": "gae"}}


def test_only_the_model_counts_and_the_critic_starts_from_it() -> None:
    found = by_reward_model(RLConfig.model_validate(PPO), "/rm")
    assert found.critic.model_path == "/rm"
    assert found.reward.name == "answer_match", "it says which completions are right"
    assert found.reward.components["reward_model"].options == {"model": "/rm"}
    assert found.reward.weights == {"answer": 0.0, "reward_model": 1.0}


def test_a_language_model_scores_by_its_log_prob(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    found = by_reward_model(RLConfig.model_validate(PPO), str(tmp_path))
    model = found.reward.components["reward_model"]
    assert (model.name, model.options) == ("likelihood", {"model": str(tmp_path)})
    assert found.critic.model_path == str(tmp_path)


def test_a_critic_of_its_own_stays_and_grpo_has_none() -> None:
    own = RLConfig.model_validate(PPO | {"critic": {"model_path": "/critic"}})
    assert by_reward_model(own, "/rm").critic.model_path == "/critic"
    assert by_reward_model(RLConfig(), "/rm").critic.model_path == ""


@pytest.mark.parametrize("name", ["answer_match", "answer_and_format"])
def test_the_weights_are_of_components_that_there_are(name: str) -> None:
    config = RLConfig.model_validate({"reward": {"name": name}})
    reward = by_reward_model(config, "/rm").reward
    scorer = Scorer(reward)
    assert scorer.components is not None
    weights = dict(zip(scorer.components, scorer.weights(scorer.components), strict=True))
    assert weights.pop("reward_model") == 1.0
    assert set(weights.values()) == {0.0}
    scorer.close()
