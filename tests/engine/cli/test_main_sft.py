"""`python -m engine.main_sft`: verl's keys, rows of files, and a run from a file to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cli.commands.main_sft import main
from engine.cli.forms import SFT
from engine.cli.resolve import Resolved, resolve_file
from engine.cli.settings import SFTRunConfig
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import read_sft_pairs
from engine.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")

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


def test_rows_of_several_forms_are_pairs(tmp_path: Path, tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows: list[dict[str, Any]] = [{"messages": talk}]
    (tmp_path / "talk.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "plain.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}))
    one, other = (
        read_sft_pairs([str(tmp_path / f"{name}.jsonl")], tokenizer) for name in ("talk", "plain")
    )
    assert one == other
    assert read_sft_pairs([str(tmp_path)], tokenizer, max_length=2, too_long="drop") == []
    with pytest.raises(DataError, match=r"longer than 2 tokens, first row 1 with \d+"):
        read_sft_pairs([str(tmp_path)], tokenizer, max_length=2)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    with pytest.raises(DataError, match="there is no column 'response'"):
        read_sft_pairs([str(tmp_path / "bad.jsonl")], tokenizer)


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
