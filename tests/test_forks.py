"""Forks end as interpreters do, and nothing waits for one that can't be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from forks import interpreter, start_loader

STARTS_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=({},), name="sleepy", daemon=True).start()
"""

CRASHES = """
import os, signal

def test_it(): os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short path for a loader's socket; afterwards this process's own loader counts again."""
    monkeypatch.setenv("HYBRIDFLYTE_TESTS_LOADER", "")
    load = forks._LOAD.replace("import forks;", "import forks; forks._LOADED_LATER = ();")
    monkeypatch.setattr(forks, "_LOAD", load)  # these tests need none of the large libraries
    return tmp_path_factory.mktemp("f")


@pytest.fixture
def loader(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "test_nothing.py").touch()
    started = start_loader([str(folder), "-p", "no:cacheprovider"], folder)
    yield started
    started.communicate()


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [*interpreter(), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_fork_ends_as_an_interpreter_does(loader: subprocess.Popen[bytes]) -> None:
    done = run("import atexit; atexit.register(print, 'at the end'); print('begun', end='; ')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun; at the end\n", "")
    assert run("raise SystemExit(3)").returncode == 3
    said = run("raise SystemExit('said')")
    assert (said.returncode, said.stderr) == (1, "said\n")
    failed = run("{}['missing']")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Traceback")
    assert failed.stderr.endswith("KeyError: 'missing'\n")
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == -15
    loader.kill()
    loader.wait()
    assert "Connection refused" in run("").stderr


def test_what_is_loaded_may_not_have_started_a_thread(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "test_sleepy.py").write_text(STARTS_A_THREAD.format(60))
    started = start_loader([str(folder), "-p", "no:cacheprovider"], folder)
    done = run("")
    assert done.returncode == 1
    assert "no fork of the process that loads the tests" in done.stderr
    started.communicate(timeout=60)
    assert started.returncode == 1
    assert "test_sleepy.py starts a thread, sleepy, and" in capfd.readouterr().err


def test_a_thread_that_is_about_to_end_is_waited_for(folder: Path) -> None:
    (folder / "test_sleepy.py").write_text(STARTS_A_THREAD.format(1.5))
    started = start_loader([str(folder), "-p", "no:cacheprovider"], folder)
    done = run("print('forked')")
    started.communicate(timeout=60)
    assert (done.returncode, done.stdout) == (0, "forked\n"), done.stderr


def test_what_a_crashed_process_of_the_tests_wrote_is_shown_at_the_end(folder: Path) -> None:
    for name in ("conftest.py", "once.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    text = Path(forks.__file__).read_text()
    (folder / "forks.py").write_text(f"{text}\n_LOADED_LATER = ()\n")
    (folder / "test_crash.py").write_text(CRASHES)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "--rootdir"]
    ended = subprocess.run([*command, folder, folder], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    said = ended.stdout.partition("stderr of gw0, which crashed")[2]
    assert "Fatal Python error: Segmentation fault" in said
    assert 'test_crash.py", line 4 in test_it' in said
    assert "The fork ended with Segmentation fault" in said
