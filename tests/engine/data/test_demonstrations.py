"""Sources of the environments' rows: the contract, held-out prompts, and players with habits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.config import ContaminationConfig, DataConfig
from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint
from engine.data.rows import prompt_text
from engine.data.sources import load_splits, source_digest, splits_are_disjoint
from engine.errors import ConfigError
from engine.promotion.gate import trained_on

SOURCES = ("guessing", "products", "python_tasks")


def config(source: str, **options: Any) -> DataConfig:
    sizes = {"sft_size": 400, "train_size": 100, "validation_size": 16, "test_size": 60}
    return DataConfig.model_validate(
        {"source": source, "options": options, "plugins": [f"examples.{source}"], **sizes}
    )


@pytest.mark.parametrize("source", SOURCES)
def test_rows_keep_the_contract_and_nothing_held_out_is_trained_on(source: str) -> None:
    splits = load_splits(config(source), 0)
    sizes = {name: len(frame) for name, frame in splits.frames().items()}
    assert sizes == {
        "sft_train": 400,
        "sft_validation": 16,
        "train": 100,
        "validation": 16,
        "test": 60,
    }
    for name, frame in splits.frames().items():
        check(frame, SFT_PAIRS if name.startswith("sft_") else RL_PROMPTS, name)
    check_disjoint(splits.frames())
    assert splits_are_disjoint(config(source))
    training = [prompt_text(p) for n in ("sft_train", "train") for p in splits.frames()[n].prompt]
    rule = ContaminationConfig()
    test = [prompt_text(prompt) for prompt in splits.test["prompt"]]
    assert not any(trained_on(test, training, rule.ngram, rule.overlap))


@pytest.mark.parametrize("source", SOURCES)
def test_seed_and_options_decide(source: str) -> None:
    first = load_splits(config(source), 0)
    assert first.train.equals(load_splits(config(source), 0).train)
    assert not first.train.equals(load_splits(config(source), 1).train)
    assert first.source_digest == source_digest(config(source), 0)
    assert first.source_digest != source_digest(config(source), 1)
    options: Mapping[str, Any] = {
        "guessing": {"careless": 0.0},
        "products": {"calls": 0.5},
        "python_tasks": {"bare": 0.1},
    }[source]
    assert first.source_digest != source_digest(config(source, **options), 0)


def test_a_turn_is_learned_after_all_that_came_before() -> None:
    rows = load_splits(config("products", calls=1.0, slips=0.0, malformed=0.0), 0).sft_train
    call, answer = rows.iloc[0], rows.iloc[1]
    assert [message["role"] for message in call["prompt"]] == ["user"]
    assert call["response"].startswith('<tool_call>{"name": "calculator"')
    assert [m["role"] for m in answer["prompt"]] == ["user", "assistant", "tool"]
    assert answer["prompt"][1]["content"] == call["response"]
    assert answer["response"] == f"#### {answer['prompt'][2]['content']}"
    assert (call["extra_info"]["turn"], answer["extra_info"]["turn"]) == (0, 1)


def test_shares_are_kept() -> None:
    shares = {"calls": 0.3, "slips": 0.2, "malformed": 0.1}
    rows = load_splits(config("products", **shares), 0).sft_train
    first = rows[[row["turn"] == 0 for row in rows["extra_info"]]]["response"]
    calls = first.str.contains("tool_call")
    assert 0.5 < calls.mean() < 0.7
    assert 0.05 < (calls & ~first.str.contains("}}</")).mean() < 0.15


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("guessing", {"span": 1}, "make no games"),
        ("products", {"calls": 0.9, "slips": 0.9}, r"calls \+ slips \+ malformed is 1\.9"),
        ("products", {"digits": [3, 2]}, "the lower first"),
        ("python_tasks", {"bare": 2}, r"data\.options\.bare=2\.0 must be a share"),
        ("guessing", {"speed": 1}, r"data\.options\.speed"),
    ],
)
def test_options_that_make_no_rows(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_splits(config(source, **options), 0)


def test_more_held_out_tasks_than_there_are() -> None:
    with pytest.raises(ConfigError, match=r"data\.test_size=5000"):
        load_splits(config("python_tasks").model_copy(update={"test_size": 5000}), 0)
