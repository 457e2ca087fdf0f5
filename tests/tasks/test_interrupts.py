"""Ctrl-C in a process that loads our tasks."""

from __future__ import annotations

import signal

import pytest
from flytekit import FlyteContextManager

from tasks.flytekit_setup import set_ctrl_c_status


def test_ctrl_c_ends_with_130() -> None:
    set_ctrl_c_status()  # as `tasks` does
    set_ctrl_c_status()

    def as_flytekit(number: int, frame: object) -> None:
        for handler in FlyteContextManager.signal_handlers:
            handler(number, frame)
        raise AssertionError("flytekit would exit with 1")

    before = signal.signal(signal.SIGINT, as_flytekit)
    try:
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130
