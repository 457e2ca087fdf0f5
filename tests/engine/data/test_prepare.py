"""Data sets as Parquet files with a card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from engine.config import DataConfig, RowsConfig
from engine.data.prepare import prepare
from engine.data.row_files import read_file_rows
from engine.data.rows import canonical_row


def write(folder: Path, **splits: list[dict[str, Any]]) -> DataConfig:
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source="files", path=str(folder))


def sums(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {n}+1?", "ground_truth": str(n + 1)} for n in numbers]


def test_files_have_every_field_of_messages_and_of_rows(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "user", "content": "1+1?", "name": "tom"},
        {"role": "assistant", "content": "", "reasoning_content": "Add.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    rows = [
        {"prompt": talk, "ground_truth": "2", "level": 1},
        {"prompt": "2+2?", "ground_truth": 4, "level": "hard", "extra_info": {"tags": ["a"]}},
    ]
    cards = prepare(write(tmp_path, train=rows, test=sums(7)), tmp_path / "out")
    assert [(card.name, len(card.lengths), card.unit) for card in cards] == [
        ("test", 1, "characters"),
        ("train", 2, "characters"),
    ]
    file = tmp_path / "out" / "train.parquet"
    read = read_file_rows(str(file), RowsConfig()).rows
    assert [row["prompt"] for row in read] == [canonical_row(r, "r")["prompt"] for r in rows]
    assert [row["reward_model"]["ground_truth"] for row in read] == ["2", "4"]
    assert [row["extra_info"]["level"] for row in read] == ["1", "hard"]
    assert read[1]["extra_info"]["tags"] == '["a"]'
    plain = pq.read_schema(tmp_path / "out" / "test.parquet").field("prompt").type
    assert [field.name for field in plain.value_type] == ["role", "content"]  # verl's


def test_a_card_counts_whole_lengths_and_says_what_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "ground_truth": "1"} for n in (3, 3, 4, 5, 5, 5)]
    rows = [{**row, "prompt": row["prompt"] + str(i)} for i, row in enumerate(rows)]
    prepare(write(tmp_path, train=[*rows, rows[0]]), tmp_path / "few")
    card = (tmp_path / "few" / "README.md").read_text()
    head, _, figures = (line for line in card.splitlines() if line.startswith("|"))
    cells = dict(zip(head.split(" | "), figures.split(" | "), strict=True))
    assert (cells["rows"], cells["least"], cells["most"]) == ("6", "4", "6")
    assert cells["left out: repeated"] == "1"
    bars = re.findall(r"^ +(\d+) █* ?(\d+)$", card, re.MULTILINE)
    assert bars == [("4", "2"), ("5", "1"), ("6", "3")]
    assert '{"prompt": "aaa0", "ground_truth": "1"}' in card

    long = [{"prompt": "a" * n, "ground_truth": "1"} for n in range(10, 61)]
    prepare(write(tmp_path, train=long), tmp_path / "many")
    card = (tmp_path / "many" / "README.md").read_text()
    bars = re.findall(r"^ +(\d+) █* ?(\d+)$", card, re.MULTILINE)
    assert [int(start) for start, _ in bars] == list(range(10, 61, 5))
    assert [int(count) for _, count in bars] == [5] * 10 + [1]
