"""Bad input: one sentence that names the fault and the way out, before training, and no debris."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import TINY, WORKFLOW, Outcome, Place, settings
from flytekit.core.base_task import PythonTask

from tasks import flytekit_setup

ROW = json.dumps({"question": "Tom has 2 pens and buys 3. How many?", "answer": "2+3=5\n#### 5"})


def assert_refused(outcome: Outcome, place: Place, *words: str) -> None:
    """Hold an outcome to the rules for bad input."""
    assert outcome.code != 0
    assert outcome.err.count("─ Error ─") == 1, outcome.text
    for word in words:
        assert word in outcome.error, outcome.error
    assert "Traceback" not in outcome.text
    assert "Value error" not in outcome.error
    assert not {"sft", "rl"} & set(outcome.stages)
    assert list((place.artifacts / ".staging").glob("*")) == []
    assert list((place.artifacts / "artifacts").glob("*/*")) == []
    if (place.root / "mlflow.db").exists():
        with sqlite3.connect(place.root / "mlflow.db") as database:
            open_runs = database.execute("select name from runs where status = 'RUNNING'")
            assert open_runs.fetchall() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rl": {"actor": {"lr": 1}}},
            ["unknown setting 'rl.actor.lr'", "did you mean rl.actor.optim.lr"],
        ),
        ({"rl": {"actor": {"optim": {"lr": -1}}}}, ["rl.actor.optim.lr=-1", "greater than 0"]),
        (
            {"data": {"source": "csv"}},
            ["data.source='csv'", "choose one of arithmetic, files, gsm8k"],
        ),
        (
            {"rl": {"algorithm": {"adv_estimator": "grop"}}},
            ["algorithm.adv_estimator='grop' is unknown", "did you mean 'grpo'"],
        ),
        (
            {"rl": {"actor": {"policy_loss": {"loss_mode": "vanila"}}}},
            ["policy_loss.loss_mode='vanila' is unknown", "did you mean 'vanilla'"],
        ),
        ({"rl": {"reward": {"name": "nice"}}}, ["reward.name='nice'", "answer_match"]),
        ({"rl": {"rollout": {"engine": "sglang"}}}, ["rollout.engine='sglang'", "native"]),
        (
            {"model": {"max_position_embeddings": 40}},
            ["the model's context of 40", "lower data.max_response_length"],
        ),
        ({"model": {"path": "/nowhere/model"}}, ["/nowhere/model", "does not exist"]),
        (
            {"rl": {"actor": {"parallel": {"tp": 3}}}},
            ["tp=3 does not divide the model's num_attention_heads"],
        ),
    ],
)
def test_a_wrong_setting(place: Place, change: dict[str, Any], words: list[str]) -> None:
    started = time.monotonic()
    outcome = place.run("--config", settings(change))
    assert_refused(outcome, place, *words)
    assert time.monotonic() - started < 30


def test_group_size_one_with_grpo(place: Place) -> None:
    outcome = place.run("--config", settings({"rl": {"rollout": {"n": 1}}}))
    assert outcome.code != 0
    assert "rollout.n=1" in outcome.error
    assert "set rollout.n to 2 or more" in outcome.error
    assert "Traceback" not in outcome.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rl: {rollout: [1\nn: 2", [", line 2", "not valid YAML"]),
        ("- 1\n- 2\n", ["config file", "holds a list, and no sections such as"]),
        ("seed: 2026-01-01\n", ["seed='2026-01-01'"]),
        ("just words\n", ["config file", "holds a str, and no sections such as"]),
    ],
)
def test_a_malformed_config_file(place: Place, content: str, words: list[str]) -> None:
    path = place.root / "bad.yaml"
    path.write_text(content)
    assert_refused(place.run("--config", str(path)), place, *words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"rl": ', ["config is not valid JSON", "line 1 column 8"]),
        ("missing.yaml", ["config file missing.yaml does not exist", "give the path"]),
        ("/", ["config file /", "can't be read", "directory"]),
    ],
)
def test_a_config_that_is_none(place: Place, value: str, words: list[str]) -> None:
    assert_refused(place.run("--config", value), place, *words)


def test_a_config_that_is_given_twice(place: Place) -> None:
    outcome = place.run("--config", "preset:ppo", "--config", settings())
    assert_refused(outcome, place, "--config is given 2 times", '{"preset": "ppo", "seed": 1}')


def gsm8k(folder: Path, train: str, test: str = ROW) -> Path:
    folder.mkdir()
    (folder / "train.jsonl").write_text(train)
    (folder / "test.jsonl").write_text(test)
    return folder


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (f'{ROW}\n{ROW}\n{{"question": \n{ROW}\n', ["train.jsonl, line 3", "not valid JSON"]),
        (f'{ROW}\n{{"question": "Why?"}}\n', ["train.jsonl, row 2", "'answer' is undefined"]),
        ("", ["train.jsonl has no rows", "at least one"]),
    ],
)
def test_a_broken_source(place: Place, train: str, words: list[str]) -> None:
    folder = gsm8k(place.root / "gsm8k", train)
    outcome = place.run("--source", "gsm8k", "--path", str(folder), "--config", settings())
    assert_refused(outcome, place, *words)


def test_a_missing_source(place: Place) -> None:
    outcome = place.run("--source", "gsm8k", "--path", "/nowhere", "--config", settings())
    assert_refused(outcome, place, "data.path='/nowhere' is no data file", "give a .jsonl")


def test_an_unknown_source(place: Place) -> None:
    outcome = place.run("--source", "csv", "--config", settings())
    assert_refused(outcome, place, "data.source='csv'")


def test_a_source_of_the_hub_without_it(place: Place) -> None:
    """In a process of its own, which reads the hub's address when it starts."""
    outcome = place.pyflyte(
        *("run", str(WORKFLOW), "rlhf", "--source", "gsm8k", "--config", settings()),
        variables={"HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    assert_refused(outcome, place, "'openai/gsm8k'", "check name")


def test_a_model_folder_without_weights(place: Place) -> None:
    folder = place.root / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    outcome = place.run("--model", str(folder), "--config", settings())
    assert_refused(outcome, place, str(folder.name), "has no weights", "save_pretrained")


def test_a_tokenizer_larger_than_the_vocabulary(
    place: Place, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("qwen2", vocabulary=100)
    outcome = place.run("--model", str(folder), "--config", settings())
    assert_refused(outcome, place, "the tokenizer has", "an embedding of 100", "use the tokenizer")


NOWHERE = ("--dataset", "/nowhere", "--policy", "/nowhere", "--evaluation", "/nowhere")


@pytest.mark.parametrize(
    ("module", "workflow", "inputs", "words"),
    [
        ("evaluate_only", "", ["--baseline", "/nowhere"], ["baseline='/nowhere' does not exist"]),
        ("evaluate_only", "", [], ["baseline is empty", "give models:/NAME@ALIAS"]),
        (
            "evaluate_only",
            "",
            ["--baseline", "MODEL", "--candidate", "models:/absent@champion"],
            ["models:/absent@champion"],
        ),
        (
            "evaluate_only",
            "",
            ["--baseline", "MODEL", "--candidate", "WEIGHTLESS"],
            ["candidate='", "has no weights", "save_pretrained"],
        ),
        ("preference", "make_pairs", ["--policy", "/nowhere"], ["policy='/nowhere' does not"]),
        *(
            ("preference", name, ["--preferences", "/nowhere"], ["pairs.path='/nowhere' does not"])
            for name in ("preference", "reward_model", "classic_rlhf")
        ),
        ("agents", "", ["--config", settings()], ["plays episodes", "rlhf.py"]),
        ("retraining", "", ["--kickoff", "2999-01-01"], ["is still to come", "in UTC"]),
        ("retraining", "", ["--kickoff", "2026-01-01"], ["has no champion", "rlhf"]),
        ("promote_only", "", NOWHERE, ["/nowhere"]),
        ("review", "", ["--artifact", "/nowhere"], ["/nowhere"]),
        ("rollback", "", ["--reason", "bad", "--model_name", "absent"], ["absent"]),
    ],
)
def test_wrong_inputs_of_the_other_workflows(
    place: Place,
    model_folder: Callable[..., Path],
    module: str,
    workflow: str,
    inputs: list[str],
    words: list[str],
) -> None:
    folders = {"MODEL": str(model_folder("qwen2")), "WEIGHTLESS": str(place.root / "model")}
    (place.root / "model").mkdir()
    (place.root / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    config = [] if module in ("agents", "review", "rollback") else ["--config", settings()]
    given = [folders.get(value, value) for value in inputs]
    path = WORKFLOW.with_name(f"{module}.py")
    outcome = place.invoke("run", str(path), workflow or module, *config, *given)
    assert outcome.code != 0
    assert outcome.err.count("─ Error ─") == 1, outcome.text
    for word in words:
        assert word in outcome.error, outcome.error
    assert "Traceback" not in outcome.text
    assert outcome.stages == []


@pytest.mark.parametrize(
    ("inputs", "change", "word"),
    [
        (("--model", "/nowhere"), {}, "/nowhere"),
        (("--profile", "huge"), {}, "huge"),
        (("--source", "files", "--path", "few.csv"), {}, "prompt"),
        (
            ("--source", "files", "--path", "few.csv"),
            {"data": {"columns": {"prompt": "question", "ground_truth": "answer"}}},
            "2 distinct training rows can't give a test split",
        ),
    ],
)
def test_a_dry_run_of_bad_input(
    place: Place,
    inputs: tuple[str, ...],
    change: dict[str, Any],
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure handler, which flytekit runs then, does not end it as one that succeeded."""
    # As at the start of a process with the variable.
    monkeypatch.setattr(PythonTask, "sandbox_execute", flytekit_setup._plan_alone)
    few = place.root / "few.csv"
    few.write_text("question,answer\n1+1=,2\n2+2=,4\n")
    given = [str(few) if value == few.name else value for value in inputs]
    outcome = place.run(*given, "--config", settings(change), HYBRIDFLYTE_DRY_RUN="1")
    assert_refused(outcome, place, word)
    assert "to do" not in outcome.out


def test_mlflow_unreachable(place: Place) -> None:
    """MLflow's own retries would make a minute of it."""
    started = time.monotonic()
    outcome = place.run("--config", settings(), MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert_refused(outcome, place, "http://127.0.0.1:9", "refused", "MLFLOW_TRACKING_URI")
    assert time.monotonic() - started < 60
    assert [folder.name for folder in place.artifacts.iterdir()] == ["checks"]  # that passed


@pytest.mark.slow
def test_ray_unreachable(place: Place) -> None:
    change = {"rl": {"trainer": {"placement": "ray"}}}
    # In a process of its own: another test may have left Ray running in this one.
    outcome = place.pyflyte(
        *("run", str(WORKFLOW), "rlhf", "--config", settings(change)),
        variables={"RAY_ADDRESS": "nonsense://127.0.0.1:9"},
    )
    assert outcome.code == 1
    assert "RAY_ADDRESS=nonsense://127.0.0.1:9" in outcome.error
    assert "Traceback" not in outcome.text
    assert list((place.artifacts / ".staging").glob("*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB, which the data set alone fills."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(place: Place, small_disk: Path) -> None:
    change = {"data": {"sft_size": 16 * TINY["data"]["sft_size"], "vocab_size": 1024}}
    outcome = place.run("--config", settings(change), HYBRIDFLYTE_HOME=str(small_disk))
    assert_refused(outcome, place, "no space left on the disk", "HYBRIDFLYTE_HOME")
    assert [path for path in small_disk.rglob("*") if path.is_file()] == []
