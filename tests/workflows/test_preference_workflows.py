"""The preference and agents workflows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import REPOSITORY, STAGES, Outcome, Place, settings

from engine.config import load_config
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
    assert first.stages == [
        *("dataset", "sft", "reward_audit", *once, *once),
        *("evaluation", "promotion"),
    ]
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
        *("dataset", "sft", "reward_audit", "pairs", "reward_model", "reward_model_promotion"),
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


AGENTS_WORKFLOW = str(REPOSITORY / "workflows" / "agents.py")


ALONE = str(REPOSITORY / "workflows" / "evaluate_only.py")


TINY: dict[str, Any] = {
    "data": {"sft_size": 256, "train_size": 64, "validation_size": 8, "test_size": 24},
    "sft": {"max_steps": 6, "train_batch_size": 32},
    "evaluate": {"samples": 2, "k": 2},
    "promote": {"bootstrap": True, "minimum_problems": 24},  # it learns next to nothing
}


OF_RL = {"total_training_steps": 2, "train_batch_size": 4, "placement": "local", "test_freq": 2}


def tiny(recipe: str, **environment: Any) -> str:
    """A shipped recipe in little, as `--config` takes it."""
    config = load_config(f"preset:{recipe}").model_dump(mode="json")
    for section, values in TINY.items():
        config[section] |= values
    config["rl"]["trainer"] |= OF_RL
    config["rl"]["rollout"]["agent"]["environment"] |= environment
    return json.dumps(config)


def run_agents(place: Place, config: str, *more: str) -> Outcome:
    return place.invoke("run", AGENTS_WORKFLOW, "agents", "--config", config, *more)


def episodes(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """What was measured of both models' episodes, by name."""
    folder = Path(outcome.summary["artifacts"]["evaluation"])
    found = json.loads((folder / "comparison.json").read_text())["episodes"]
    return {one["name"]: one for one in found}


def test_settings_without_episodes_are_refused(place: Place) -> None:
    outcome = run_agents(place, "{}")
    assert outcome.code == 1
    assert "rl.rollout.multi_turn.enable is false" in outcome.error


@pytest.mark.slow
def test_a_run_from_data_to_champion_and_what_runs_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own_games.py"
    source = (
        "from examples.guessing import GuessingEnvironment\n"
        "class Game(GuessingEnvironment):\n    pass\n"
    )
    own.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny("guessing_agent", name="own_games:Game")
    first = run_agents(place, config)
    assert first.code == 0, first.text
    assert first.stages == list(STAGES)
    assert set(episodes(first)) == {
        f"{what}, {how}" for what in ("turns", "return") for how in ("greedy", "sampled")
    }
    assert "Agents run" in first.out
    assert first.summary["promotion"]["promoted"]
    assert run_agents(place, config).stages == ["promotion"]
    alone = evaluated_alone(place, config, first, tmp_path / "copy")
    assert alone.stages == ["evaluation"]
    folder = Path(alone.out.strip().splitlines()[-1])
    found = json.loads((folder / "comparison.json").read_text())["episodes"]
    assert {one["name"]: one for one in found} == episodes(first)
    own.write_text(source + "# edited\n")
    edited = run_agents(place, config)
    assert edited.code == 0, edited.text
    assert edited.stages == ["rl", "evaluation", "promotion"]
    contents = [content_of(outcome) for outcome in (first, edited)]
    assert contents[0] != contents[1]
    assert all(contents)


def evaluated_alone(place: Place, config: str, trained: Outcome, copy: Path) -> Outcome:
    """What `evaluate_only` makes of a run's models, with a copy that nobody has evaluated."""
    models = trained.summary["artifacts"]
    ignored = shutil.ignore_patterns("manifest.json", "metrics.parquet")
    shutil.copytree(models["rl"], copy, ignore=ignored)
    asked = ("--config", config, "--baseline", models["sft"], "--candidate", str(copy))
    outcome = place.invoke("run", ALONE, "evaluate_only", *asked)
    assert outcome.code == 0, outcome.text
    return outcome


def content_of(outcome: Outcome) -> str:
    """The digest of the environment's code, as the policy's manifest has it."""
    manifest = json.loads((Path(outcome.summary["artifacts"]["rl"]) / "manifest.json").read_text())
    return str(manifest["config"]["rl"]["rollout"]["agent"]["named_content"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator_agent", "python_agent"])
def test_the_other_recipes_run(new_place: Callable[[], Place], name: str) -> None:
    outcome = run_agents(new_place(), tiny(name))
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)


def run_recipe(place: Place, name: str) -> Outcome:
    """A shipped recipe as a person runs it, on two cores."""
    outcome = place.pyflyte(
        *("run", AGENTS_WORKFLOW, "agents", "--config", f"preset:{name}"), timeout=1800
    )
    assert outcome.code == 0, outcome.text
    print(outcome.out)
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["guessing_agent", "openai_agent"])
def test_fewer_turns_are_needed_to_guess(place: Place, recipe: str) -> None:
    outcome = run_recipe(place, recipe)
    turns = episodes(outcome)["turns, greedy"]
    assert turns["change"]["high"] < -0.2
    assert outcome.summary["gain"] >= 0.2
    assert outcome.summary["promotion"]["promoted"]


@pytest.mark.slow
def test_the_calculator_is_called_and_answers_are_right(place: Place) -> None:
    outcome = run_recipe(place, "calculator_agent")
    called = episodes(outcome)["called a tool, greedy"]
    assert called["change"]["low"] > 0.2
    assert outcome.summary["gain"] >= 0.2
    assert outcome.summary["gain_interval"][0] > 0.1
    assert outcome.summary["promotion"]["promoted"]


@pytest.mark.slow
def test_programs_pass_their_tests(place: Place) -> None:
    outcome = run_recipe(place, "python_agent")
    assert outcome.summary["gain"] >= 0.15
    assert outcome.summary["gain_interval"][0] > 0.05
    assert outcome.summary["promotion"]["promoted"]
