"""Quiet libraries, progress on a terminal, in a pipe and in a notebook, tables, units."""

from __future__ import annotations

import importlib
import io
import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import console
from engine.console import Progress, human_bytes, human_time, points, say, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.97, "10.0 s"),
        (37.2, "37 s"),
        (59.6, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_human_time(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_import_prints_nothing_and_quiet_keeps_errors() -> None:
    code = (
        "import engine.console as c, logging, os, sys, warnings\n"
        "logging.basicConfig()\n"
        "sys.stderr.flush(); assert 'ray' not in sys.modules and 'torch' not in sys.modules\n"
        "os.environ['VLLM_LOGGING_LEVEL'] = 'DEBUG'\n"
        "c.quiet()\n"
        "warnings.warn('noise'); logging.getLogger('transformers.x').warning('noise')\n"
        "logging.getLogger('ray').error('a real error')\n"
        "logging.getLogger('engine').warning('ours')\n"
        "print(os.environ['VLLM_LOGGING_LEVEL'], os.environ['TRANSFORMERS_VERBOSITY'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in console.SILENCE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "DEBUG error\n"
    assert done.stderr == "ERROR:ray:a real error\nWARNING:engine:ours\n"


def test_a_pipe_gets_lines_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Progress(20, "sft", unit="step", stream=out) as bar:
        for step in range(20):
            bar.update(loss=1 / (step + 1))
    lines = out.getvalue().splitlines()
    assert 3 <= len(lines) <= 8
    assert lines[0].startswith("sft: 5/20 (25 %) · ")
    assert " step/s · " in lines[0]
    assert lines[0].endswith("left · loss=0.2")
    assert lines[-1].startswith("sft: 20/20 (100 %)")
    assert "left" not in lines[-1]


def test_a_high_rate_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 2.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    bar = Progress(0, "pairs", unit="completion", stream=io.StringIO())
    bar.count = 2911
    assert bar.line() == "pairs: 2911 · 1,456 completion/s · 2.0 s"


def test_progress_without_work_prints_nothing() -> None:
    out = io.StringIO()
    with Progress(0, "rows", stream=out):
        pass
    assert out.getvalue() == ""


def test_what_is_printed_and_logged_holds_no_control_sequence_and_no_password(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = "row \x1b[2J of http://me:hunter2@host"
    shown = "row \\x1b[2J of http://me:***@host"
    say(data)
    say(data, error=True)
    out = io.StringIO()
    table(data, [{data: data}], out)
    with Progress(1, data, stream=out) as bar:
        bar.update()
    console.quiet()
    logging.getLogger("engine.x").warning("%s", data)
    assert capsys.readouterr() == (f"{shown}\n", f"{shown}\n")
    assert out.getvalue().count(shown) == 4
    assert caplog.messages == [shown]


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    with Progress(4, "rollout", unit="seq", stream=out) as bar:
        bar.update(3, reward=0.25)
        time.sleep(0.15)
        bar.update(1)
    text = out.getvalue()
    assert "\r" in text
    assert "rollout: 100%" in text
    assert "reward=0.25" in text
    assert "seq/s" in text


def test_a_notebook_gets_one_line_that_is_redrawn_and_a_table() -> None:
    """In a real kernel, whose streams are no terminals."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = (
        "import io, time\n"
        "from engine.console import Progress, table\n"
        "with Progress(4, 'rollout', unit='seq') as bar:\n"
        "    for reward in range(4):\n"
        "        time.sleep(0.15)\n"
        "        bar.update(reward=reward)\n"
        "table('Shown', [{'interval': '[0.1, 0.3]'}])\n"
        "table('Kept', [{'stage': 'sft'}], text := io.StringIO())\n"
        "assert 'sft' in text.getvalue()\n"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    outputs = book.cells[0].outputs
    progress = "".join(o.text for o in outputs if o.output_type == "stream")
    lines = progress.removesuffix("\n").split("\r")
    assert "\n" not in "".join(lines)
    assert len(lines) > 3
    assert lines[-1].startswith("rollout: 100%")
    assert "4/4" in lines[-1]
    assert "reward=3" in lines[-1]
    assert max(map(len, lines)) <= console.NOTEBOOK_COLUMNS
    (page,) = [o.data["text/html"] for o in outputs if o.output_type == "display_data"]
    assert "[0.1, 0.3]" in page
    assert "Kept" not in page


def test_a_table_in_a_pipe_keeps_paths_whole() -> None:
    out = io.StringIO()
    path = "/" + "long/" * 20 + "path"
    table("Summary", [{"stage": "sft", "seconds": 12.34567}, {"stage": path, "seconds": 2}], out)
    text = out.getvalue()
    assert "Summary" in text
    assert path in text
    assert "12.35" in text
    assert "\x1b" not in text


def test_a_table_shows_brackets_as_they_are_and_fits_a_terminal() -> None:
    code = (
        "from engine.console import table; table('T', [{'interval': '[0.1, 0.3]', 'p': 'x' * 99}])"
    )
    leader, follower = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=follower,
        env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
        check=True,
    )
    os.close(follower)
    text = b""
    try:
        while chunk := os.read(leader, 4096):
            text += chunk
    except OSError:  # Linux ends a closed terminal with EIO
        pass
    os.close(leader)
    assert b"[0.1, 0.3]" in text
    assert text.count(b"x") == 99


def test_a_difference_is_in_percentage_points() -> None:
    assert points((0.125, -0.0, 0.2)) == "+12.5 percentage points [+0.0, +20.0]"
    assert points((0.0012, -0.01, 0.01), digits=2).startswith("+0.12 percentage points [-1.00,")


@pytest.mark.parametrize(
    ("command", "inner", "arguments"),
    [
        ("engine.planner.__main__", "_plan", ["--model", "x"]),
        ("engine.health", "check", []),
        ("engine.lineage.__main__", "_run", ["show", "x"]),
        ("engine.promotion.__main__", "open_registry", ["history", "--model", "x"]),
        ("engine.main_ppo", "_run", []),
    ],
)
def test_ctrl_c_ends_every_command_with_130(
    command: str,
    inner: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    module = importlib.import_module(command)
    monkeypatch.setattr(module, inner, interrupted)
    assert module.main(arguments) == 130
    assert capsys.readouterr().err.startswith("interrupted")


# A pipe that nobody reads, as of `… --help | head -1`.

COMMANDS = {
    "engine.main_ppo": ("--help",),
    "engine.main_preference": ("data.train_files=none.jsonl",),  # an error, on stderr
    "engine.config": ("--json-schema",),
}


@pytest.mark.parametrize("module", COMMANDS)
def test_a_closed_pipe_ends_a_command_without_a_traceback(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", module, *COMMANDS[module]]
    both = "data.train_files" in COMMANDS[module][0]  # 2>&1 | head
    process = subprocess.Popen(
        command, stdout=writer, stderr=writer if both else subprocess.PIPE, text=True
    )
    os.close(writer)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == console.PIPE_CLOSED
    assert not said


def test_every_command_line_ends_so() -> None:
    root = Path(console.__file__).parents[1]
    ends = ("@command_line", "run_offline", "run_program", "import main", "main_ppo.main", "click")
    commands = [
        path
        for folder in ("engine", "tasks", "workflows")
        for path in (root / folder).rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    ]
    assert len(commands) > 15
    assert [path for path in commands if not any(end in path.read_text() for end in ends)] == []


ANOTHER_PIPE = """
import os
from engine import console
@console.command_line()
def main():
    reader, writer = os.pipe()
    os.close(reader)
    return os.write(writer, b"to a worker that is gone")
main()
"""


def test_another_broken_pipe_is_an_error_as_any_other() -> None:
    command = [sys.executable, "-c", ANOTHER_PIPE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "BrokenPipeError" in done.stderr) == (1, True)
