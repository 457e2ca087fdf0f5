"""`python -m tasks.preprocess`: files in verl's schema, with a card, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from engine.data.contract import RL_PROMPTS, check
from tasks.preprocess import main

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def written(folder: Path, split: str) -> list[dict[str, object]]:
    frame = pd.read_parquet(folder / f"{split}.parquet")
    check(frame, RL_PROMPTS, split)
    rows: list[dict[str, object]] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


def test_math_in_verls_schema_with_its_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    question = (
        "Which number is equal to the sum of one half and the third part of {} as a fraction?"
    )
    train = [
        {
            "problem": question.format(n),
            "solution": f"So $\\boxed{{\\frac{{1}}{{{n}}}}}$.",
            "level": n,
        }
        for n in range(2, 8)
    ]
    train += [train[0], {"problem": "x?", "solution": "no box"}]
    train += [{"problem": "Say: which <b>x</b>?", "solution": "\\boxed{1} \\fbox{2}", "level": "L"}]
    test = [{"problem": "say - WHICH <b>x</b>", "solution": "\\boxed{2}", "level": 1}]
    for name, rows in (("train", train), ("test", test)):
        (source / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--dataset", "math", "--source", str(source), "--local_dir", str(out)]
    assert main(command) == 2
    refusal = capsys.readouterr().out
    assert "train.jsonl, row 8: data.templates.ground_truth can't be rendered" in refusal
    assert main([*command, "bad_rows=drop"]) == 0
    printed = capsys.readouterr().out
    assert "test: 1 rows\n" in printed
    assert "train: 6 rows; left out: 1 repeated, 1 held out, exact, 1 bad" in printed
    rows = written(out, "train")
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": f"\\frac{{1}}{{{n}}}"} for n in range(2, 8)
    ]
    assert rows[1] | {"extra_info": None} == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": f"{question.format(3)} Let's think step by step and output the final "
                "answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": rows[1]["reward_model"],
        "extra_info": None,
    }
    extra = rows[1]["extra_info"]
    assert isinstance(extra, dict)
    assert (extra["index"], extra["split"], extra["level"]) == (1, "train", 3)
    card = (out / "README.md").read_text()
    assert "| train | 6 | " in card
    assert "(row 8); the first: " in card


def test_settings_and_bounds_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    file = tmp_path / "d.csv"
    file.write_text("q,a\n1+1=,2\n1+1+1+1+1+1=,6\n")
    command = ["--dataset", str(file), "--local_dir", str(tmp_path / "out")]
    columns = ["columns.prompt=q", "data.columns.ground_truth=a"]
    more = ["--tokenizer", str(tiny_folder), "max_prompt_length=8"]
    assert main([*command, *columns, *more]) == 0
    assert "train: 1 rows; left out: 1 too long" in capsys.readouterr().out
    assert "in tokens" in (tmp_path / "out" / "README.md").read_text()
    for wrong, message in (
        (["columns.prompt"], "'columns.prompt' is not of the form key=value"),
        (["colums.prompt=q"], "unknown setting 'colums'"),
        (["path.x=1"], "path is a value, not a section"),
        (["columns.prompt=nope"], "no column 'nope' for data.columns.prompt"),
        (["--source", "x"], "--source goes with gsm8k or math"),
    ):
        assert main([*command, *wrong]) == 2
        assert message in capsys.readouterr().out


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no GSM8K in {GSM8K}")
@pytest.mark.slow
def test_real_gsm8k(tmp_path: Path) -> None:
    command = ["--dataset", "gsm8k", "--source", str(GSM8K), "--local_dir", str(tmp_path)]
    assert main(command) == 0
    train, test = written(tmp_path, "train"), written(tmp_path, "test")
    assert (len(test), 7400 < len(train) <= 7473) == (1319, True)
    assert train[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert train[0]["data_source"] == "openai/gsm8k"


MEASURE = """
import resource, sys
from tasks.preprocess import main
assert main(sys.argv[1:]) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
print("MEASURED", used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def measured(source: Path, out: Path) -> tuple[float, float]:
    """Seconds of a processor, and the peak of memory in MiB, of a command in its own process."""
    command = ["--dataset", str(source), "--local_dir", str(out), "bad_rows=drop"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], capture_output=True, text=True, check=True
    )
    _, seconds, peak = done.stdout.splitlines()[-1].split()
    return float(seconds), int(peak) / 1024


@pytest.mark.slow
def test_a_million_rows_in_bounded_memory_and_bad_ones_cost_no_more(tmp_path: Path) -> None:
    def write(name: str, bad: bool) -> Path:
        path = tmp_path / f"{name}.jsonl"
        with path.open("w") as file:
            for n in range(1_000_000):
                if bad and n % 100 == 0:
                    file.write(
                        '{"prompt": 7, "ground_truth": "1"}\n' if n % 200 else '{"prompt": \n'
                    )
                else:
                    story = f"Problem {n}: what is {n} plus {n % 7}? " + "Think. " * 20
                    file.write(json.dumps({"prompt": story, "ground_truth": str(n + n % 7)}) + "\n")
        return path

    small = tmp_path / "small.csv"
    small.write_text("prompt,ground_truth\n" + "".join(f"{n}?,1\n" for n in range(1000)))
    _, base = measured(small, tmp_path / "small")
    good, peak = measured(write("good", bad=False), tmp_path / "good")
    mixed, _ = measured(write("mixed", bad=True), tmp_path / "mixed")
    print(f"good {good:.1f} s, 10,000 bad {mixed:.1f} s, peak {peak:.0f} MiB over {base:.0f} MiB")
    assert mixed < 1.1 * good + 2
    assert peak - base < 150
    assert pq.ParquetFile(tmp_path / "good" / "train.parquet").metadata.num_rows == 1_000_000
    assert pq.ParquetFile(tmp_path / "mixed" / "train.parquet").metadata.num_rows == 990_000
