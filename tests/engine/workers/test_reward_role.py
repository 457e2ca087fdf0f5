"""The reward role: where scores land, and what becomes of samples without one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.batch import Batch
from engine.config import RewardConfig
from engine.data.collate import collate_completions, collate_prompts
from engine.data.templates import encode_prompt, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, DataError, RewardError
from engine.workers.reward_worker import RewardWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ("#### 0", "1+1=2\n#### 3", "four #### 4")  # the answers are 0, 2, 4
HERE = __name__


def flaky(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """Can't score a text with `3`, and has no number for one with `four`."""
    if any("3" in text for text in completions):
        raise ValueError("no judge for 3")
    return [float("nan") if "four" in text else 0.5 for text in completions]


def flaky_parts(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    scores = flaky(prompts, completions, **columns)
    return {"judge": scores, "length": [float(len(text)) for text in completions]}


def always_broken(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("the judge is out")


def by_mood(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    """Names its component after the first row's column `mood`."""
    return {columns["mood"][0]: [1.0] * len(completions)}


def completions(folder: Path, texts: Sequence[str] = TEXTS) -> Batch:
    tokenizer, rows = load_tokenizer(folder), arithmetic_rows(len(texts))
    source = collate_prompts(rows, [encode_prompt(tokenizer, row["prompt"]) for row in rows])
    ids = [encode_response(tokenizer, text) for text in texts]
    probs = [[0.0] * len(i) for i in ids]
    return collate_completions(source, range(len(texts)), ids, probs, pad_token_id=0)


def worker(folder: Path, name: str = "answer_match", **changes: Any) -> RewardWorker:
    config = RewardConfig.model_validate({"name": name, "isolation": "none"} | changes)
    return RewardWorker(WorkerContext("reward"), model_path=str(folder), config=config)


def totals(out: Batch) -> list[float]:
    return out["token_level_scores"].sum(1).tolist()


def test_reward_lands_on_the_last_token(tiny_folder: Path) -> None:
    batch = completions(tiny_folder)
    out = worker(tiny_folder).score(batch)
    scores, lengths = out["token_level_scores"], batch["response_mask"].sum(1).long()
    assert scores.dtype == torch.float32
    assert scores.shape == batch["responses"].shape
    assert totals(out) == [1.0, 0.0, 1.0]
    assert scores[0, lengths[0] - 1] == scores[2, lengths[2] - 1] == 1.0
    assert list(out.columns["completion"]) == list(TEXTS)
    assert list(out.columns["has_format"]) == [True, True, False]
    assert not out["reward_error"].any()
    assert not out["reward_failed"].any()
    assert list(out.columns["reward_error_cause"]) == ["", "", ""]
    assert "reward_components" not in out
    assert "reward_component_names" not in out


def test_components_are_weighed_and_kept(tiny_folder: Path) -> None:
    role = worker(tiny_folder, "answer_and_format", weights={"format": 0.25})
    out = role.score(completions(tiny_folder))
    assert out["reward_components"].dtype == torch.float32
    assert out["reward_components"].tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert totals(out) == [1.25, 0.25, 1.0]
    assert list(out.columns["reward_component_names"]) == [("answer", "format")] * 3


def test_weights_of_unknown_components_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['style'\].*\['answer', 'format'\]"):
        worker(tiny_folder, "answer_and_format", weights={"style": 1.0})
    with pytest.raises(ConfigError, match=r"its components are \[\]: correct or remove"):
        worker(tiny_folder, weights={"answer": 1.0})
    late = worker(tiny_folder, f"{HERE}:flaky_parts", weights={"style": 1.0})
    with pytest.raises(ConfigError, match=r"\['style'\].*\['judge', 'length'\]"):
        late.score(completions(tiny_folder))


@pytest.mark.parametrize("on_error", ["drop", "zero"])
@pytest.mark.parametrize("name", ["flaky", "flaky_parts"])
def test_a_failed_sample_scores_0_and_is_marked(
    tiny_folder: Path, name: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = worker(tiny_folder, f"{HERE}:{name}", on_error=on_error, weights={})
    out = role.score(completions(tiny_folder))
    assert out["reward_error"].tolist() == [False, True, True]
    assert out["reward_failed"].tolist() == [False, on_error == "drop", on_error == "drop"]
    assert list(out.columns["reward_error_cause"]) == ["", "raised", "not_finite"]
    if name == "flaky":
        assert totals(out) == [0.5, 0.0, 0.0]
    else:
        assert out["reward_components"].tolist() == [[0.5, 6.0], [0.0, 0.0], [0.0, 0.0]]
        assert totals(out) == [6.5, 0.0, 0.0]
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert [record.name for record in warnings] == ["engine.rewards"]


def test_with_fail_one_sample_ends_the_call(tiny_folder: Path) -> None:
    role = worker(tiny_folder, f"{HERE}:flaky", on_error="fail")
    with pytest.raises(RewardError, match="'flaky' raised ValueError: no judge for 3"):
        role.score(completions(tiny_folder))
    assert not role.score(completions(tiny_folder, ["#### 1", "x"]))["reward_error"].any()


def test_a_reward_that_ends_its_process_costs_its_sample_alone(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_reward.py").write_text(
        "import os\n"
        "def reward(prompts, completions, **columns):\n"
        "    return [os._exit(3) if '3' in text else 0.5 for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    role = worker(tiny_folder, "exiting_reward:reward", isolation="process")
    try:
        out = role.score(completions(tiny_folder))
    finally:
        role.close()
    assert totals(out) == [0.5, 0.0, 0.5]
    assert out["reward_failed"].tolist() == [False, True, False]
    assert list(out.columns["reward_error_cause"]) == ["", "crashed", ""]


@pytest.mark.parametrize("on_error", ["drop", "zero", "fail"])
def test_a_reward_that_always_fails_ends_the_call(tiny_folder: Path, on_error: str) -> None:
    role = worker(tiny_folder, f"{HERE}:always_broken", on_error=on_error)
    with pytest.raises(RewardError, match="'always_broken' raised ZeroDivisionError: the judge"):
        role.score(completions(tiny_folder))


def test_component_names_must_stay(tiny_folder: Path) -> None:
    role, batch = worker(tiny_folder, f"{HERE}:by_mood"), completions(tiny_folder)
    happy = Batch(batch.as_dict(), {**batch.columns, "mood": ["happy"] * 3})
    mixed = Batch(batch.as_dict(), {**batch.columns, "mood": ["sad", "happy", "sad"]})
    sad = Batch(batch.as_dict(), {**batch.columns, "mood": ["sad"] * 3})
    assert role.score(happy).columns["reward_component_names"][0] == ("happy",)
    out = role.score(mixed)
    assert list(out.columns["reward_error_cause"]) == ["malformed", "", "malformed"]
    with pytest.raises(RewardError, match=r"\['sad'\] where components \['happy'\] was"):
        role.score(sad)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]])  # row 1 fails before or after another
@pytest.mark.parametrize("name", ["answer_and_format", f"{HERE}:flaky", f"{HERE}:flaky_parts"])
def test_parts_equal_the_whole_even_where_one_has_no_score(
    tiny_folder: Path, name: str, order: list[int]
) -> None:
    batch = completions(tiny_folder).rows(order)
    whole = worker(tiny_folder, name).score(batch)
    role = worker(tiny_folder, name)
    parts = Batch.concat([role.score_part(batch.rows([i])) for i in range(3)])
    assert parts.names == whole.names
    for field in whole.names:
        torch.testing.assert_close(parts[field], whole[field], rtol=0, atol=0)
    assert {k: list(v) for k, v in parts.columns.items()} == {
        k: list(v) for k, v in whole.columns.items()
    }


def test_a_part_may_fail_as_a_whole(tiny_folder: Path) -> None:
    role = worker(tiny_folder, f"{HERE}:always_broken", weights={"unknown": 1.0})
    out = role.score_part(completions(tiny_folder))
    assert out["reward_failed"].all()
    assert totals(out) == [0.0, 0.0, 0.0]
    empty = role.score_part(completions(tiny_folder).rows([]))
    assert len(empty) == 0
    assert empty["reward_error"].dtype == torch.bool


def test_a_part_that_was_scored_must_have_the_components_of_the_others(tiny_folder: Path) -> None:
    named = worker(tiny_folder, f"{HERE}:flaky_parts").score(completions(tiny_folder, ["#### 1"]))
    plain = worker(tiny_folder, f"{HERE}:flaky").score(completions(tiny_folder, ["#### 1"]))
    with pytest.raises(DataError, match="reward_component_names"):
        Batch.concat([named, plain])
