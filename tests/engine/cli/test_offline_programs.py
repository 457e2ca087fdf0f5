"""The commands main_sft, main_preference and main_reward_model, and what they save."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import write_tiny_folder
from transformers import AutoModelForCausalLM

from engine.cli.commands import main_preference, main_reward_model
from engine.cli.commands.main_sft import main
from engine.cli.forms import PREFERENCE, SFT
from engine.cli.offline_run import held_out
from engine.cli.resolve import Resolved, resolve_file
from engine.cli.run_folder import make_output_folder, save_atomically
from engine.cli.settings import SFTRunConfig
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import PairExample, read_sft_examples
from engine.errors import ConfigError, DataError, StorageError
from engine.rewards.model_based import reward_model


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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_a_reward_model_from_files(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_reward_model.main(arguments(place, model, "reward_model")) == 0
    said = capsys.readouterr().out
    assert "reward_model: Bradley-Terry from" in said
    assert "validation_accuracy_low" in said
    folder = str(place / "out" / "step_3")
    assert len(reward_model(["1+1="] * 2, ["2", "1 or 3"], model=folder)) == 2


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_checks_and_trains_nothing(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_preference.main([*arguments(place, model, "preference"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "16 examples, 4 held out, 3 steps of 8\npreference: dry run" in out
    assert re.search(r"time +\S+ s a step, roughly: training \S+, between ranks 0\n", out)
    assert re.search(
        r"cached +nothing in .*; 3 steps .*\ntotal +\S+ s.*\ncost +not known; set", out
    )
    assert not (place / "out").exists()


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_a_setting_leaves_the_defaults_of_its_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preference:\n  optim: {lr: 1.0e-6, schedule: null}\n  beta: 0.3\n")
    found = resolve_file(PREFERENCE, file, ["preference.beta=0.2"]).config
    assert (found.preference.optim.lr, found.preference.optim.schedule) == (1e-6, "linear")
    assert found.preference.beta == 0.2
    assert found.run.experiment_name == "preference"
    with pytest.raises(ConfigError, match="argument 'beta' is not of the form key=value"):
        resolve_file(PREFERENCE, None, ["beta"])


@pytest.mark.usefixtures("one_thread")
def test_held_out_prompts_come_whole() -> None:
    rows = [PairExample([i // 3], [i], [i + 1]) for i in range(12)]
    train, apart = held_out(rows, 4, seed=0)
    assert len(apart) == 6
    assert sorted([*train, *apart], key=rows.index) == rows
    assert not {e.prompt_ids[0] for e in train} & {e.prompt_ids[0] for e in apart}
    assert held_out(rows, 0, seed=0) == (rows, [])
    with pytest.raises(DataError, match="holds out all 12 examples"):
        held_out(rows, 12, seed=0)


@pytest.mark.usefixtures("one_thread")
def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_reward_model.main(["--help"]) == 0
    said = capsys.readouterr().out
    for key in (
        "reward_model.center_rewards_coefficient = 0.0",
        "data.too_long = fail",
        "--dry-run",
    ):
        assert key in said


# verl's example run_qwen_05_peft.sh, after the module's name.
VERLS = [
    "data.prompt_key=extra_info",
    "data.response_key=extra_info",
    "optim.lr=1e-3",
    "data.prompt_dict_keys=[question]",
    "+data.response_dict_keys=[answer]",
    "data.micro_batch_size_per_gpu=4",
    "trainer.project_name=gsm8k-sft",
    "trainer.experiment_name=gsm8k-sft-qwen-2.5-0.5b-instruct",
    "trainer.logger=[console]",
    "trainer.total_epochs=1",
    "trainer.default_hdfs_dir=null",
    "model.lora_rank=4",
    "model.lora_alpha=16",
    "model.target_modules=all-linear",
]


def parsed(*arguments: str) -> Resolved[SFTRunConfig]:
    return resolve_file(SFT, None, arguments)


@pytest.mark.usefixtures("one_thread")
def test_verls_keys_are_settings() -> None:
    more = ("optim.betas=[0.8,0.9]", "trainer.test_freq=-1", "model.strategy=fsdp2")
    resolved = parsed(*VERLS, *more)
    config = resolved.config
    assert config.data.columns == {"prompt": "extra_info.question", "response": "extra_info.answer"}
    assert (config.sft.optim.lr, config.sft.optim.beta1, config.sft.epochs) == (1e-3, 0.8, 1.0)
    assert (config.model.lora.rank, config.model.lora.target_modules) == (4, "all-linear")
    assert config.sft.optim.schedule == "cosine"
    assert config.sft.validate_every > 10**6
    assert "data.micro_batch_size_per_gpu has no effect here" in "".join(resolved.notices)
    ranks = parsed("trainer.n_gpus_per_node=4", "trainer.nnodes=2", "sft.parallel.sp=2").config
    assert (ranks.sft.parallel.fsdp, ranks.sft.parallel.sp) == (4, 2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("data.truncation=left", "data.too_long=drop"),
        ("data.custom_cls.path=a.py", "is verl's and not available here: give files"),
        ("trainer.n_gpus_per_node=x", "whole number"),
        ("optim.betas=0.9", "two numbers"),
        ("optim.lrr=1", "did you mean"),
    ],
)
def test_what_is_not_there_is_refused(argument: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(argument)


@pytest.mark.usefixtures("one_thread")
def test_rows_of_several_forms_are_pairs(tmp_path: Path, tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows: list[dict[str, Any]] = [{"messages": talk}]
    (tmp_path / "talk.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "plain.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}))
    one, other = (
        read_sft_examples([str(tmp_path / f"{name}.jsonl")], tokenizer)
        for name in ("talk", "plain")
    )
    assert one == other
    assert read_sft_examples([str(tmp_path)], tokenizer, max_length=2, too_long="drop") == []
    with pytest.raises(DataError, match=r"longer than 2 tokens, first row 1 with \d+"):
        read_sft_examples([str(tmp_path)], tokenizer, max_length=2)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    with pytest.raises(DataError, match="there is no column 'response'"):
        read_sft_examples([str(tmp_path / "bad.jsonl")], tokenizer)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_run_of_verls_command_trains_adapters(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cells = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]
    pd.DataFrame({"extra_info": cells}).to_parquet(tmp_path / "train.parquet")
    command = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"data.val_files={tmp_path / 'train.parquet'}",
        f"model.partial_pretrain={tiny_folder}",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "data.train_batch_size=6",
        "sft.threads=1",
        *VERLS,
    ]
    assert main([*command, "--dry-run"]) == 0
    assert "sft: fine-tuning from" in capsys.readouterr().out
    assert main(command) == 0
    assert "sft: done, 2 steps" in capsys.readouterr().out
    trained = tmp_path / "out" / "step_2"
    assert (trained / "adapter" / "adapter_config.json").is_file()
    one, two = (
        AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tiny_folder, trained)
    )
    assert any(not torch.equal(one[name], two[name]) for name in one)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    assert "run it once, with trainer.n_gpus_per_node=2" in capsys.readouterr().err


def write(text: str) -> object:
    def save(folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(text)

    return save


def test_a_folder_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    assert save_atomically(write("one"), target) == target  # type: ignore[arg-type]
    (target / "stale.json").touch()
    save_atomically(write("two"), target)  # type: ignore[arg-type]
    assert (target / "model.safetensors").read_text() == "two"
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_save_that_breaks_off_leaves_the_last_model(tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    save_atomically(write("one"), target)  # type: ignore[arg-type]

    def broken(folder: str) -> None:
        write("half")(folder)  # type: ignore[operator]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_atomically(broken, target)
    assert (target / "model.safetensors").read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_model_on_another_machines_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="another machine"):
        save_atomically(lambda folder: None, tmp_path / "step_1")


def test_a_folder_that_can_t_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"can't write .*file"):
        make_output_folder(tmp_path / "file" / "out")
    assert make_output_folder(tmp_path / "new" / "out").is_dir()


def test_a_jobs_own_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / "out"
    with pytest.raises(ConfigError, match="deleted after it; give an absolute path"):
        make_output_folder(folder)
