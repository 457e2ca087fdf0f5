"""The command `python -m engine.reward_audit`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli.commands.reward_audit import main
from engine.rewards import probes
from engine.rewards.audit import from_json

STRICT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.rpartition("####")[2].strip() == str(ground_truth))


def weak(data_source, solution_str, ground_truth, extra_info=None):
    return float(str(ground_truth) in solution_str)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(STRICT)
    return path


def test_a_file_of_verls_kind_is_audited_on_rows_of_a_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, probes.sample_rows("number")[:4])))
    assert main([str(file), "--data", str(data)]) == 0
    assert "passed; " in capsys.readouterr().out
    assert main([f"{file}::weak", "--data", str(data)]) == 1
    out, err = capsys.readouterr()
    assert "HOLE" in out
    assert "failed, holes: " in out
    assert "hole: buried truth (credit on 4 of 4 rows" in err


def test_columns_of_the_file_are_named_as_in_a_run(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "problems.csv"
    data.write_text("question,answer\n" + "".join(f"{n}+{n}=,{2 * n}\n" for n in range(9)) + ",4\n")
    columns = ["columns.prompt=question", "data.columns.ground_truth=answer"]
    command = [str(file), "--data", str(data), *columns]
    assert main([*command, "bad_rows=drop"]) == 0
    assert "1 of 10 rows are bad and left out (row 10)" in capsys.readouterr().out
    assert main(command) == 2


def test_the_audit_is_printed_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{file}::weak", "--truths", "text", "--json"]) == 1
    (found,) = from_json(capsys.readouterr().out.encode(), "stdout").values()
    assert "longer text" in found.names("hole")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_reward"], "'no_such_reward'"),
        (["/nowhere/rewards.py"], "/nowhere/rewards.py does not exist"),
        (["answer_match", "--option", "metod=flexible"], "metod"),
        (["answer_match", "--option", "method: flexible"], "--option 'method: flexible'"),
        (["answer_match", "--data", "/nowhere.parquet"], "/nowhere.parquet"),
        (["answer_match", "bad_rows=drop"], "name their file by --data"),
        ([], "the following arguments are required"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_the_command_is_a_program() -> None:
    command = [sys.executable, "-m", "engine.reward_audit", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "exit status: 0 passed; 1 holes were found; 2 wrong input" in shown.stdout
