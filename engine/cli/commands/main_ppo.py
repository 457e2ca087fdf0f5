"""`python -m engine.main_ppo key=value ...`: reinforcement learning from the command line.

Arguments, and errors in their words; the run itself is in `engine.cli`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.cli.program import run_program
from engine.console import say
from engine.errors import ConfigError, EngineError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, see `run_program`."""
    return run_program(_run, arguments)


def _run(arguments: Sequence[str]) -> int:
    from engine.cli.resolve import check_names, config_file, resolve
    from engine.cli.settings import config_text, help_text

    options = _parser().parse_intermixed_args(arguments)
    if options.help:
        print(help_text())
        return 0
    file, settings = config_file(options)
    resolved = resolve(file, settings, verl_defaults=options.verl_defaults)
    for notice in resolved.grouped_notices():
        say(f"note: {notice}", error=True)
    if options.print_config:
        print(config_text(resolved.config), end="")
        return 0
    if resolved.config.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for any
    try:
        check_names(resolved.config)
        # torch and ray take seconds; a wrong name needs neither
        if options.dry_run:
            from engine.cli.ppo_program import dry_run

            for line in dry_run(resolved.config, options.gpu):
                print(line)
            return 0
        from engine.cli.ppo_program import run

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
    parser.add_argument("--config-path")
    parser.add_argument("--config-name")
    parser.add_argument("--verl-defaults", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpu", default="")
    parser.add_argument("settings", nargs="*")
    return parser


if __name__ == "__main__":
    sys.exit(main())
