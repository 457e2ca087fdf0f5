"""Layouts: ranks and coordinates, groups, and what a model can't take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import tiny_model

from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.parallel.layout import AXES, Layout, ModelShape, check_layout

sizes = st.integers(1, 4)
layouts = st.builds(Layout, pp=sizes, dp=sizes, fsdp=sizes, sp=sizes, tp=sizes)


@given(layouts)
def test_a_rank_and_its_coordinates_are_one_another_s_inverse(layout: Layout) -> None:
    for rank in range(layout.world_size):
        assert layout.index(layout.coordinates(rank), AXES) == rank


@given(layouts, st.sets(st.sampled_from(AXES)))
def test_groups_hold_every_rank_once(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        others = {
            tuple(layout.coordinates(rank)[axis] for axis in AXES if axis not in axes)
            for rank in group
        }
        assert len(others) == 1


def test_tp_ranks_are_neighbours() -> None:
    assert Layout(fsdp=2, tp=2).groups("tp") == [[0, 1], [2, 3]]
    assert Layout(fsdp=2, tp=2).groups("dp", "fsdp") == [[0, 2], [1, 3]]
    assert str(Layout(fsdp=2, tp=2)) == "fsdp=2 tp=2"
    assert str(Layout()) == "one rank"


def test_a_configuration_names_its_layout() -> None:
    assert Layout.of(ParallelConfig(dp=2, pp=3)) == Layout(dp=2, pp=3)
    assert Layout.of(ParallelConfig(dp=2, fsdp=2)).data_ranks == 4


def test_the_shape_of_a_model_is_read_from_its_configuration() -> None:
    shape = ModelShape.of(tiny_model("qwen2").config)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.layers) == (4, 2, 8, 2)
    with pytest.raises(ConfigError, match=r"gpt2.*use one rank"):
        ModelShape.of(tiny_model("gpt2").config)


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        (Layout(fsdp=2, tp=2), 2, "fsdp=2 tp=2 is one of 4 ranks, but there are 2"),
        (Layout(tp=3), 3, "tp=3 does not divide the model's num_attention_heads=4"),
        (Layout(sp=3), 3, r"sp=3 does not divide the model's num_attention_heads=4"),
        (Layout(pp=3), 3, "pp=3 stages are more than the model's 2 layers"),
    ],
)
def test_impossible_layouts_are_refused(layout: Layout, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(layout, ranks, ModelShape.of(tiny_model("qwen2").config))
