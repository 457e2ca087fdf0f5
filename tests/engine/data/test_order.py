"""The order of rows: by epoch, weight, difficulty and live pass rate; where each goes on from."""

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
from engine.data.order import (
    EpochOrder,
    Order,
    PassRates,
    difficulty_of,
    make_order,
    observed_rates,
)
from engine.errors import ConfigError, DataError

SOURCES = ["a"] * 30 + ["b"] * 10


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt": [f"p{i}" for i in range(40)],
            "row": range(40),
            "data_source": SOURCES,
            "extra_info": [{"level": f"Level {i % 3}"} for i in range(40)],
        }
    )


def weighted(weights: dict[str, float], seed: int = 0) -> Order:
    rows = [{"data_source": name} for name in SOURCES]
    return make_order(rows, seed, True, SamplingConfig(weights=weights), 1)


def test_sources_come_by_weight_and_each_row_once_an_epoch_of_its_source() -> None:
    order = weighted({"a": 1.0, "b": 3.0})
    rows = [order.next() for _ in range(4000)]
    shares = Counter(SOURCES[row] for row in rows)
    assert 2900 < shares["b"] < 3100
    for name, size in (("a", 30), ("b", 10)):
        own = [row for row in rows if SOURCES[row] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert order.epoch == shares["a"] // 30
    other = weighted({"a": 1.0, "b": 3.0}, seed=1)
    assert rows != [other.next() for _ in range(4000)]


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 9.0}])
def test_no_prompt_is_used_more_often_than_asked(weights: dict[str, float]) -> None:
    loader = PromptLoader(frame(), 20, 0, sampling=SamplingConfig(weights=weights, max_uses=2))
    uses = Counter(row["row"] for _ in range(4) for row in loader.next_batch())
    assert set(uses.values()) == {2}
    assert len(uses) == 40
    with pytest.raises(
        DataError, match=r"prompts were used 2 times; raise data\.sampling\.max_uses"
    ):
        loader.next_batch()


def test_an_epoch_goes_from_easy_to_hard() -> None:
    loader = PromptLoader(frame(), 40, 0, sampling=SamplingConfig(curriculum="extra_info.level"))
    first, second = loader.next_batch(), loader.next_batch()
    for batch in (first, second):
        levels = [row["extra_info"]["level"] for row in batch]
        assert levels == sorted(levels)
    assert [row["row"] for row in first] != [row["row"] for row in second]
    assert difficulty_of([{"x": 2}, {"x": "-1.5 of 7"}], "x") == [2.0, -1.5]
    with pytest.raises(
        DataError, match=r"sampling\.curriculum='x\.y': row 2 has None there, and no number"
    ):
        difficulty_of([{"x": {"y": 1}}, {"x": 2}], "x.y")


@given(
    seen=st.integers(0, 3000),
    weights=st.sampled_from([{}, {"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 0.5}]),
    curriculum=st.sampled_from(["", "extra_info.level"]),
    max_uses=st.sampled_from([0, 200]),
)
def test_a_resumed_order_goes_on_exactly(
    seen: int, weights: dict[str, float], curriculum: str, max_uses: int
) -> None:
    sampling = SamplingConfig(weights=weights, curriculum=curriculum, max_uses=max_uses)
    whole = PromptLoader(frame(), 1, 3, sampling=sampling)
    for _ in range(seen):
        whole.next_batch()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptLoader(frame(), 1, 3, sampling=sampling)
    resumed.load_state_dict(state)
    both = [[loader.next_batch()[0]["row"] for _ in range(60)] for loader in (whole, resumed)]
    assert both[0] == both[1]
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_of_another_mix_is_refused() -> None:
    mixed = PromptLoader(frame(), 1, 3, sampling=SamplingConfig(weights={"a": 1, "b": 2}))
    plain = PromptLoader(frame(), 1, 3)
    for one, other in ((mixed, plain), (plain, mixed)):
        with pytest.raises(DataError, match="weights is"):
            one.load_state_dict(other.state_dict())


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of \['a', 'b'\]: 'b' is in one only"):
        weighted({"a": 1.0})
    with pytest.raises(ConfigError, match="'c' is in one only"):
        weighted({"a": 1.0, "b": 1.0, "c": 1.0})
    with pytest.raises(ConfigError, match="weights must be above 0"):
        weighted({"a": 1.0, "b": 0.0})


def test_the_first_epoch_is_as_drawn_from_the_seed() -> None:
    order = EpochOrder(5, seed=0, shuffle=False)
    assert [order.next() for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]


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
def test_no_prompt_is_used_more_often_by_pass_rates_than_asked(weights: dict[str, float]) -> None:
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
        ({"pass_rate_recheck": 5}, "needs sampling.pass_rate"),
    ],
)
def test_bounds_that_hold_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingConfig.model_validate(values)
