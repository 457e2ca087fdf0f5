"""A worker process and its messages: what it writes to stderr, and bytes that are no message."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError, WorkerError
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess

MODULE = """
import os, sys, time
from engine.errors import DataError

def open_service(load, channel):
    if load == "refuse":
        raise DataError("no such rows")
    if load == "leave":
        sys.exit(5)
    return Service(load, channel)

class Service:
    def __init__(self, load, channel):
        self.loaded, self.channel = f"{load}!", channel

    def run(self):
        while True:
            request = self.channel.recv()
            if request == "die":
                print("x" * 9000 + "last words", file=sys.stderr)
                os.abort()
            if request == "garbage":
                os.write(self.channel.fileno(), b"\\0\\0\\0\\4none")
            if request == "half":
                os.write(self.channel.fileno(), b"\\0\\0\\1\\0half")
            if request == "hang":
                time.sleep(60)
            self.channel.send(request)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "misbehaving_service.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    worker = WorkerProcess("service 'x'", "misbehaving_service:open_service")
    yield worker
    worker.close()
    sys.modules.pop("misbehaving_service", None)


def ask(process: WorkerProcess, request: str, seconds: float = 20.0) -> object:
    until = time.monotonic() + seconds
    process.send(request, until)
    return process.receive(until)


def test_requests_are_answered_and_a_late_one_ends_the_process(process: WorkerProcess) -> None:
    assert process.start("load") == "load!"
    assert ask(process, "hello") == "hello"
    with pytest.raises(TooLate):
        ask(process, "hang", 0.2)
    process.end()
    assert not process.running
    assert process.start("again") == "again!"
    assert ask(process, "hello") == "hello"


def test_the_end_of_a_process_is_told_with_the_end_of_its_stderr(process: WorkerProcess) -> None:
    process.start("load")
    ended = ask(process, "die")
    assert isinstance(ended, ProcessEnded)
    assert ended.how == "was ended by SIGABRT"
    assert "last words" in ended.stderr
    assert "Current thread" in ended.stderr, "where it was, by faulthandler"
    assert len(ended.stderr) <= 4000


def test_what_is_no_message_ends_the_process(process: WorkerProcess) -> None:
    process.start("load")
    ended = ask(process, "garbage")
    assert isinstance(ended, ProcessEnded)
    assert ended.how == "sent what can't be read (UnpicklingError)"
    assert process.start("again") == "again!"


def test_a_part_of_a_message_is_late(process: WorkerProcess) -> None:
    process.start("load")
    started = time.monotonic()
    with pytest.raises(TooLate):
        ask(process, "half", 0.5)
    assert time.monotonic() - started < 20
    assert not process.running


def test_what_can_t_be_loaded_is_said(process: WorkerProcess) -> None:
    with pytest.raises(ConfigError, match=r"^no such rows$"):
        process.start("refuse")
    with pytest.raises(WorkerError, match=r"service 'x' ended with exit status 1 .*its module"):
        process.start("leave")
