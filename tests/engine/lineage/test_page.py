"""The page is whole, escaped, and asks for nothing, as its source shows."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lineage_store import NASTY, Run, make, make_nights, make_run, parent

from engine.lineage.audit import audit
from engine.lineage.compare import compare
from engine.lineage.lookup import review
from engine.lineage.page import render_page
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
