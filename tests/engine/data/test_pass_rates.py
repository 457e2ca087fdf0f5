"""Prompts chosen by their live pass rates: bounds, second chances, uses, exact resumption."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.batch import Batch
from engine.config import SamplingConfig
from engine.data.loader import PromptLoader
from engine.data.order import PassRates, observed_rates
from engine.errors import DataError

SIZE = 12


def loader(batch: int = 2, size: int = SIZE, **sampling: Any) -> PromptLoader:
    frame = pd.DataFrame(
        {
            "prompt": [[{"role": "user", "content": f"p{i}"}] for i in range(size)],
            "row": range(size),
            "data_source": ["a"] * (size // 2) + ["b"] * (size - size // 2),
        }
    )
    config = SamplingConfig.model_validate({"pass_rate": [0.1, 0.9]} | sampling)
    return PromptLoader(frame, batch, 0, sampling=config)


def test_an_epoch_has_the_prompts_between_the_bounds_and_tries_the_others_again() -> None:
    rates = PassRates(4, (0.1, 0.9), recheck=2, max_uses=0, at_least=1)
    for row, rate in enumerate((0.0, 1.0, 0.1, 0.9)):
        rates.observe(row, rate)
    epochs = []
    for rate in (0.0, 0.0, 0.0, 0.5):
        rates.observe(0, rate)
        rates.begin_epoch()
        epochs.append(rates.chosen.tolist())
    inside = [False, False, True, True]
    assert epochs == [inside, inside, [True] * 4, [True, False, True, True]]


def test_what_is_solved_or_hopeless_is_not_in_the_loader_s_next_epoch() -> None:
    subject = loader(2, pass_rate_recheck=0)
    rates = {0: 0.0, 1: 1.0, 2: 0.1, 3: 0.9}
    first = []
    for _ in range(SIZE // 2):
        rows = subject.next_batch()
        first += [row["row"] for row in rows]
        for row in rows:
            subject.observe(row["prompt"], rates.get(row["row"], 0.5))
    assert sorted(first) == list(range(SIZE))
    late = set(first[-2:])  # observed when the next epoch was drawn already
    second = [row["row"] for _ in range(5) for row in subject.next_batch()]
    assert len(set(second)) == 10
    assert not {0, 1} & {*second} - late


def test_a_batch_s_worth_of_prompts_is_left_and_they_are_the_nearest() -> None:
    rates = PassRates(5, (0.4, 0.6), recheck=0, max_uses=0, at_least=3)
    for row, rate in enumerate((0.0, 0.3, 0.5, 0.7, 1.0)):
        rates.observe(row, rate)
    rates.begin_epoch()
    assert rates.chosen.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 3.0}])
def test_no_prompt_is_used_more_often_than_asked(weights: dict[str, float]) -> None:
    subject, draw = loader(1, max_uses=3, weights=weights), random.Random(0)
    uses: Counter[int] = Counter()
    for _ in range(3 * SIZE):
        (row,) = subject.next_batch()
        uses[row["row"]] += 1
        subject.observe(row["prompt"], draw.choice([0.0, 0.5, 1.0]))
    with pytest.raises(DataError, match=r"were used 3 times; raise data\.sampling\.max_uses"):
        subject.next_batch()
    assert set(uses.values()) == {3}
    assert len(uses) == SIZE


@given(
    seen=st.integers(0, 60),
    ahead=st.integers(0, 3),
    weights=st.sampled_from([{}, {"a": 1.0, "b": 2.0}]),
    max_uses=st.sampled_from([0, 90]),
)
def test_a_resumed_loader_goes_on_exactly(
    seen: int, ahead: int, weights: dict[str, float], max_uses: int
) -> None:
    given: dict[str, Any] = {"weights": weights, "max_uses": max_uses, "pass_rate_recheck": 1}
    whole, draw = loader(1, **given), random.Random(seen)
    waiting: list[Any] = []  # given, and not observed yet, as with prompts that are prefetched
    for _ in range(seen):
        waiting += whole.next_batch()
        if len(waiting) > ahead:
            whole.observe(waiting.pop(0)["prompt"], draw.random())
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = loader(1, **given)
    resumed.load_state_dict(state)
    both = []
    for subject in (whole, resumed):
        chosen = random.Random(1)
        both.append([])
        for _ in range(40):
            (row,) = subject.next_batch()
            both[-1].append(row["row"])
            subject.observe(row["prompt"], chosen.random())
    assert both[0] == both[1]
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_of_other_bounds_or_none_is_refused() -> None:
    plain = loader(pass_rate=None)
    for other in (plain, loader(pass_rate=[0.2, 0.8]), loader(pass_rate_recheck=1)):
        with pytest.raises(DataError, match="pass_rate"):
            loader().load_state_dict(other.state_dict())


def test_rates_are_of_scored_completions_group_by_group() -> None:
    first, second, third = ([{"role": "user", "content": text}] for text in "abc")
    batch = Batch(
        {
            "group_ids": torch.tensor([0, 1, 0, 1, 2]),
            "reward_error": torch.tensor([False, False, False, True, True]),
        },
        {
            "prompt": [first, second, first, second, third],
            "reward_correct": [True, False, False, True, True],
        },
    )
    assert list(observed_rates(batch)) == [(first, 0.5), (second, 0.0)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pass_rate": [0.9, 0.1]}, "must be two shares, the lower first"),
        ({"pass_rate": [0.0, 1.5]}, "must be two shares"),
        ({"pass_rate_recheck": 5}, "has no effect without"),
    ],
)
def test_bounds_that_hold_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingConfig.model_validate(values)
