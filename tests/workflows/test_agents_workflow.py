"""The workflow `agents`: its stages, its cache, its gate, and the shipped recipes that learn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import REPOSITORY, STAGES, Outcome, Place

from engine.config import load_config

FILE = str(REPOSITORY / "workflows" / "agents.py")
ALONE = str(REPOSITORY / "workflows" / "evaluate_only.py")

TINY: dict[str, Any] = {
    "data": {"sft_size": 256, "train_size": 64, "validation_size": 8, "test_size": 24},
    "sft": {"max_steps": 6, "train_batch_size": 32},
    "evaluate": {"samples": 2, "k": 2, "bootstrap_samples": 200},
    "promote": {"bootstrap": True},  # it learns next to nothing
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


def run(place: Place, config: str, *more: str) -> Outcome:
    return place.invoke("run", FILE, "agents", "--config", config, *more)


def episodes(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """What was measured of both models' episodes, by name."""
    folder = Path(outcome.summary["artifacts"]["evaluation"])
    found = json.loads((folder / "comparison.json").read_text())["episodes"]
    return {one["name"]: one for one in found}


def test_settings_without_episodes_are_refused(place: Place) -> None:
    outcome = run(place, "{}")
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
    first = run(place, config)
    assert first.code == 0, first.text
    assert first.stages == list(STAGES)
    assert set(episodes(first)) == {
        f"{what}, {how}" for what in ("turns", "return") for how in ("greedy", "sampled")
    }
    assert "Agents run" in first.out
    assert first.summary["promotion"]["promoted"]
    assert run(place, config).stages == ["promotion"]
    alone = evaluated_alone(place, config, first, tmp_path / "copy")
    assert alone.stages == ["evaluation"]
    folder = Path(alone.out.strip().splitlines()[-1])
    found = json.loads((folder / "comparison.json").read_text())["episodes"]
    assert {one["name"]: one for one in found} == episodes(first)
    own.write_text(source + "# edited\n")
    edited = run(place, config)
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
    outcome = run(new_place(), tiny(name))
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)


def run_recipe(place: Place, name: str) -> Outcome:
    """A shipped recipe as a person runs it, on two cores."""
    outcome = place.pyflyte(*("run", FILE, "agents", "--config", f"preset:{name}"), timeout=1800)
    assert outcome.code == 0, outcome.text
    print(outcome.out)
    return outcome


@pytest.mark.slow
def test_fewer_turns_are_needed_to_guess(place: Place) -> None:
    outcome = run_recipe(place, "guessing_agent")
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
