"""The workflows of preferences on a tiny model: stages, caching, lineage, over-optimisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flyte_runs import REPOSITORY, Outcome, Place, settings

from engine.storage.artifacts import Manifest, read_manifest

FILE = str(REPOSITORY / "workflows" / "preference.py")
# Of a model that solves nothing: lengths differ, so there are pairs.
PREFERENCES: dict[str, Any] = {
    "sft": {"max_steps": 60},
    "pairs": {"n": 4, "prompts": 24, "reward": {"name": "cosine_length"}},
    "preference": {"max_steps": 2},
    "reward_model": {"max_steps": 2},
}
PPO: dict[str, Any] = {
    "rl": {
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "actor": {"use_kl_loss": False},
        "rollout": {"n": 1},
    }
}


def run(place: Place, workflow: str, *changes: dict[str, Any]) -> Outcome:
    outcome = place.invoke("run", FILE, workflow, "--config", settings(PREFERENCES, *changes))
    assert outcome.code == 0, outcome.text
    return outcome


def artifact(outcome: Outcome, name: str) -> Manifest:
    return read_manifest(Path(outcome.summary["artifacts"][name]))


def parents(manifest: Manifest) -> dict[str, str]:
    return {parent.name: parent.digest for parent in manifest.parents}


def test_help_lists_the_workflows_and_their_inputs(place: Place) -> None:
    listed = place.invoke("run", FILE).text
    for name in ("preference", "reward_model", "classic_rlhf", "make_pairs"):
        assert name in listed
    said = " ".join(place.invoke("run", FILE, "classic_rlhf", "--help").text.split())
    assert "Pairs: file, folder" in said
    assert "rl.reward is the true reward" in said
    assert "$defs" not in said  # the JSON schema of all settings


@pytest.mark.slow
def test_two_rounds_and_another_loss(place: Place) -> None:
    two = {"pairs": {"rounds": 2}}
    first = run(place, "preference", two)
    once = ["pairs", "reference", "preference"]
    assert first.stages == ["dataset", "sft", *once, *once, "evaluation", "promotion"]
    policy, pairs = artifact(first, "rl"), artifact(first, "pairs")
    assert policy.kind == "preference"
    warm_start = artifact(first, "sft").digest
    assert parents(policy)["pairs"] == pairs.digest
    before = parents(policy)["policy"]
    assert before == parents(pairs)["policy"] != warm_start, "written by the round before"
    assert first.summary["trained_by"] == "preference"
    assert "preference model" in (Path(first.summary["report"])).read_text()

    again = run(place, "preference", two)
    assert again.stages == ["promotion"]
    ipo = run(place, "preference", {"preference": {"loss": "ipo"}})
    assert ipo.stages == ["preference", "evaluation", "promotion"], "the reference is shared"


@pytest.mark.slow
def test_classic_rlhf_and_a_reward_model_of_the_same_pairs(place: Place) -> None:
    done = run(place, "classic_rlhf", PPO)
    assert done.stages == [
        *("dataset", "sft", "pairs", "reward_model", "reward_model_promotion"),
        *("rl", "evaluation", "promotion"),
    ]
    policy = artifact(done, "rl")
    assert parents(policy)["reward_model"] == artifact(done, "reward_model").digest
    assert policy.metrics["overoptimisation/kl_last"] >= 0
    assert "Over-optimisation" in Path(done.summary["report"]).read_text()
    assert "over-optimisation: the true reward" in done.out

    alone = run(place, "reward_model")
    assert alone.stages == ["reward_model_promotion"], "which is never cached"
    assert "hybridflyte-reward-model version 1" in alone.out
