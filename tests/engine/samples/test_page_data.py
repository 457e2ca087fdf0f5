"""What the page shows: compact, bounded, and safe inside of HTML."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from step_batches import step_batch, tokenizer

from engine.samples import viewer
from engine.samples.sample_files import SampleName
from engine.samples.viewer import PageData
from engine.samples.writer import TokenTexts, as_table, pick


def add(
    data: PageData, step: int, answers: list[str], split: str = "train", **metrics: float
) -> None:
    rewards = [float(i % 2) for i in range(len(answers))]
    sample = pick(step_batch({"2+2=": answers}, rewards), step, split, 99)
    rows = [{"step": float(step), **metrics}] if metrics else []
    data.add(SampleName(step, split), as_table(sample, TokenTexts(tokenizer())), rows)


def shown(data: PageData) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(data.as_json())
    return content


def test_a_sample_is_told_once() -> None:
    data = PageData()
    add(data, 1, ["4 is the answer", "the answer is 5"])
    (sample,) = shown(data)["samples"]
    assert (sample["step"], sample["split"], sample["prompts"]) == (1, "train", ["2+2="])
    words = sample["vocabulary"]
    assert len(set(words)) == len(words)
    first, second = sample["rows"]
    assert "".join(words[token] for token in first["tokens"]) == "4 is the answer"
    assert (first["reward"], first["correct"], second["correct"]) == (0.0, False, True)
    assert first["parts"] == {"answer": 0.0, "brevity": 1.0}
    assert first["advantages"] == -0.5, "the same for all tokens"
    assert first["rollout_log_probs"][:2] == [-0.1, -0.2]
    assert first["ref_log_probs"] is None


def test_curves_have_each_step_once_and_their_last_point() -> None:
    data = PageData()
    table = as_table(
        pick(step_batch({"2+2=": ["4"]}, [0.0]), 1, "train", 9), TokenTexts(tokenizer())
    )
    for step in range(1, 1001):
        rare = {"validation/reward": 0.5} if step % 500 == 0 else {}
        row = {"step": float(step), "reward/mean": step / 1000}
        data.add(SampleName(step, "train"), table, [row | rare])
    curves = shown(data)["curves"]
    assert "step" not in curves
    steps, values = curves["reward/mean"]
    assert (steps[0], steps[-1], values[-1]) == (1, 1000, 1.0)
    assert steps == sorted(set(steps))
    assert len(steps) <= viewer.MAX_POINTS + 1
    assert curves["validation/reward"] == [[500, 1000], [0.5, 0.5]]


def test_a_long_run_shows_its_first_and_last_sample_and_some_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewer, "MAX_TOKENS", 100)
    data = PageData()
    for step in range(1, 201):
        add(data, step, ["4 4 4 4 4"])
        samples = shown(data)["samples"]
        steps = [sample["step"] for sample in samples]
        assert (steps[0], steps[-1]) == (1, step)
        assert sum(len(row["tokens"]) for s in samples for row in s["rows"]) <= 100
    gaps = {b - a for a, b in pairwise(steps[:-1])}
    assert len(gaps) == 1, "the steps between are evenly spread"
    assert len(steps) > 4
    assert shown(data)["leftOut"] == 200 - len(steps)
    assert len(data) == 200


def test_a_long_completion_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "MAX_TOKENS_A_ROW", 3)
    data = PageData()
    add(data, 1, ["1 2 3 4 5 6"])
    (row,) = shown(data)["samples"][0]["rows"]
    assert len(row["tokens"]) == len(row["rollout_log_probs"]) == 3
    assert row["length"] > 3


def test_hostile_text_stays_inside_of_its_element() -> None:
    data = PageData()
    nasty = "</script><script>alert(1)</script><!--\u2028 \u202e\0 & 'x'\""
    add(data, 1, [nasty], **{"</script>": 1.0})
    text = data.as_json()
    assert not set("<>&\u2028\0\u202e") & set(text)
    (sample,) = shown(data)["samples"]
    words = "".join(sample["vocabulary"][token] for token in sample["rows"][0]["tokens"])
    assert words == nasty.replace("\u202e", "\ufffd").replace("\0", "\ufffd")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_null(value: float) -> None:
    batch = step_batch({"a": ["4 5", "4"]}, [value, 1.0])
    data = PageData()
    sample = pick(batch, 1, "train", 9)
    data.add(SampleName(1, "train"), as_table(sample, TokenTexts(tokenizer())), [])
    first, _ = shown(data)["samples"][0]["rows"]
    assert first["reward"] is None
    assert set(first["advantages"]) == {None}
