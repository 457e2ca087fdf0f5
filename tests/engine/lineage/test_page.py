"""The lineage page, in a browser too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Page, browser, find_chromium
from hypothesis import given
from hypothesis import strategies as st
from lineage_store import NASTY, Run, make, make_nights, make_run, parent

from engine.lineage.audit import audit
from engine.lineage.compare import compare
from engine.lineage.lookup import review
from engine.lineage.page import BOX_HEIGHT, BOX_WIDTH, Drawing, arrange, render_page
from engine.storage.artifacts import Parent

VOID = {"meta", "link", "input", "br", "wbr"}


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
    assert source.count("scroll sideways") == 2, "metrics and nodes"


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


PROGRAM = find_chromium()


CHOSEN = "document.querySelector('.node.chosen').getAttribute('aria-label')"


DETAIL = "Array.from(document.querySelectorAll('.detail')).filter(d => d.offsetParent)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


def show(page: Page, folder: Path, *references: Path, verified: bool = False) -> None:
    """Render the lineage of `references` and open it."""
    found = review([str(r) for r in references], registry=False)
    file = folder / "page.html"
    file.write_text(render_page(found, audit(found) if verified else None))
    page.open(file)


def titles(page: Page) -> list[str]:
    """Headings of the details that are seen."""
    found: list[str] = page.run(f"{DETAIL}.map(d => d.querySelector('h2').textContent)")
    return found


needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: `apt-get install chromium`, or set CHROMIUM"
)


@needs_browser
def test_a_click_shows_details_and_marks_the_lines(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    show(page, tmp_path, run.rl)
    (title,) = titles(page)
    assert title.startswith("rl ")
    box = page.run(
        "(() => {const b = document.querySelector('.node.k-sft').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]})()"
    )
    page.click(*box)
    (title,) = titles(page)
    assert title.startswith("sft ")
    assert "weights" in page.run(f"{DETAIL}[0].textContent")
    assert page.run("document.querySelectorAll('.edge.near').length") == 2
    page.run("document.querySelector('.detail:not([hidden]) a[data-node]').click()")
    (title,) = titles(page)
    assert title.startswith("dataset ")


@needs_browser
def test_the_keyboard_reaches_every_node_and_follows_the_lines(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, make_run(tmp_path).rl)
    page.run("document.querySelector('button[data-zoom=fit]').focus()")
    page.press("Tab")
    seen = []
    for _ in range(5):
        seen.append(page.run("document.activeElement.getAttribute('aria-label')").split()[0])
        page.press("Enter")
        assert page.run(CHOSEN).split()[0] == seen[-1]
        page.press("Tab")
    assert seen[0] == "source"
    assert sorted(seen) == ["dataset", "evaluation", "rl", "sft", "source"]
    page.run("document.querySelector('.node.k-dataset').focus()")
    page.press(" ")
    page.press("ArrowRight")
    assert page.run(CHOSEN).startswith("sft ")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.run(CHOSEN).startswith("sft ")
    assert page.run("document.querySelectorAll('[aria-current]').length") == 1


@needs_browser
def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, tmp_path: Path) -> None:
    page.complaints.clear()
    show(page, tmp_path, make_run(tmp_path).rl, verified=True)
    page.run("document.querySelector('button[data-zoom=in]').click()")
    assert page.requests == [(tmp_path / "page.html").as_uri()]
    assert page.complaints == []


@needs_browser
def test_nothing_from_data_runs(page: Page, tmp_path: Path) -> None:
    page.complaints.clear()
    source = Parent(
        name=NASTY, kind="source", digest=NASTY.replace("/", ""), uri=f"javascript://{NASTY}"
    )
    data = make("dataset", "rows", source, config={NASTY: NASTY}, **{NASTY: 1.0})
    show(page, tmp_path, make("sft", NASTY, parent(NASTY, data)), verified=True)
    for number in range(3):
        page.run(f"document.querySelectorAll('tr[data-node]')[{number}].click()")
    assert NASTY in page.run("document.body.textContent")
    assert page.run("document.images.length") == 0
    assert page.requests == [(tmp_path / "page.html").as_uri()]
    assert page.complaints == []


@needs_browser
def test_light_and_dark_have_readable_contrast(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.dataset / "content.txt").write_text("poison")
    show(page, tmp_path, run.rl, verified=True)
    grounds = []
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        for selector in (".node .name", ".node .under", ".detail td", ".legend li", ".banner li"):
            worst = page.run(CONTRAST % selector)
            assert worst >= 4.5, (scheme, selector, worst)
        grounds.append(page.run("getComputedStyle(document.body).backgroundColor"))
    page.scheme("light")
    assert grounds[0] != grounds[1]


# WCAG 2.2's contrast ratio of a text and what is painted behind it.
CONTRAST = """
(() => {
  const parse = c => c.match(/[0-9.]+/g).map(Number);
  const light = c => {
    const [r, g, b] = parse(c).map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    const box = e.closest('.node');
    if (box) { return getComputedStyle(box.querySelector('.box')).fill; }
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (parse(c).length === 3 || parse(c)[3] === 1) { return c; }
    }
    return 'rgb(255, 255, 255)';
  };
  return Math.min(...Array.from(document.querySelectorAll('%s')).map(e => {
    const style = getComputedStyle(e);
    const one = light(e.closest('svg') ? style.fill : style.color), two = light(behind(e));
    return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  }));
})()
"""


@needs_browser
@pytest.mark.parametrize("nights", [1, 12])
def test_graphs_of_any_size_show_their_focus(page: Page, tmp_path: Path, nights: int) -> None:
    make_nights(tmp_path, nights)
    show(page, tmp_path, tmp_path / "raw.jsonl")
    assert page.run("document.querySelectorAll('svg .node').length") == 1 + 4 * nights
    visible = (
        "(() => {const b = document.querySelector('.node.chosen').getBoundingClientRect(),"
        "c = document.querySelector('.canvas').getBoundingClientRect();"
        "return b.left >= c.left && b.right <= c.right && b.top >= c.top "
        "&& b.bottom <= c.bottom})()"
    )
    assert page.run(visible) is True
    last = f"document.querySelectorAll('tr[data-node]')[{4 * nights}]"
    page.run(f"{last}.click()")
    assert page.run(visible) is True
    assert page.run("document.scrollingElement.scrollWidth <= innerWidth") is True
    name = page.run(f"{last}.querySelector('a').textContent")
    page.run(
        f"(() => {{const f = document.querySelector('.filter'); f.value = '{name}';"
        "f.dispatchEvent(new Event('input'))})()"
    )
    assert page.run("document.querySelectorAll('tr[data-node]:not([hidden])').length") == 1
    assert page.run("document.querySelectorAll('.node:not(.dim)').length") == 1


@needs_browser
def test_a_phone_scrolls_the_table_of_nodes_and_breaks_no_name(page: Page, tmp_path: Path) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=400, height=800, deviceScaleFactor=1, mobile=True,
    )  # fmt: skip
    try:
        show(page, tmp_path, make_run(tmp_path).rl)
        assert page.run("document.scrollingElement.scrollWidth <= innerWidth") is True
        assert page.run("document.querySelector('.hint').offsetHeight > 0") is True
        names = "[...document.querySelectorAll('.nodes a')]"
        assert page.run(f"{names}.length") == 5
        assert page.run(f"Math.max(...{names}.map(a => a.getClientRects().length))") == 1
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")


@needs_browser
def test_without_a_script_all_details_are_there(page: Page, tmp_path: Path) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(page, tmp_path, make_run(tmp_path).rl)
        assert len(titles(page)) == 5
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
