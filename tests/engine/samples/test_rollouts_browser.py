"""The page of rollouts in a real browser: filters, colours, two steps, hostile text, a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, find_chromium
from step_batches import step_batch, tokenizer

from engine.samples.sample_files import SampleFolder
from engine.samples.viewer import page_of
from engine.samples.writer import RolloutLog

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: `apt-get install chromium`, or set CHROMIUM"
)
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
ANSWERS = "Array.from(document.querySelectorAll('.answer')).map(e => e.textContent)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run of three samples; the prompt 2+2= is in each."""
    folder = tmp_path_factory.mktemp("run") / "rollouts"
    with RolloutLog(folder, tokenizer, every=5, rows=9, last_step=10) as log:
        history = []
        for step in range(1, 11):
            groups = {"2+2=": [f"four at {step}", "5"], f"{step}*1=": [NASTY]}
            batch = step_batch(groups, [1.0, 0.0, 0.5])
            log.rollouts("train", step, batch)
            history.append({"step": float(step), "reward/mean": step / 10, "a<b>": 1.0})
            log.step_done(history)
    return page_of(SampleFolder(folder))


@pytest.fixture
def file(text: str, tmp_path: Path) -> Path:
    """The page in a file of the test's own: what is chosen on a page is kept by its address."""
    path = tmp_path / "page.html"
    path.write_text(text)
    return path


def choose(page: Page, field: str, value: str) -> None:
    page.run(
        f"(() => {{const f = document.querySelector('[name={field}]'); f.value = {value!r};"
        "f.dispatchEvent(new Event('input', {bubbles: true}))})()"
    )


def answers(page: Page) -> list[str]:
    found: list[str] = page.run(ANSWERS)
    return found


def test_the_last_step_is_shown_and_others_can_be_reached(page: Page, file: Path) -> None:
    page.open(file)
    assert page.run("document.querySelector('.step h2').textContent") == "Step 10"
    assert set(answers(page)) == {"four at 10", "5", NASTY}
    page.run("document.querySelector('[data-move=\"-1\"]').click()")
    assert "four at 5" in answers(page)
    choose(page, "step", "train 1")
    assert "four at 1" in answers(page)
    assert page.run("document.querySelectorAll('.curves svg polyline').length") == 2


def test_rewards_and_words_filter_and_sort(page: Page, file: Path) -> None:
    page.open(file)
    choose(page, "low", "0.4")
    assert set(answers(page)) == {"four at 10", NASTY}
    choose(page, "high", "0.9")
    assert answers(page) == [NASTY]
    choose(page, "low", "")
    choose(page, "high", "")
    choose(page, "order", "low")
    assert answers(page)[0] == "5"
    choose(page, "text", "FOUR")
    assert answers(page) == ["four at 10"]


def test_tokens_have_the_colour_of_their_value(page: Page, file: Path) -> None:
    page.open(file)
    colour = (
        "(() => {const a = Array.from(document.querySelectorAll('.answer'))"
        ".find(e => e.textContent === %r);"
        "return getComputedStyle(a.querySelector('span')).backgroundColor})()"
    )
    good, bad = page.run(colour % "four at 10"), page.run(colour % "5")
    assert good.startswith("rgba(36, 113, 226, 0.5")
    assert bad.startswith("rgba(224, 122, 20, 0.5")
    choose(page, "colour", "gap")
    assert page.run(colour % "5") == page.run(colour % "four at 10"), "0.01 everywhere"
    choose(page, "colour", "none")
    assert page.run(colour % "5") == "rgba(0, 0, 0, 0)"
    disabled = "document.querySelector('[name=colour] option[value=value]').disabled"
    assert page.run(disabled) is True, "there is no critic"


def test_a_token_tells_its_values(page: Page, file: Path) -> None:
    page.open(file)
    page.run(
        "Array.from(document.querySelectorAll('.answer'))"
        ".find(e => e.textContent === '5').querySelector('span').click()"
    )
    words = page.run("document.querySelector('p.token').textContent")
    assert words.startswith('token 1: "5" · advantage −0.5 · log-prob when sampled −0.1')
    assert "gap 0.01" in words


def test_two_steps_stand_side_by_side_by_prompt(page: Page, file: Path) -> None:
    page.open(file)
    choose(page, "other", "train 1")
    heads = "Array.from(document.querySelectorAll('.step h2')).map(e => e.textContent)"
    assert page.run(heads) == ["Step 10", "Step 1"]
    first = (
        "Array.from(document.querySelectorAll('.step'))"
        ".map(s => s.querySelector('.prompt').textContent)"
    )
    assert page.run(first) == ["2+2=", "2+2="], "what both have comes first"
    places = page.run(
        "Array.from(document.querySelectorAll('.step'))"
        ".map(s => s.getBoundingClientRect()).map(b => [b.x, b.y])"
    )
    assert places[0][1] == places[1][1]
    assert places[0][0] < places[1][0]


def test_what_was_chosen_survives_a_new_page(page: Page, file: Path) -> None:
    page.open(file)
    choose(page, "step", "train 5")
    choose(page, "colour", "gap")
    page.reload()
    assert page.run("document.querySelector('.step h2').textContent") == "Step 5"
    assert page.run("document.querySelector('[name=colour]').value") == "gap"


def test_nothing_from_data_runs_and_nothing_is_asked_for(page: Page, file: Path) -> None:
    page.complaints.clear()
    page.open(file)
    assert NASTY in answers(page)
    assert page.run("document.images.length") == 0
    assert page.requests == [file.as_uri()]
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(page: Page, file: Path, scheme: str) -> None:
    page.scheme(scheme)
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360, height=740, deviceScaleFactor=2, mobile=True,
    )  # fmt: skip
    try:
        page.open(file)
        choose(page, "other", "train 1")
        assert page.run("document.scrollingElement.scrollWidth <= innerWidth") is True
        tops = (
            "Array.from(document.querySelectorAll('.step')).map(s => s.getBoundingClientRect().x)"
        )
        assert len(set(page.run(tops))) == 1, "one below the other"
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
        page.scheme("light")
