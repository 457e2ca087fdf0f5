"""Preference pairs from files and from a learned reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import DataConfig, PairsConfig, RLConfig
from engine.errors import DataError
from engine.evaluation.results import Judged
from engine.preferences import by_reward_model, is_usable, read_preference_tables
from engine.rewards import Scorer


def write(path: Path, prompts: int) -> str:
    rows = [
        {"question": f"What is {i} plus {i + 1}?", "good": str(2 * i + 1), "bad": str(side)}
        for i in range(prompts)
        for side in (-1, -2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(path: str, size: int) -> PairsConfig:
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    return PairsConfig(path=path, columns=columns, validation_size=size)


def test_all_rows_of_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 20)
    found = read_preference_tables(config(path, 7), DataConfig(), "pairs", [], seed=0)
    assert (len(found.train), len(found.validation)) == (32, 8)
    sides = [
        {row[0]["content"] for row in one["prompt"]} for one in (found.train, found.validation)
    ]
    assert not sides[0] & sides[1]
    assert found.train["margin"].tolist() == [0.0] * 32


def test_prompts_of_a_test_set_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 10)
    test = [[{"role": "user", "content": "what is 3 plus 4"}]]
    found = read_preference_tables(config(path, 0), DataConfig(), "pairs", test, seed=0)
    assert len(found.train) == 18
    assert found.notes == ("2 rows have prompts of a test set, and are left out",)


def test_nothing_left_to_learn_from(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", 3)
    with pytest.raises(DataError, match=r"leaves no row to learn from: 6 rows, 0 of them"):
        read_preference_tables(config(path, 6), DataConfig(), "pairs", [], seed=0)


@pytest.mark.parametrize(
    "change",
    [{"failed": True}, {"truncated": True}, {"score": float("nan")}]
    + [{"text": text} for text in (" ", "a\0", "\ud83d")],
)
def test_failed_cut_and_empty_completions_are_left_out(change: dict[str, Any]) -> None:
    good = Judged("5", 2, False, True, 1.0, "5", "5", True, False)
    assert is_usable(good)
    assert not is_usable(replace(good, **change))


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
