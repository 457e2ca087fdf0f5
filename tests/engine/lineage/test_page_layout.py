"""Drawings have no overlaps, run from left to right, and are found for any graph."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.lineage.page import BOX_HEIGHT, BOX_WIDTH, Drawing, arrange

KEYS = [str(number) for number in range(14)]
LINES = st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS)), max_size=40)


def check(drawing: Drawing, keys: list[str]) -> None:
    """Every box is in the picture, and none touches another."""
    assert list(drawing.boxes) == keys
    for x, y in drawing.boxes.values():
        assert 0 <= x <= drawing.width - BOX_WIDTH
        assert 0 <= y <= drawing.height - BOX_HEIGHT
    columns: dict[float, list[float]] = {}
    for x, y in drawing.boxes.values():
        columns.setdefault(x, []).append(y)
    for tops in columns.values():
        assert all(b - a >= BOX_HEIGHT for a, b in pairwise(sorted(tops)))
    places = sorted(columns)
    assert all(b - a >= BOX_WIDTH for a, b in pairwise(places))


@given(LINES.map(lambda lines: [(a, b) for a, b in lines if int(a) < int(b)]))
def test_without_cycles_every_line_runs_to_the_right(lines: list[tuple[str, str]]) -> None:
    drawing = arrange(KEYS, lines)
    check(drawing, KEYS)
    assert set(drawing.lines) == set(lines)
    for (parent, child), points in drawing.lines.items():
        assert points[0][0] == drawing.boxes[parent][0] + BOX_WIDTH
        assert points[-1][0] == drawing.boxes[child][0]
        assert all(b[0] >= a[0] for a, b in pairwise(points))
        # A line passes no box but its own two.
        for (x0, y0), (x1, y1) in pairwise(points):
            if y0 == y1 and x1 - x0 == BOX_WIDTH:
                assert not any(
                    x == x0 and y < y0 < y + BOX_HEIGHT for x, y in drawing.boxes.values()
                )


@given(LINES)
def test_cycles_and_loops_are_drawn_too(lines: list[tuple[str, str]]) -> None:
    drawing = arrange(KEYS, lines)
    check(drawing, KEYS)
    assert set(drawing.lines) == {(a, b) for a, b in lines if a != b}


def test_the_smallest_graphs() -> None:
    assert arrange([], []).boxes == {}
    one = arrange(["a"], [("a", "a"), ("a", "nowhere")])
    check(one, ["a"])
    assert one.lines == {}


def test_a_chain_is_a_straight_line() -> None:
    drawing = arrange(KEYS, pairwise(KEYS))
    assert len({y for _, y in drawing.boxes.values()}) == 1
    assert sorted(KEYS, key=lambda key: drawing.boxes[key][0]) == KEYS


def test_a_parent_that_comes_late_stands_before_its_child() -> None:
    drawing = arrange(["a", "b", "c", "late"], [("a", "b"), ("b", "c"), ("late", "c")])
    assert drawing.boxes["late"][0] == drawing.boxes["b"][0]


def test_thousands_of_nodes_are_arranged_in_seconds() -> None:
    import time

    keys = [str(number) for number in range(2000)]
    lines = [(keys[n // 3], keys[n]) for n in range(1, 2000)]
    start = time.monotonic()
    check(arrange(keys, lines), keys)
    assert time.monotonic() - start < 20


def test_what_closes_a_cycle_runs_backwards_and_the_rest_forwards() -> None:
    drawing = arrange(["a", "b", "c"], [("a", "b"), ("b", "c"), ("c", "a")])
    assert drawing.boxes["a"][0] < drawing.boxes["b"][0] < drawing.boxes["c"][0]
