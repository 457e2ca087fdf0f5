"""A student of some of a teacher's layers, and the command that writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_engine import tiny_model
from torch import nn

from engine.cli.commands.student import main
from engine.data.tokenizer import load_tokenizer
from engine.errors import ModelError
from engine.models import load_model
from engine.models.small_models import keep_layers


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_moe"])
def test_a_student_computes_what_the_teacher_does_without_the_other_layers(family: str) -> None:
    teacher = tiny_model(family)
    student = keep_layers(teacher, (1,))
    assert student.num_parameters() < teacher.num_parameters()
    assert student.config.num_hidden_layers == 1
    assert len(getattr(student.config, "layer_types", None) or "1") == 1
    layers = next(m for m in teacher.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    ids = torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        found = student(ids, use_cache=False).logits
        assert not torch.equal(found, teacher(ids, use_cache=False).logits)
        del layers[0]
        teacher.config.num_hidden_layers = 1
        torch.testing.assert_close(found, teacher(ids, use_cache=False).logits)
    with torch.no_grad():
        next(student.parameters()).zero_()
    assert next(teacher.parameters()).any(), "weights are copies"


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 2), (-1,), (0, 0)])
def test_layers_that_are_not_there_or_in_no_order(layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="of a model of 2: name some of 0 to 1, in ascending"):
        keep_layers(tiny_model("qwen2"), layers)


def test_the_command_writes_a_folder_or_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "student"
    assert main([str(tiny_folder), "--layers", "0", "--out", str(out)]) == 0
    student, teacher = load_model(out), load_model(tiny_folder)
    assert f"{student.num_parameters():,} parameters of the teacher's" in capsys.readouterr().out
    assert student.config.num_hidden_layers == 1 < teacher.config.num_hidden_layers
    text = "2+3?"
    assert load_tokenizer(out).encode(text) == load_tokenizer(tiny_folder).encode(text)

    assert main([str(tiny_folder), "--layers", "0", "--out", str(out)]) == 1
    assert "is already there" in capsys.readouterr().err
    assert main([str(tiny_folder), "--layers", "7", "--out", str(tmp_path / "none")]) == 1
    assert "layers=7 of a model of" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert [path.name for path in out.parent.iterdir()] == ["student"]
