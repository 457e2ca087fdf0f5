"""`python -m engine.main_preference` and `main_reward_model`: from files to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_engine import write_tiny_folder
from transformers import AutoModelForCausalLM

from engine.cli.commands import main_preference, main_reward_model
from engine.cli.forms import PREFERENCE
from engine.cli.offline_run import held_out
from engine.cli.resolve import resolve_file
from engine.data.training_examples import PairExample
from engine.errors import ConfigError, DataError
from engine.rewards.model_based import reward_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with 20 pairs, the columns named otherwise."""
    rows = [{"q": f"{i}+1=", "good": str(i + 1), "bad": f"{i} or {i + 2}"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def arguments(place: Path, model: Path, section: str, *more: str) -> list[str]:
    return [
        f"data.train_files={place / 'pairs.jsonl'}",
        "data.columns={prompt: q, chosen: good, rejected: bad}",
        "data.val_size=4",
        f"model.path={model}",
        f"{section}.max_steps=3",
        f"{section}.train_batch_size=8",
        f"{section}.optim.lr=1e-3",
        f"{section}.threads=1",
        "run.logger=[console, file]",
        f"run.default_local_dir={place / 'out'}",
        *more,
    ]


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_preferences_from_files_to_a_folder(
    place: Path, model: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(place, model, "preference", f"preference.loss={loss}")
    assert main_preference.main(given) == 0
    said = capsys.readouterr().out
    examples = {"sigmoid": "16 examples, 4 held out", "kto": "36 examples, 4 held out"}[loss]
    assert f"preference: {loss} from {model}, {examples}, 3 steps of 8" in said
    assert "preference    3/3 · loss " in said
    assert "held-out loss" in said
    one, two = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (model, place / "out" / "step_3")
    )
    assert any(not torch.equal(one[name], two[name]) for name in one)
    rows = [json.loads(line) for line in (place / "out" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "preference/rewards/chosen" in rows[0]
    assert main_preference.main(given) == 0  # all of it is done
    assert "continues from" in capsys.readouterr().out


def test_a_reward_model_from_files(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_reward_model.main(arguments(place, model, "reward_model")) == 0
    said = capsys.readouterr().out
    assert "reward_model: Bradley-Terry from" in said
    assert "validation_accuracy_low" in said
    folder = str(place / "out" / "step_3")
    assert len(reward_model(["1+1="] * 2, ["2", "1 or 3"], model=folder)) == 2


def test_a_dry_run_checks_and_trains_nothing(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_preference.main([*arguments(place, model, "preference"), "--dry-run"]) == 0
    assert "16 examples, 4 held out, 3 steps of 8\npreference: dry run" in capsys.readouterr().out
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("preference.bta=1", "unknown key 'preference.bta'; did you mean preference.beta?"),
        ("preference.beta=0", "preference.beta=0: Input should be greater than 0"),
        ("preference.loss=dpoo", "dpoo"),
        ("preference.simpo_gamma=1.0", "preference.simpo_gamma=1.0 has no effect"),
        ("data.train_files=nothing.jsonl", "nothing.jsonl does not exist"),
        ("data.max_length=3", "20 of 20 examples are longer than 3 tokens, first row 1"),
        ("data.columns={prompt: q}", "row 1: there is no column 'chosen'"),
        ("model.path=nowhere/at/all", "nowhere/at/all"),
        ("data.val_size=20", "data.val_size=20 holds out all 20 examples"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_status_2(
    place: Path, model: Path, more: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*arguments(place, model, "preference"), more, "--dry-run"]
    assert main_preference.main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_a_setting_leaves_the_defaults_of_its_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preference:\n  optim: {lr: 1.0e-6, schedule: null}\n  beta: 0.3\n")
    found = resolve_file(PREFERENCE, file, ["preference.beta=0.2"]).config
    assert (found.preference.optim.lr, found.preference.optim.schedule) == (1e-6, "linear")
    assert found.preference.beta == 0.2
    assert found.run.experiment_name == "preference"
    with pytest.raises(ConfigError, match="argument 'beta' is not of the form key=value"):
        resolve_file(PREFERENCE, None, ["beta"])


def test_held_out_prompts_come_whole() -> None:
    rows = [PairExample([i // 3], [i], [i + 1]) for i in range(12)]
    train, apart = held_out(rows, 4, seed=0)
    assert len(apart) == 6
    assert sorted([*train, *apart], key=rows.index) == rows
    assert not {e.prompt_ids[0] for e in train} & {e.prompt_ids[0] for e in apart}
    assert held_out(rows, 0, seed=0) == (rows, [])
    with pytest.raises(DataError, match="holds out all 12 examples"):
        held_out(rows, 12, seed=0)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_reward_model.main(["--help"]) == 0
    said = capsys.readouterr().out
    for key in (
        "reward_model.center_rewards_coefficient = 0.0",
        "data.too_long = fail",
        "--dry-run",
    ):
        assert key in said
