"""What every `python -m engine.main_…` does around its run: signals, exit status, short errors."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from engine.cli.failures import INPUT_ERRORS, short_message
from engine.console import INTERRUPTED, quiet, say
from engine.errors import EngineError, PreemptedError

FAILED, WRONG_INPUT, TERMINATED = 1, 2, 143


def run_program(run: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command line (None: the process's); return its exit status.

    0, 1 where the run failed, 2 for wrong input, 130 after Ctrl-C, 143 after SIGTERM. Workers are
    stopped in all cases.
    """
    quiet()
    try:
        with _sigterm_as_exception():
            return run(sys.argv[1:] if arguments is None else arguments)
    except PreemptedError as error:
        say(str(error), error=True)
        return _terminated()
    except EngineError as error:
        say(f"error: {short_message(error)}", error=True)
        return WRONG_INPUT if isinstance(error, INPUT_ERRORS) else FAILED
    except KeyboardInterrupt:
        print("interrupted; workers are stopped", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:
            raise
        return _terminated()


def _terminated() -> int:
    print("terminated; workers are stopped", file=sys.stderr)
    return TERMINATED


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that workers are stopped and files are closed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(int(signal.SIGTERM))  # as Ray's own handler does while it starts

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
