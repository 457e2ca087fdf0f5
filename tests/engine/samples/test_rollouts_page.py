"""The rollouts page in a browser, and its command."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, find_chromium
from step_batches import step_batch, tokenizer

from engine.samples.__main__ import main, make_server
from engine.samples.sample_files import SampleFolder, find_samples
from engine.samples.viewer import page_of
from engine.samples.writer import RolloutLog

PROGRAM = find_chromium()


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
        log.model_step = 5.0
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


needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: `apt-get install chromium`, or set CHROMIUM"
)


@needs_browser
def test_the_last_step_is_shown_and_others_can_be_reached(page: Page, file: Path) -> None:
    page.open(file)
    assert page.run("document.querySelector('.step h2').textContent") == "Step 10"
    assert set(answers(page)) == {"four at 10", "5", NASTY}
    page.run("document.querySelector('[data-move=\"-1\"]').click()")
    assert "four at 5" in answers(page)
    choose(page, "step", "train 1")
    assert "four at 1" in answers(page)
    assert page.run("document.querySelectorAll('.curves svg polyline').length") == 2


@needs_browser
def test_the_step_of_the_model_is_marked(page: Page, file: Path) -> None:
    page.open(file)
    assert page.run("document.querySelector('.about').textContent").endswith("that of step 5")
    assert page.run("document.querySelector('[name=step]').options[1].text") == "5 ○"
    assert page.run("document.querySelectorAll('svg circle.model').length") == 2
    choose(page, "step", "train 5")
    assert page.run("document.querySelector('.step h2').textContent").endswith("the model's step")


@needs_browser
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


@needs_browser
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


@needs_browser
def test_a_token_tells_its_values(page: Page, file: Path) -> None:
    page.open(file)
    page.run(
        "Array.from(document.querySelectorAll('.answer'))"
        ".find(e => e.textContent === '5').querySelector('span').click()"
    )
    words = page.run("document.querySelector('p.token').textContent")
    assert words.startswith('token 1: "5" · advantage −0.5 · log-prob when sampled −0.1')
    assert "gap 0.01" in words


@needs_browser
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


@needs_browser
def test_what_was_chosen_survives_a_new_page(page: Page, file: Path) -> None:
    page.open(file)
    choose(page, "step", "train 5")
    choose(page, "colour", "gap")
    page.reload()
    assert page.run("document.querySelector('.step h2').textContent").startswith("Step 5")
    assert page.run("document.querySelector('[name=colour]').value") == "gap"


@needs_browser
def test_nothing_from_data_runs_and_nothing_is_asked_for(page: Page, file: Path) -> None:
    page.complaints.clear()
    page.open(file)
    assert NASTY in answers(page)
    assert page.run("document.images.length") == 0
    assert page.requests == [file.as_uri()]
    assert page.complaints == []


@needs_browser
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two samples and no page."""
    folder = tmp_path / "sums"
    with RolloutLog(folder / "rollouts", tokenizer, every=1, rows=4, last_step=2) as log:
        for step in (1, 2):
            log.rollouts("train", step, step_batch({"2+2=": [f"{step} says 4"]}, [1.0]))
            log.step_done([{"step": 1.0, "reward/mean": 0.5}])
    (folder / "rollouts" / "rollouts.html").unlink()
    return folder


def test_the_page_is_written_beside_the_samples_or_where_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    beside = run / "rollouts" / "rollouts.html"
    assert capsys.readouterr().out.strip().endswith("sums/rollouts/rollouts.html")
    assert main([str(run / "rollouts"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == beside.read_text()
    assert "/sums</title>" in beside.read_text()


def test_wrong_input_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "nowhere does not exist; check the path" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert "has no samples of rollouts" in capsys.readouterr().err
    assert main([str(run), "--html", str(tmp_path / "nowhere" / "page.html")]) == 1
    assert "choose another file with --html" in capsys.readouterr().err
    (run / "rollouts" / "train_000001.parquet").write_bytes(b"")
    assert main([str(run)]) == 1
    assert "train_000001.parquet is no readable sample" in capsys.readouterr().err


def test_it_is_served_to_this_machine_anew_at_each_visit(run: Path) -> None:
    with make_server(find_samples(run), 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert '"step":2' in answer.read().decode()
        (run / "rollouts" / "train_000002.parquet").unlink()
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert '"step":2' not in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/train_000001.parquet", timeout=30)
        server.shutdown()


def test_the_command_loads_neither_torch_nor_transformers(run: Path) -> None:
    code = (
        "import sys; from engine.samples.__main__ import main; "
        f"status = main([{str(run)!r}]); "
        "bad = {'torch', 'transformers', 'ray', 'mlflow'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
