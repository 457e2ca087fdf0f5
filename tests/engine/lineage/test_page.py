"""The page is whole, escaped, and asks for nothing, as its source shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lineage_store import NASTY, Run, make, make_nights, make_run, parent

from engine.lineage.audit import audit
from engine.lineage.compare import compare
from engine.lineage.lookup import review
from engine.lineage.page import BOX_HEIGHT, BOX_WIDTH, Drawing, arrange, render_page
from engine.storage.artifacts import Parent

VOID = {"meta", "link", "input", "br"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def page_of(*references: Path | str, verified: bool = False, diff: bool = False) -> str:
    found = review([str(reference) for reference in references], registry=False)
    difference = compare(found.graph, found.starts[0], found.starts[-1]) if diff else None
    return render_page(found, audit(found) if verified else None, difference)


class Reader(HTMLParser):
    """Collects a page's tags, and fails where they don't nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and (not class_ or class_ in (attributes.get("class") or "").split())
        ]


def test_every_node_has_a_box_a_row_and_its_details(run: Run) -> None:
    page = Reader(page_of(run.rl))
    boxes = page.all("a", "node")
    details = page.all("section", "detail")
    assert len(boxes) == len(details) == 5
    assert {box["href"] for box in boxes} == {f"#{detail['id']}" for detail in details}
    assert {row.get("data-node") for row in page.all("tr")} >= {d["id"] for d in details}
    assert len(page.all("path", "edge")) == 6
    assert all(box["aria-label"] for box in boxes)
    assert [box["class"] for box in boxes if "focus" in str(box["class"])] == ["node k-rl  focus"]


def test_the_page_asks_for_nothing(run: Run) -> None:
    source = page_of(run.rl, verified=True)
    page = Reader(source)
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,"))
        assert not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp|WebSocket", source)
    (policy,) = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert str(policy).startswith("default-src 'none';")
    assert "unsafe" not in str(policy)


def test_what_is_wrong_is_on_the_page(run: Run) -> None:
    assert "Not verified" in page_of(run.rl)
    assert "Verified: 5 artifacts" in page_of(run.evaluation, verified=True)
    (run.dataset / "content.txt").write_text("poison")
    run.raw.unlink()
    source = page_of(run.evaluation, verified=True)
    assert "2 things are not as recorded" in source
    classes = [str(box["class"]) for box in Reader(source).all("a", "node")]
    assert [c.split()[1:3] for c in classes if "fault" in c] == [["k-dataset", "fault"]]
    assert [c.split()[1:3] for c in classes if "missing" in c] == [["k-source", "missing"]]


def test_differences_are_on_the_page(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path, "other")
    source = page_of(run.rl, other.rl, diff=True)
    Reader(source)
    assert "what differs" in source
    assert '<code class="was">better</code>' in source
    assert '<code class="is">other</code>' in source


def test_no_text_from_data_is_markup() -> None:
    source = Parent(name=NASTY, kind="source", digest=NASTY.replace("/", ""), uri=f"s3://{NASTY}")
    data = make("dataset", "rows", source, config={NASTY: {NASTY: NASTY}}, **{NASTY: 1.0})
    other = make("sft", "x", parent(NASTY, data), config={"\u202eevil\x00\ud800": "\x1b"})
    for page in (page_of(other), page_of(data, other, diff=True, verified=True)):
        reader = Reader(page)
        assert reader.all("img") == []
        assert len(reader.all("script")) == 1
        assert "alert(1)" in page
        assert "<img" not in page
        assert not set("\u202e\x00\ud800\x1b") & set(page)
        page.encode()


def test_one_node_and_hundreds(tmp_path: Path) -> None:
    assert len(Reader(page_of(make("sft", "alone"))).all("a", "node")) == 1
    make_nights(tmp_path, 60)
    source = page_of(tmp_path / "raw.jsonl")
    assert len(Reader(source).all("a", "node")) == 1 + 4 * 60
    assert len(source) < 3 << 20


# Drawings have no overlaps, run from left to right, and are found for any graph.

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
    for (above, below), points in drawing.lines.items():
        assert points[0][0] == drawing.boxes[above][0] + BOX_WIDTH
        assert points[-1][0] == drawing.boxes[below][0]
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
