"""Rollout places of training ranks: the paper's example, nesting, and shards of prompts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.parallel.layout import Layout, RolloutLayout, rollout_layout

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, RolloutLayout]:
    layout = Layout(*(draw(SIZES) for _ in range(5)))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if layout.pp % n == 0]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if n <= layout.world_size // layout.pp]))
    return layout, rollout_layout(layout, pp, tp)


def copies(found: RolloutLayout) -> int:
    """Copies of the model in rollout."""
    return found.world_size // (found.pp * found.tp)


def test_the_paper_s_figure_8() -> None:
    """Train 1-4-2, generate 1-2-2-2: tensor parallel groups at regular intervals."""
    found = rollout_layout(Layout(dp=2, tp=4), tp=2)
    assert found.tp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (found.pp, found.tp, copies(found)) == (1, 2, 4)


def test_vllm_s_own_groups_are_neighbours() -> None:
    found = RolloutLayout((("dp", 2), ("pp", 2), ("tp", 2)))
    assert found.tp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(cases())
def test_each_place_is_taken_once(case: tuple[Layout, RolloutLayout]) -> None:
    layout, found = case
    assert found.world_size == layout.world_size == found.pp * found.tp * copies(found)
    places = {found.place(rank) for rank in range(found.world_size)}
    assert len(places) == found.world_size
    for group in found.tp_groups():
        assert [found.place(rank).tp for rank in group] == list(range(found.tp))
    sizes = Counter(found.place(rank).data for rank in range(found.world_size))
    assert set(sizes.values()) == {found.pp * found.tp}


@given(cases())
def test_a_training_shard_nests_in_the_rollout_shard(case: tuple[Layout, RolloutLayout]) -> None:
    """As fractions of stages and of rows; with tp below the trainer's the other way round."""
    layout, found = case
    shards = layout.fsdp * layout.sp
    for rank in range(layout.world_size):
        at, place = layout.coordinates(rank), found.place(rank)
        assert place.pp == at["pp"] * found.pp // layout.pp
        if found.tp <= layout.tp:
            assert place.tp == at["tp"] * found.tp // layout.tp
        elif found.tp <= layout.tp * shards:
            cut = at["tp"] * shards + at["fsdp"] * layout.sp + at["sp"]
            assert place.tp == cut * found.tp // (layout.tp * shards)
        else:  # copies of a shard are cut further
            assert place.tp * layout.tp // found.tp == at["tp"]


@given(cases())
def test_prompts_are_split_over_copies_of_the_model(case: tuple[Layout, RolloutLayout]) -> None:
    _, found = case
    shards = [found.data_shard(rank) for rank in range(found.world_size)]
    collecting = [rank for rank, shard in enumerate(shards) if shard.collects]
    assert sorted(found.place(rank).data for rank in collecting) == list(range(copies(found)))
    for rank, shard in enumerate(shards):
        assert (shard.index, shard.count) == (found.place(rank).data, copies(found))


@pytest.mark.parametrize(
    ("layout", "pp", "tp", "problem"),
    [
        (Layout(pp=4), 3, 1, "pp=3 stages can't be made of the trainer's 4"),
        (Layout(tp=4), 1, 3, "tp=3 can't be made of the trainer's tp=4"),
        (Layout(tp=2), 1, 4, "that times a divisor of dp · fsdp · sp = 1"),
        (Layout(pp=2, tp=2), 1, 4, "tp=4 can't be made"),
    ],
)
def test_sizes_that_do_not_nest(layout: Layout, pp: int, tp: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rollout_layout(layout, pp, tp)
