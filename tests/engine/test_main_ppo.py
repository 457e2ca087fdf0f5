"""`python -m engine.main_ppo`: whole runs on a tiny model, exit statuses, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from tiny_engine import arithmetic_rows
from tracker_files import tensorboard_points
from transformers import AutoModelForCausalLM

from engine.cli.commands.main_ppo import main
from engine.data.tokenizer import load_tokenizer
from engine.samples.sample_files import SampleFolder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with train.parquet (24 rows), val.jsonl (5 rows), and a reward of verl's kind."""
    rows = [{**row, "extra_info": {"index": i}} for i, row in enumerate(arithmetic_rows(24))]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    (tmp_path / "digits.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
    )
    return tmp_path


def arguments(place: Path, model: Path, *more: str) -> list[str]:
    return [
        f"data.train_files={place / 'train.parquet'}",
        f"data.val_files={place / 'val.jsonl'}",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={place / 'digits.py'}",
        "rl.reward.isolation=none",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={place / 'out'}",
        "trainer.placement=local",
        "trainer.threads=1",
        *more,
    ]


SAMPLES = ("train_000001", "train_000003", "validation_000000", "validation_000002")
SAMPLES += ("validation_000003",)


def test_a_run_reports_validates_saves_and_records(
    place: Path,
    tiny_folder: Path,
    mlflow_store: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{shutil.copy(mlflow_store, place / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("WANDB_MODE", "offline")
    more = (
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.logger=['console','jsonl','mlflow','tensorboard','wandb']",
        "trainer.project_name=ops",
        "trainer.experiment_name=tiny",
        "trainer.timeline_steps=2",
        "rl.reward.isolation=process",
    )
    assert main(arguments(place, tiny_folder, *more)) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^rl +(\d)/3 · reward \d\.\d+", out, re.M) == ["1", "2", "3"]
    assert "rl: validates 5 prompts before training (trainer.val_before_train)\n" in out
    assert len(re.findall(r"validation \d", out)) == 3  # before training, after steps 2 and 3
    lines = [json.loads(x) for x in (place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["validation/reward" in line for line in lines] == [True, False, True, True]
    rewards = [line["reward/mean"] for line in lines[1:]]
    assert f"reward      {rewards[0]:.3f} → {rewards[-1]:.3f}" in out
    assert f"model       {place / 'out' / 'step_3'}" in out
    # Two optimizer steps a step, as ppo_mini_batch_size=2 of 4 prompts says: the first one is off
    # by then, so that clipping and KL have something to see.
    assert lines[1]["actor/kl"] != 0.0
    assert sorted(p.name for p in (place / "out").iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "rollouts",
        "step_2",
        "step_3",
        "tensorboard",
        "timeline.json",
        "wandb",
    ]
    assert tensorboard_points(place / "out" / "tensorboard", "reward/mean") == [
        (step, pytest.approx(reward)) for step, reward in enumerate(rewards, 1)
    ]
    assert len(list((place / "out" / "wandb").glob("offline-run-*/*.wandb"))) == 1
    samples = sorted(p.name for p in (place / "out" / "rollouts").iterdir())
    assert samples == ["rollouts.html", *(f"{name}.parquet" for name in SAMPLES)]
    events = json.loads((place / "out" / "timeline.json").read_text())["traceEvents"]
    updates = [e for e in events if e["name"] == "actor.update" and e["ph"] == "X"]
    assert [event["args"]["step"] for event in updates] == [1, 2]
    start = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    end = AutoModelForCausalLM.from_pretrained(place / "out" / "step_3").state_dict()
    assert start.keys() == end.keys()
    assert not all(torch.equal(start[key], end[key]) for key in end)
    assert len(load_tokenizer(place / "out" / "step_3")) == len(load_tokenizer(tiny_folder))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ops")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "tiny"
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [1, 2, 3]
    uploaded = client.list_artifacts(run.info.run_id, "rollouts")
    assert sorted(file.path for file in uploaded) == [f"rollouts/{name}" for name in samples]
    rows = pd.read_parquet(place / "out" / "rollouts" / "train_000003.parquet")
    assert len(rows) == 16, "all of a step this small"
    assert rows["reward"].mean() == pytest.approx(rewards[-1])
    assert all(
        len(a) == len(t) > 0 for a, t in zip(rows["advantages"], rows["tokens"], strict=True)
    )


def test_unseen_data_of_two_columns_trains_with_one_command_line(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{n}+1=,{n + 1}\n" for n in range(8))
    (place / "sums.csv").write_text(f"question,answer\n{rows}9+9=\n")
    command = [
        f"data.train_files={place / 'sums.csv'}",
        "data.columns={prompt: question, ground_truth: answer}",
        "data.bad_rows=drop",
        "data.train_batch_size=4",
        "data.max_response_length=4",
        "rl.reward.name=exact_match",
        f"actor_rollout_ref.model.path={tiny_folder}",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={place / 'out'}",
        "trainer.placement=local",
        "trainer.threads=1",
    ]
    assert main([*command, "--dry-run"]) == 0
    assert "sums.csv: 1 of 9 rows are bad and left out (row 9)" in capsys.readouterr().out
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "sums.csv: 1 of 9 rows are bad and left out (row 9)" in out
    assert re.search(r"^rl +1/1 · reward \d\.\d+", out, re.M)
    assert (place / "out" / "step_1" / "model.safetensors").is_file()


def test_adapters_alone_are_trained(place: Path, tiny_folder: Path) -> None:
    lora = [
        f"actor_rollout_ref.model.{setting}"
        for setting in ("lora_rank=4", "lora_alpha=8", "target_modules=[q_proj,v_proj]")
    ]
    assert main(arguments(place, tiny_folder, "trainer.total_training_steps=1", *lora)) == 0
    dry_run = arguments(place, tiny_folder, *lora, "--dry-run")
    assert main(dry_run) == 0, "the adapters of a checkpoint are those of this run"
    saved = place / "out" / "step_1"
    adapter = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    end = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert changed
    assert all("q_proj.weight" in name or "v_proj.weight" in name for name in changed)


def test_the_same_command_again_goes_on_where_it_ended(
    place: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = arguments(place, tiny_folder, "trainer.logger=['console','file']")
    assert main(parts) == 0
    capsys.readouterr()
    assert main([*parts, "trainer.total_training_steps=4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"continues from .*checkpoints/step_2, step 2", out)
    other = [*parts, "algorithm.adv_estimator=rloo", "--dry-run"]
    assert main(other) == 1
    assert "other settings: algorithm.adv_estimator is 'grpo' there" in capsys.readouterr().err
    assert re.findall(r"^rl +(\d)/4", out, re.M) == ["3", "4"]
    lines = (place / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    folder = SampleFolder(place / "out" / "rollouts")
    assert [name.step for name in folder.names() if name.split == "train"] == [1, 2, 4]
    rows = [row for name in folder.names() for row in folder.read(name)[1]]
    sampled = [row["step"] for row in rows if "final/step" not in row]
    assert sampled == [1, 2, 3, 4]
    assert main([*parts, "trainer.total_training_steps=4"]) == 0
    assert "all 4 steps are done already; nothing to train" in caplog.text
    assert main([*parts, "actor_rollout_ref.rollout.temperature=0.7"]) != 0
    assert "written under other settings" in capsys.readouterr().err
    shutil.move(place / "out" / "step_4", place / "resumed")
    assert main([*parts, "trainer.total_training_steps=4", "trainer.resume_mode=disable"]) == 0
    assert re.findall(r"^rl +(\d)/4", capsys.readouterr().out, re.M) == ["1", "2", "3", "4"]
    names = ("out/step_4/model.safetensors", "resumed/model.safetensors")
    first, second = ((place / name).read_bytes() for name in names)
    assert first == second, "in two parts as in one"


def test_a_dry_run_finds_what_a_run_could_not_resume_from(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other settings, rows and weights, of another shape or not, as the run itself would."""
    parts = arguments(place, tiny_folder, "trainer.total_training_steps=1")
    assert main(parts) == 0
    assert main([*parts, "--dry-run"]) == 0
    assert re.search(
        r"cached +step 1 of 1 is in .*; 0 steps are to be done", capsys.readouterr().out
    )
    other = Path(shutil.copytree(tiny_folder, place / "other"))
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(other)
    rows = pd.read_parquet(place / "train.parquet")
    rows[:-1].to_parquet(place / "fewer.parquet")
    fewer = f"data.train_files={place / 'fewer.parquet'}"
    wider = place / "wider"
    shutil.copytree(tiny_folder, wider)
    sizes = model.config.to_dict() | {"intermediate_size": 2 * model.config.intermediate_size}
    AutoModelForCausalLM.from_config(type(model.config)(**sizes)).save_pretrained(wider)
    for change, sentence in (
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator is 'grpo' there"),
        (fewer, "the saved loader state is of other data: rows is"),
        (f"actor_rollout_ref.model.path={other}", "training began with other weights than those"),
        (
            f"actor_rollout_ref.model.path={wider}",
            "checkpoint is of another model: 'model.layers.0",
        ),
    ):
        assert main([*parts, change, "--dry-run"]) != 0, change
        planned = capsys.readouterr().err
        assert sentence in planned
        assert main([*parts, change]) != 0, change
        assert sentence in capsys.readouterr().err


def test_a_resumed_run_goes_on_in_its_mlflow_run(
    place: Path, tiny_folder: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{shutil.copy(mlflow_store, place / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    parts = arguments(place, tiny_folder, "trainer.logger=[mlflow]", "trainer.project_name=ops")
    client = MlflowClient(uri)

    def runs() -> list[Any]:
        experiment = client.get_experiment_by_name("ops")
        assert experiment is not None
        return [run.info for run in client.search_runs([experiment.experiment_id])]

    assert main([*parts, "trainer.total_training_steps=1"]) == 0
    (first,) = runs()
    assert main(parts) == 0
    (again,) = runs()
    assert (again.run_id, again.status) == (first.run_id, "FINISHED")
    rewards = client.get_metric_history(first.run_id, "reward/mean")
    assert [point.step for point in rewards] == [1, 2]
    assert main([*parts, "run.val_only=true"]) == 0, "which trains nothing, and is a run of its own"
    assert len(runs()) == 2
    assert main([*parts, "trainer.resume_mode=disable"]) == 0
    assert len(runs()) == 3


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_reward_that_fails_ends_the_run_in_its_own_words(
    place: Path, tiny_folder: Path, isolation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rl.reward.on_error=fail` with a truth that the reward can't parse."""
    rows = [{"prompt": "1+1=", "ground_truth": "twelve"}] * 8
    pd.DataFrame(rows).to_parquet(place / "train.parquet")
    more = ("custom_reward_function.path=null", "rl.reward.on_error=fail", "data.val_files=null")
    parts = arguments(place, tiny_folder, *more)
    assert main([*parts, f"rl.reward.isolation={isolation}"]) == 1
    said = capsys.readouterr().err
    sentence = r"error: row 0: ground_truth is 'twelve', not a number; .* \(tracebacks: \S+\)"
    assert [line for line in said.splitlines() if re.fullmatch(sentence, line)], said
    assert "TypeError" not in said
    assert "RewardFailure" in (place / "out" / "error.txt").read_text()


def test_epochs_become_steps(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("trainer.total_training_steps=null", "trainer.total_epochs=1", "data.val_files=null")
    batches = ("data.train_batch_size=8", "trainer.val_before_train=false")
    assert main(arguments(place, tiny_folder, *more, *batches)) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^rl +(\d)/3", out, re.M) == ["1", "2", "3"]
    assert "validation " not in out.replace("for validation", "")


def test_long_prompts_are_an_error_or_left_out(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    texts = ["1+1=", "1+1= and that is all that I wanted to know"]
    rows = [{"prompt": texts[i % 2], "ground_truth": "2"} for i in range(8)]
    pd.DataFrame(rows).to_parquet(place / "train.parquet")
    limit = len(tokenizer.apply_chat_template([{"role": "user", "content": texts[0]}])) + 8
    strict = arguments(place, tiny_folder, f"data.max_prompt_length={limit}", "data.val_files=null")
    assert main(strict) == 2
    assert "4 prompts are longer than" in capsys.readouterr().err
    short = ("data.filter_overlong_prompts=true", "trainer.total_training_steps=1")
    assert main([*strict, *short]) == 0
    assert "4 prompts (4 too long, left out)" in capsys.readouterr().out


NESTED = '{"prompt": "1+1=", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
WRONG_ROWS = {
    "lone surrogate": ('{"prompt": "\\ud83d"}', "line 2: column 'prompt' has half of a UTF-16"),
    "nested": (NESTED, "line 2: has lists or objects nested more than 64 levels deep"),
    "digits": (
        '{"prompt": "1+1=", "ground_truth": ' + "7" * 5000 + "}",
        "line 2: column 'ground_truth' has a whole number of more than 4300 digits",
    ),
    "megabytes": (
        json.dumps({"prompt": "1+1=" * 2_500_000, "ground_truth": 2}),
        ", row 2: column 'prompt' has 10,000,000 characters, more than 4,000,000; shorten",
    ),
    "NaN": ('{"prompt": "1+1=", "ground_truth": NaN}', "1 of 2 rows have no ground truth (row 2)"),
    "prompts": ('{"prompt": "1+1=", "prompts": 1}', "row 2: column 'prompts' has the name of a"),
    "prompt_ids": ('{"prompt": "1+1=", "prompt_ids": [5]}', "row 2: column 'prompt_ids' has the"),
    "two truths": (
        '{"prompt": "1+1=", "ground_truth": 2, "reward_model": {"ground_truth": 3}}',
        "row 2: column 'ground_truth' is 2, but reward_model.ground_truth is 3",
    ),
    "template": (
        '{"prompt": [{"role": "critic", "content": "1+1="}], "ground_truth": 2}',
        "row 2: the chat template of the tokenizer",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ROWS)
def test_a_wrong_row_is_one_sentence_with_its_file_and_number(
    kind: str, place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, words = WRONG_ROWS[kind]
    model = tiny_folder
    if kind == "template":
        model = shutil.copytree(tiny_folder, place / "model")
        tokenizer = load_tokenizer(model)
        picky = "{% if messages[0].role == 'critic' %}{{ raise_exception('no critic') }}{% endif %}"
        tokenizer.chat_template = picky + str(tokenizer.chat_template)
        tokenizer.save_pretrained(model)
    (place / "wrong.jsonl").write_text(f'{{"prompt": "1+1=", "ground_truth": 2}}\n{row}\n')
    assert main(arguments(place, model, f"data.train_files={place / 'wrong.jsonl'}")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {place / 'wrong.jsonl'}")
    assert words in error
    assert error.count("\n") == 1
    assert len(error) < 500


def test_files_of_a_run_all_have_ground_truths_or_none(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, row in (("a", {"prompt": "1+1=", "ground_truth": 2}), ("b", {"prompt": "1+2="})):
        (place / f"{name}.jsonl").write_text(json.dumps(row))
    files = f"data.train_files=[{place / 'a.jsonl'},{place / 'b.jsonl'}]"
    assert main(arguments(place, tiny_folder, files)) == 2
    assert "b.jsonl has no ground truths and the file before it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("data.train_files=/nowhere/a.parquet", "/nowhere/a.parquet does not exist"),
        ("data.train_files=null", "data.train_files is missing"),
        ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path is missing"),
        ("actor_rollout_ref.model.path=nope", "actor_rollout_ref.model.path='nope' does not exist"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name='sglang'"),
        ("algorithm.adv_estimator=grp", "did you mean 'grpo'?"),
        ("critic.ppo_epochs=3", "critic.ppo_epochs=3 has no effect"),
        ("custom_reward_function.name=missing", "has no function 'missing'"),
        ("trainer.total_epoch=1", "did you mean trainer.total_epochs?"),
        ("actor_rollout_ref.actor.optim.lr=x", "actor_rollout_ref.actor.optim.lr='x'"),
        ("--config=/nowhere.yaml", "/nowhere.yaml does not exist"),
        ("--config-name=ppo", "config/ppo.yaml does not exist"),
        ("trainer.resume_mode=resume_path", "trainer.resume_mode=resume_path needs"),
        ("--config-dir=c", "unrecognized arguments: --config-dir=c"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    place: Path,
    tiny_folder: Path,
    more: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(place, tiny_folder, more)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not (place / "out" / "step_2").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("data.val_files=/nowhere/a.parquet", "/nowhere/a.parquet does not exist"),
        ("actor_rollout_ref.model.path=/nope", "path='/nope' does not exist"),
        ("custom_reward_function.name=missing", "has no function 'missing'"),
        ("algorithm.teacher=nope", "algorithm.teacher='nope' does not exist"),
    ],
)
def test_a_wrong_name_is_known_before_torch_is_loaded(
    place: Path,
    tiny_folder: Path,
    more: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "engine.cli.ppo_program", None
    )  # an ImportError where it is reached
    assert main(arguments(place, tiny_folder, more)) == 2
    assert words in capsys.readouterr().err


def test_a_failed_run_is_one_sentence_with_the_tracebacks_in_a_file(
    place: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "digits.py").write_text("def compute_score(*, solution_str, ground_truth, **k): 1/0\n")
    more = ("data.val_files=null", "rl.reward.isolation=process")
    assert main(arguments(place, tiny_folder, *more)) == 1
    error = capsys.readouterr().err.rpartition("error: ")[2]
    assert "ZeroDivisionError" in error
    assert error.count("\n") == 1
    details = place / "out" / "error.txt"
    assert str(details) in error
    assert "Traceback (most recent call last)" in details.read_text()
    assert not list((place / "out").glob("step_*"))


def test_print_config_and_help_need_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "actor_rollout_ref.actor.optim.lr=1e-6"]) == 0
    assert "lr: 1.0e-06" in capsys.readouterr().out
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "data.train_files = []" in said
    assert "actor_rollout_ref.actor.optim.lr = 0.0005" in said
    assert len(said.splitlines()) <= 50
    assert "--help WORD" in said
    assert main(["--help", "kl_loss"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if " = " in line]
    assert len(found) == 3
    assert all("kl_loss" in line for line in found)
    assert main(["--help", "all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 500
    assert main(["--help", "temprature"]) == 2
    assert "--help temprature: no key has that" in capsys.readouterr().err


@pytest.fixture
def ray_home() -> Iterator[Path]:
    """A folder of Ray's own, with a path short enough for its sockets; nothing of it survives."""
    folder = Path(tempfile.mkdtemp(prefix="hf", dir="/tmp"))
    yield folder
    for process in of(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def of(folder: Path) -> list[psutil.Process]:
    """Living processes that were started with `RAY_TMPDIR=folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("RAY_TMPDIR") == str(folder)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["local", "ray"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_workers_and_ray(
    place: Path, tiny_folder: Path, ray_home: Path, placement: str, number: int, status: int
) -> None:
    environment: dict[str, Any] = os.environ | {"RAY_TMPDIR": str(ray_home), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    more = (f"trainer.placement={placement}", "trainer.total_training_steps=100000")
    more += ("data.val_files=null",)
    log = place / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.main_ppo", *arguments(place, tiny_folder, *more)],
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )
    deadline = time.monotonic() + 300
    while "rl    2/" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    on_ray = any("Host" in p.name() or "raylet" in p.name() for p in of(ray_home))
    assert on_ray == (placement == "ray")
    listening = [c for p in of(ray_home) for c in p.net_connections("inet") if c.status == "LISTEN"]
    addresses = {c.laddr.ip.removeprefix("::ffff:") for c in listening}
    assert addresses == ({"127.0.0.1"} if on_ray else set())
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(60) == status
    assert log.read_text().endswith("workers are stopped\n")
    assert "Traceback" not in log.read_text()
    deadline = time.monotonic() + 15
    while left := of(ray_home):
        assert time.monotonic() < deadline, [p.cmdline() for p in left]
        time.sleep(0.2)
    assert not list((place / "out").glob(".step_*"))


@contextlib.contextmanager
def on_ray_of_its_own(place: Path, model: Path, ray_home: Path) -> Iterator[subprocess.Popen[str]]:
    environment: dict[str, Any] = os.environ | {"RAY_TMPDIR": str(ray_home), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "engine.main_ppo"]
    with subprocess.Popen(
        [*command, *arguments(place, model, "trainer.placement=ray")],
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield process


def suspend(process: subprocess.Popen[str], ray_home: Path, name: str) -> int:
    """Suspend the first process of its Ray with that name, and wait until it is; return its pid."""
    assert process.stderr is not None
    deadline = time.monotonic() + 300
    while True:
        for found in of(ray_home):
            with contextlib.suppress(psutil.Error):
                running = found.status() != psutil.STATUS_STOPPED
                if running and name in " ".join(found.cmdline()[:3]):
                    found.suspend()
                    while found.status() != psutil.STATUS_STOPPED:
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    return found.pid
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_ray_that_does_not_start_in_time_is_one_sentence(
    place: Path, tiny_folder: Path, ray_home: Path
) -> None:
    with on_ray_of_its_own(place, tiny_folder, ray_home) as process:
        for _ in range(2):  # it is tried twice
            suspend(process, ray_home, "raylet/raylet")  # before it has told Ray that it is there
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    sentences = [line for line in errors.splitlines() if "Ray could not be started" in line]
    assert len(sentences) == 1
    assert "timed out during startup" in sentences[0]
    assert "set trainer.placement=local" in sentences[0]


@pytest.mark.slow
def test_a_ray_whose_agent_is_slow_is_started_again(
    place: Path, tiny_folder: Path, ray_home: Path
) -> None:
    with on_ray_of_its_own(place, tiny_folder, ray_home) as process:
        suspend(process, ray_home, "dashboard/agent")
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "it is tried once more" in errors
    # The kernel ends a stopped member of a process group whose leader, the raylet, has ended.
    assert not of(ray_home), "the first try's Ray has ended, the agent too"
