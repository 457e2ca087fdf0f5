"""`python -m engine.planner`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.planner.__main__ import main

SEVEN_B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def folder(tmp_path: Path, **changes: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B | changes))
    return str(tmp_path)


def test_it_prints_the_choice_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", folder(tmp_path), "--gpus", "4", "--memory-gb", "80", "--rows", "4"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 × H100 of 80.0 GiB" in lines[0]
    assert lines[1].startswith("  chosen  ")
    assert "4 ranks" in lines[1]
    assert "least estimated time" in lines[3]
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("layout"))
    shown = "layout ranks rollout-tp tokens keeps GiB train-s move-s roll-s lost-by"
    assert lines[head].split() == shown.replace("-", " ").split()
    assert lines[head + 1].lstrip().startswith("*")


def test_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", folder(tmp_path), "--gpus", "1", "--memory-gb", "24"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: trainer.placement=auto finds no layout that fits on 1 machine")
    assert said.count("\n") == 1
    mixture = folder(tmp_path, model_type="deepseek_v3", num_experts=128, num_experts_per_tok=8)
    assert main(["--model", mixture, "--gpus", "8"]) == 2
    assert "can't price a mixture of experts" in capsys.readouterr().err


def test_a_model_that_is_missing_is_one_sentence_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "nope", "--gpus", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --model='nope' does not exist; give a folder")
    assert said.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "docs/placement.md" in capsys.readouterr().out
