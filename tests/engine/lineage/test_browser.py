"""The page in a real browser: clicks, keys, light and dark, and not one request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, find_chromium
from lineage_store import NASTY, make, make_nights, make_run, parent

from engine.lineage.audit import audit
from engine.lineage.lookup import review
from engine.lineage.page import render_page
from engine.storage.artifacts import Parent

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: `apt-get install chromium`, or set CHROMIUM"
)

CHOSEN = "document.querySelector('.node.chosen').getAttribute('aria-label')"
DETAIL = "Array.from(document.querySelectorAll('.detail')).filter(d => d.offsetParent)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


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


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, tmp_path: Path) -> None:
    page.complaints.clear()
    show(page, tmp_path, make_run(tmp_path).rl, verified=True)
    page.run("document.querySelector('button[data-zoom=in]').click()")
    assert page.requests == [(tmp_path / "page.html").as_uri()]
    assert page.complaints == []


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


def test_without_a_script_all_details_are_there(page: Page, tmp_path: Path) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(page, tmp_path, make_run(tmp_path).rl)
        assert len(titles(page)) == 5
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
