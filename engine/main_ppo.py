"""`python -m engine.main_ppo key=value ...`: reinforcement learning from the command line.

Arguments, signals, exit status, and errors as one sentence; the run itself is in `engine.cli`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine.cli.failures import INPUT_ERRORS, short_message
from engine.console import INTERRUPTED, quiet, say
from engine.errors import ConfigError, EngineError, PreemptedError

FAILED, WRONG_INPUT, TERMINATED = 1, 2, 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0, 1 where the run failed, 2 for wrong input, 130 after Ctrl-C, 143 after SIGTERM. Workers are
    stopped in all cases.
    """
    quiet()
    try:
        with _sigterm_as_exception():
            return _run(sys.argv[1:] if arguments is None else arguments)
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


def _run(arguments: Sequence[str]) -> int:
    from engine.cli.check_names import check_names
    from engine.cli.help_text import config_text, help_text
    from engine.cli.resolve import resolve

    options = _parser().parse_intermixed_args(arguments)
    if options.help:
        print(help_text())
        return 0
    resolved = resolve(options.config, options.settings)
    for notice in resolved.notices:
        say(f"note: {notice}", error=True)
    if options.print_config:
        print(config_text(resolved.config), end="")
        return 0
    try:
        check_names(resolved.config)
        from engine.cli.run import run  # torch and ray take seconds; a wrong name needs neither

        run(resolved.config)
    except EngineError as error:
        raise type(error)(resolved.with_typed_keys(str(error))) from error
    return 0


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m engine.main_ppo --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m engine.main_ppo", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("settings", nargs="*")
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
