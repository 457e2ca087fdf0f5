"""The HTML page: well-formed, self-contained, escaped, the same each time, and complete."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pandas as pd
import pytest
from browser import browser, find_chromium

from engine.errors import DataError
from engine.evaluation import plots
from engine.evaluation.report_page import Link, Verdict, render_report
from engine.evaluation.summary import Statistics, compare_sets, summarise

VOID = {"meta", "col"}

STATISTICS = Statistics(2, 0.95, 0)


class Page(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())


@pytest.fixture
def render(before, after):
    def call(first=before, second=after, **options):
        comparison = summarise(first, second, STATISTICS)
        return render_report(comparison, first, second, **options)

    return call


@pytest.fixture
def plain(render):
    """The page of the two models and nothing else, made once for all tests."""
    if not _plain:
        _plain.append(render())
    return _plain[0]


_plain = []


def test_page_tells_the_numbers(render):
    text = Page(render(facts={"run": "r-17"})).text
    assert "No clear difference between the RL model and the warm start" in text
    assert "6 held-out problems: 3 fixed, 1 broken" in text
    assert "r-17" in text
    assert "33.3 %" in text  # pass@1 before
    assert "66.7 %" in text  # pass@1 after
    assert "+33.3 points" in text
    for row in ("pass@1, greedy", "pass@2, sampled", "majority of 4", "format kept"):
        assert row in text


def test_verdict_and_links_are_named(render, plain):
    assert 'class="verdict' not in plain
    facts = {"lineage": Link("the <page>", "lineage.html")}
    verdict = Verdict(False, "Not promoted: policy version 3", "the gain <0 is too small")
    page = render(facts=facts, verdict=verdict)
    assert "Not promoted: policy version 3 the gain <0 is too small" in Page(page).text
    assert '<a href="lineage.html">the &lt;page&gt;</a>' in page


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no browser: `apt-get install chromium`")
def test_a_phone_shows_the_page_without_scrolling_it_sideways(render, before, after, tmp_path):
    sets = compare_sets(before, after, {"test": 0}, STATISTICS)
    curves = {"reward": [0.1, 0.4], "KL": [0.1, 0.2]}
    (tmp_path / "page.html").write_text(render(curves=curves, sets=sets))
    with browser(find_chromium()) as page:
        for width, hints in ((390, True), (1200, False)):
            page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width, height=844, deviceScaleFactor=2, mobile=hints,
            )  # fmt: skip
            page.open(tmp_path / "page.html")
            assert page.run("document.documentElement.scrollWidth") <= width
            boxes = "[...document.querySelectorAll('.scroll')]"
            scrolls = page.run(f"{boxes}.map(b => b.scrollWidth > b.clientWidth)")
            assert scrolls == [hints] * 3
            seen = page.run("[...document.querySelectorAll('.hint')].map(h => h.offsetHeight > 0)")
            assert seen == scrolls, "what is wider than the screen says so"
            scale = "s.clientWidth / s.viewBox.baseVal.width"
            assert (
                page.run(f"Math.min(...[...document.querySelectorAll('svg')].map(s => {scale}))")
                > 0.9
            )


def test_letters_of_a_picture_are_readable_on_a_phone(render):
    """A phone's 390 px leave 358 to a picture, whose smallest letters are 8 of its points."""
    curves = {name: [0.1, 0.4, 0.2] for name in ("reward", "KL", "entropy", "length")}
    page = render(curves=curves)
    widths = [float(w) for w in re.findall(r'<svg [^>]*viewBox="0 0 ([0-9.]+) ', page)]
    assert len(widths) == 2 + len(curves)
    assert all(8 * 358 / width > 8.5 for width in widths)


def test_a_curve_over_an_equal_one_is_dashed() -> None:
    """Or the second colour would hide the first."""
    first, other = {1: 0.1, 2: 0.4}, {1: 0.2, 2: 0.3}

    def dashed(*runs: dict[int, float]) -> int:
        picture = plots.curves({"reward": dict(zip("abc", runs, strict=False))})["reward"]
        return len(re.findall(r"stroke-dasharray: [1-9]", picture))

    assert dashed(first, other, dict(first)) == dashed(first, other, {1: 0.3, 2: 0.1}) + 1


def test_short_responses_are_counted_in_whole_tokens(monkeypatch):
    ticks = []
    keep = lambda figure, name: ticks.extend(figure.axes[0].get_xticks()) or ""  # noqa: E731
    monkeypatch.setattr(plots, "_to_svg", keep)
    plots.length_histogram([2.0, 2.5, 3.0], [3.0, 3.5, 4.0], ("before", "after"))
    assert ticks == [int(tick) for tick in ticks]


def test_tables_show_that_they_scroll(plain):
    parsed = Page(plain)
    boxes = [name for name, value in parsed.attributes if (name, value) == ("class", "scroll")]
    assert len(boxes) == parsed.tags.count("table") == 2
    assert parsed.text.count("scroll sideways") == 2
    css = re.search(r"<style>(.*?)</style>", plain, re.DOTALL)[1]
    assert "no-repeat scroll" in css, "a shadow at the edge"
    hint = css[css.index("@media") :]
    assert re.search(r"\.hint \{\s*display: block", hint), "words on a narrow screen"


def test_headline_follows_the_interval(render, make_rows, after):
    none = make_rows("warm_start", ["0"] * 6, [["0"] * 4] * 6)
    every = make_rows("rl", list(after["ground_truth"]), [["0"] * 4] * 6)
    assert "is better than the warm start" in render(none, every)
    assert "The warm start is worse than the RL model" in render(every, none)


def test_examples_of_each_kind_and_no_more_than_asked(render, plain):
    text = Page(plain).text
    assert "Fixed: 3 of 6 problems" in text
    assert "Broken: 1 of 6 problems" in text
    assert "Still wrong: 1 of 6 problems" in text
    assert "Question 0" not in text  # right before and after
    assert all(f"Question {i}" in text for i in (1, 2, 3, 4, 5))
    assert "no answer" in text
    one = Page(render(examples=1)).text
    assert sum(f"Question {i}" in one for i in (1, 2, 4)) == 1


def test_text_from_data_is_escaped(render, before, after):
    evil = "<script>alert('x')</script> & \"q\" \0"
    for rows in (before, after):
        rows["prompt"] = evil
    after.loc[1, "greedy_completion"] = "<img src=x onerror=alert(1)>" + "long " * 2000
    page = render(facts={"<b>label</b>": "<i>value</i> \ud800"})
    parsed = Page(page)
    assert not {"script", "img", "b>label"} & set(parsed.tags)
    assert "<script>alert('x')</script> & \"q\" \N{REPLACEMENT CHARACTER}" in parsed.text
    assert "<b>label</b> <i>value</i> \N{REPLACEMENT CHARACTER}" in parsed.text.replace("><", "> <")
    assert "characters)" in parsed.text
    assert page.count("long ") < 1000
    page.encode("utf-8")


def test_page_loads_nothing(render):
    page = render(curves={"reward": [0.1, 0.2]})
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    links = [v for name, v in parsed.attributes if name in ("src", "href", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_ids_are_unique_and_every_reference_resolves(render):
    page = render(curves={"reward": [0.1, 0.2], "kl": [0.0, 0.1]})
    ids = re.findall(r'\bid="([^"]+)"', page)
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert len(ids) == len(set(ids))
    assert references
    assert {a or b for a, b in references} <= set(ids)


def test_style_touches_nothing_but_our_pages(plain):
    css = re.search(r"<style>(.*?)</style>", plain, re.DOTALL)[1]
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)
    selectors = [s for block in re.findall(r"([^{}]+)\{", css) for s in block.split(",")]
    assert selectors
    ours = (".page", ".lineage", ".evaluation", ".rollouts", "body:has(> .", "@media")
    assert all(s.strip().startswith(ours) for s in selectors)


def test_same_input_same_page(render):
    options = {"facts": {"run": "r"}, "curves": {"reward": [0.1, 0.4, 0.2]}}
    assert render(**options) == render(**options)


def test_curves_are_drawn_with_gaps_and_left_out_when_empty(render):
    plain = Page(render(curves={"reward": []}))
    assert "Training" not in plain.text
    assert plain.tags.count("svg") == 2
    curves = {"reward": [0.1, float("nan"), float("inf"), 0.4], "kl": [float("nan")] * 3}
    drawn = render(curves=curves | {"entropy": [1.0]})
    assert Page(drawn).tags.count("svg") == 2 + 3, "one picture a curve"
    assert "Training" in Page(drawn).text
    assert not re.search(r'd="[^"]*(nan|inf)', drawn)


def test_other_problems_are_refused(before, after):
    comparison = summarise(before, after, STATISTICS)
    after.loc[0, "prompt"] = "other"
    with pytest.raises(DataError, match="differ in 'prompt'"):
        render_report(comparison, before, after)


def test_matplotlib_state_is_left_alone(render):
    import matplotlib

    before = dict(matplotlib.rcParams)
    render(curves={"reward": [0.1, 0.2]})
    assert dict(matplotlib.rcParams) == before


def test_importing_the_report_loads_no_pyplot():
    code = (
        "import sys; import engine.evaluation.report_page; "
        "bad = {'matplotlib.pyplot', 'torch', 'flytekit', 'engine.rewards', 'engine.rollout'}; "
        "sys.exit(str(bad & set(sys.modules)) if bad & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_sets_sources_and_levels_have_a_table(before, after):
    names = ["test"] * 6 + ["aime"] * 6
    tables = [pd.concat([rows, rows], ignore_index=True) for rows in (before, after)]
    sets = compare_sets(
        *(table.assign(dataset=names) for table in tables), {"test": 1, "aime": 0}, STATISTICS
    )
    page = render_report(sets[0].comparison, before, after, sets=sets)
    text = Page(page).text
    assert "By evaluation set, source and level" in text
    assert "6 held-out problems of the set test: 3 fixed" in text
    assert "test6 problems1 known from trainingwarm start33.3 %[9.7, 70.0]" in text
    assert page.count('<tbody class="set">') == 2
    assert page.count('<tbody class="level">') == 4
    assert page.count('<tbody class="source">') == 0, "the only source is the set itself"
    for label in ("mean@4", "pass@2", "maj@4", "format", "truncated", "tokens", "gain, points"):
        assert label in text
    (one,) = compare_sets(
        *(rows.assign(level="") for rows in (before, after)), {"test": 0}, STATISTICS
    )
    page = render_report(one.comparison, before, after, sets=[one])
    assert "source and level" not in page, "the table would say what Metrics says"
