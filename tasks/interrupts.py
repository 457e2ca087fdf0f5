"""Ctrl-C where flytekit is loaded, as at `pyflyte run`: exit status 130, as of every command here.

flytekit's own handler ends with 1. What a stage says and closes is in `tasks.stage`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NoReturn

from flytekit import FlyteContextManager

from engine.console import INTERRUPTED


def set_ctrl_c_status() -> None:
    """Have flytekit's handler call ours, which comes before its exit; idempotent."""
    if _exit not in FlyteContextManager.signal_handlers:
        FlyteContextManager.add_signal_handler(_exit)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(INTERRUPTED)
