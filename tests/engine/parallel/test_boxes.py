"""Boxes against sets of indices, written out one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reshard_cases import subtract_all

from engine.parallel.shard_maps import Box, chunk, disjoint_boxes, flat_range

SIDE = 6


def members(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(a, a + n) for a, n in zip(box.offset, box.size, strict=True)]
    return set(itertools.product(*ranges))


@st.composite
def boxes(draw: st.DrawFn, dims: int = 2, least: int = 0) -> Box:
    offset = tuple(draw(st.integers(0, SIDE - 1)) for _ in range(dims))
    return Box(offset, tuple(draw(st.integers(least, SIDE - a)) for a in offset))


@given(boxes(dims=3), boxes(dims=3))
def test_intersection_and_difference_of_two_boxes(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (members(common) if common else set()) == members(a) & members(b)
    counts = Counter(index for part in a.subtract(b) for index in members(part))
    assert set(counts) == members(a) - members(b)
    assert all(count == 1 for count in counts.values())


@given(boxes(), st.lists(boxes(), max_size=4))
def test_what_several_boxes_leave(box: Box, others: list[Box]) -> None:
    counts = Counter(index for part in subtract_all(box, others) for index in members(part))
    assert set(counts) == members(box).difference(*map(members, others))
    assert all(count == 1 for count in counts.values())


@given(st.lists(st.tuples(boxes(), st.sets(st.integers(0, 4), min_size=1)), max_size=6))
def test_tiles_give_each_element_once_with_all_its_holders(
    held: list[tuple[Box, set[int]]],
) -> None:
    expected: dict[tuple[int, ...], set[int]] = {}
    for box, ranks in held:
        for index in members(box):
            expected.setdefault(index, set()).update(ranks)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box, holders in disjoint_boxes(held):
        for index in members(box):
            assert index not in found
            found[index] = holders
    assert found == {index: tuple(sorted(ranks)) for index, ranks in expected.items()}


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.integers(0, 256), st.integers(0, 256))
def test_a_flat_run_walks_rows_in_order(size: tuple[int, ...], a: int, b: int) -> None:
    numbers = torch.arange(Box.whole(size).elements).view(size)
    start, stop = sorted((min(a, numbers.numel()), min(b, numbers.numel())))
    run = flat_range(size, start, stop)
    walked = [
        numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))].flatten()
        for box in run
    ]
    assert torch.cat([*walked, numbers.new_empty(0)]).tolist() == list(range(start, stop))
    assert len(run) <= max(1, 2 * len(size) - 1)


@given(st.integers(1, 40), st.integers(1, 9), boxes())
def test_chunks_are_those_of_torch(rows: int, parts: int, other: Box) -> None:
    expected = [len(part) for part in torch.arange(rows).chunk(parts)]
    got = [chunk(Box((7, 0), (rows, 2)), 0, parts, i) for i in range(parts)]
    assert [box.size[0] for box in got] == expected + [0] * (parts - len(expected))
    assert [box.offset[0] for box in got if box.elements] == [
        7 + sum(expected[:i]) for i in range(len(expected))
    ]
    assert chunk(other, None, parts, 0) == other


def test_where_a_box_begins_in_a_storage() -> None:
    fused = Box((8, 0), (4, 16))  # rows 8 to 12 lie at row 100 of a storage
    assert Box((9, 2), (1, 3)).start_in(fused, (100, 0)) == (101, 2)


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.elements == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []
    assert disjoint_boxes([(scalar, [1]), (scalar, [0])]) == [(scalar, (0, 1))]


def test_boxes_of_different_dimensions_do_not_mix() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
