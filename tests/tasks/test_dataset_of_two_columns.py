"""The workflow's data stage on a CSV of two columns: splits, tokenizer and card, from settings."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from promotion_bench import Bench, new_run

from engine.config import DataConfig
from engine.data.contract import RL_PROMPTS, check
from engine.data.sources import source_digest
from engine.data.tokenizer import load_tokenizer
from engine.stages.settings import DatasetSettings
from tasks.stages import preprocess


def test_a_csv_of_two_columns_becomes_a_dataset(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = "A farmer who has {} apples buys {} more on the market of the old town by the river"
    rows = [f"{story.format(n, n)},{2 * n}\n" for n in range(60)]
    again = f"{story.format(7, 7)}!,14\n"  # most words of another row, in train and in test
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("q,a\n" + "".join(rows[:50]) + again + "odd\n")
    (tmp_path / "data" / "test.csv").write_text("q,a\n" + "".join([*rows[50:], rows[7]]))
    data = DataConfig(
        source="files",
        path=str(tmp_path / "data"),
        columns={"prompt": "q", "ground_truth": "a"},
        apply_chat_template_kwargs={"mode": "brief"},
        bad_rows="drop",
        max_response_length=16,
        vocab_size=512,
    )
    made = preprocess(
        run=new_run(),
        settings=DatasetSettings(
            data=data,
            source_digest=source_digest(data, 0),
            model_path="",
            model_digest="",
            context=256,
            seed=0,
        ),
    ).dataset
    folder = Path(str(made.path))
    train, test = (pd.read_parquet(folder / f"{name}.parquet") for name in ("train", "test"))
    check(train, RL_PROMPTS, "train")
    assert len(test) == 11
    asked = {prompt[0]["content"] for prompt in train["prompt"]}
    assert len(asked) == len(train)
    assert not any("has 7 apples" in text for text in asked)
    learned = pd.read_parquet(folder / "sft_train.parquet")
    assert set(learned["response"]) <= {str(2 * n) for n in range(50)}
    assert "mode = mode if" in str(load_tokenizer(folder / "tokenizer").chat_template)
    out = capsys.readouterr().out
    assert "train.csv: 1 of 52 rows are bad and left out (row 52)" in out
    assert "train: 1 rows repeat a prompt and are left out" in out
    assert "prompts are in held-out ones (1 with the same words, 0 nearly) and left out" in out
    card = (folder / "README.md").read_text()
    assert "| train | " in card
    assert "| test | 11 | " in card
