"""A case of `vs_trl.py` as a folder that both sides read, and its settings; loads nothing heavy.

It has `model/`, `rows.jsonl` (chat messages, and for the default task the ground truth) and
`case.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides run."""

    task: str  # grpo, sft, dpo, reward or accuracy (GRPO on the default task)
    size: str
    mix: str  # short or tail; of sft: rows; of dpo and reward: pairs, or losses
    prompts: int  # a step; of sft, dpo and reward: rows a step
    n: int  # completions a prompt
    max_new_tokens: int
    max_prompt: int  # longest prompt in tokens
    steps: int  # a turn
    turns: int  # at most
    threads: int
    micro_batch: int  # rows that go through a pass together
    lr: float = 1e-7
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.task} {self.size} {self.mix}"


def write_case(folder: Path, case: Case, rows: Sequence[Mapping[str, object]]) -> Case:
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    return case


def read_case(folder: Path) -> tuple[Case, list[dict[str, Any]]]:
    """Return a case's settings and rows."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    return case, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
