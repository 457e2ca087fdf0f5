"""Orders of rows: shares of sources, easy rows first, uses at most as asked, exact resumption."""

from __future__ import annotations

import json
from collections import Counter

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SamplingConfig
from engine.data.loader import PromptLoader
from engine.data.order import EpochOrder, WeightedOrder, difficulty_of
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


def test_sources_come_by_weight_and_each_row_once_an_epoch_of_its_source() -> None:
    order = WeightedOrder(SOURCES, {"a": 1.0, "b": 3.0}, seed=0)
    rows = [order.next() for _ in range(4000)]
    shares = Counter(SOURCES[row] for row in rows)
    assert 2900 < shares["b"] < 3100
    for name, size in (("a", 30), ("b", 10)):
        own = [row for row in rows if SOURCES[row] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert order.epoch == shares["a"] // 30
    assert rows != [
        WeightedOrder(SOURCES, {"a": 1.0, "b": 3.0}, seed=1).next() for _ in range(4000)
    ]


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
        WeightedOrder(SOURCES, {"a": 1.0}, 0)
    with pytest.raises(ConfigError, match="'c' is in one only"):
        WeightedOrder(SOURCES, {"a": 1.0, "b": 1.0, "c": 1.0}, 0)
    with pytest.raises(ConfigError, match="weights must be above 0"):
        WeightedOrder(SOURCES, {"a": 1.0, "b": 0.0}, 0)


def test_the_first_epoch_is_as_drawn_from_the_seed() -> None:
    order = EpochOrder(5, seed=0, shuffle=False)
    assert [order.next() for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]
