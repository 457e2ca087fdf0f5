"""What the metrics of a step say of drift, and how a run tells of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.cli.rl_run import RunLog
from engine.evaluation import drift
from engine.trainers.step_metrics import step_metrics


def batch(responses: list[list[int]], right: list[bool], lenient: list[bool | None]) -> Batch:
    """Completions of one prompt token each."""
    width = max(map(len, responses))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in responses])
    mask = torch.tensor([[1] * (1 + len(row)) + [0] * (width - len(row)) for row in responses])
    scores = torch.zeros(len(responses), width)
    scores[:, 0] = torch.tensor(right).float()
    tensors = {
        "responses": padded,
        "attention_mask": mask,
        "token_level_scores": scores,
        "reward_error": torch.zeros(len(responses), dtype=torch.bool),
        "truncated": torch.zeros(len(responses), dtype=torch.bool),
        "group_ids": torch.zeros(len(responses), dtype=torch.long),
    }
    return Batch(tensors, {"reward_correct": right, "lenient_correct": lenient})


def test_a_second_grader_stands_beside_the_reward() -> None:
    rows = batch([[1], [1, 2], [3], [4]], [True, False, False, True], [True, True, False, None])
    metrics = step_metrics(rows, 1.0)
    assert metrics["reward/second_grader"] == pytest.approx(2 / 3)
    assert metrics["reward/only_lenient"] == pytest.approx(1 / 3)
    unknown = step_metrics(batch([[1], [2]], [True, False], [None, None]), 1.0)
    assert "reward/second_grader" not in unknown


def test_accuracy_by_length_is_a_slope() -> None:
    """Right from 4 tokens on: of 1 to 6 tokens, least squares give 0.257 a token."""
    rows = [[7] * length for length in range(1, 7)]
    right = [length >= 4 for length in range(1, 7)]
    metrics = step_metrics(batch(rows, right, right), 1.0)  # type: ignore[arg-type]
    assert metrics["reward/length_slope"] == pytest.approx(9 / 35)
    same = step_metrics(batch([[1], [2]], [True, False], [True, False]), 1.0)
    assert same["reward/length_slope"] == 0.0


@pytest.mark.parametrize(
    ("responses", "share"),
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8]], 0.0),
        ([[5] * 8], 4 / 5),
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 1 / 5),
        ([[5] * 8, [1, 2, 3]], 2 / 5),  # one is too short to repeat anything, padding counts not
        ([[1], [2]], 0.0),
    ],
)
def test_repeated_runs_of_tokens_are_counted(responses: list[list[int]], share: float) -> None:
    wrong = [False] * len(responses)
    metrics = step_metrics(batch(responses, wrong, list(wrong)), 1.0)
    assert metrics["response/repeated_ngrams"] == pytest.approx(share)


class Tags:
    def __init__(self) -> None:
        self.tags: dict[str, Any] = {}

    def set_tags(self, tags: dict[str, Any]) -> None:
        self.tags |= tags

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        pass


def test_a_run_tells_once_of_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    tags = Tags()
    log, history = RunLog(tags, step_lines=False), []  # type: ignore[arg-type, var-annotated]
    for step in range(1, 31):
        row = {"reward/mean": step / 30, "reward/correct": step / 30, "validation/correct": 0.0}
        row |= {"validation/reward": 0.5}
        metrics = row | drift.metrics([*history, row])
        log.step(step, 30, metrics, history)
        history.append({"step": float(step)} | metrics)
    lines = [line for line in capsys.readouterr().out.splitlines() if "drift" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rl: drift (held_out): the reward goes ")
    assert tags.tags["drift/held_out"].startswith("step 8: the reward goes ")
