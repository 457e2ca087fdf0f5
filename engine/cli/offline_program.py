"""The command lines of `main_preference` and `main_reward_model`: arguments and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import yaml

from engine.cli.offline_settings import OfflineRunConfig, Pairs, read_run_config
from engine.cli.resolve import config_file
from engine.cli.settings import sections_text
from engine.errors import ConfigError, DataError
from engine.storage.filesystem import as_path, is_remote, pin_revision
from engine.tracking.metric_logs import require_packages

R = TypeVar("R", bound=OfflineRunConfig)

_USAGE = """\
python -m {program} [FILE.yaml] [--dry-run] [--print-config] [key=value ...]

{about}

{example}

  FILE.yaml        YAML with the same keys, as sections or dotted; key=value overrides it. As well
                   --config FILE
  --dry-run        check settings and data, say what would be done, and exit
  --print-config   print the configuration as --config reads it, and exit
  --help           print this, and exit

Values are YAML: true, 1e-6, [a,b], null (the default). The defaults are made for small models: give
a pretrained one its own learning rate. docs/preference.md says which method fits which data.

Exit status: 0; 1 for a run that failed; 2 for wrong input; 130 for Ctrl-C; 143 for SIGTERM.
"""


@dataclass(frozen=True, slots=True)
class OfflineProgram(Generic[R]):
    """A command line."""

    program: str  # e.g. "engine.main_preference"
    about: str
    example: str
    config: type[R]
    renamed: Callable[[Pairs], Pairs] = lambda pairs: pairs  # other keys than ours, as ours

    def run(self, arguments: Sequence[str]) -> int:
        """Do what the arguments say; raises an EngineError."""
        options = _parser(self.program).parse_intermixed_args(arguments)
        if options.help:
            usage = _USAGE.format(program=self.program, about=self.about, example=self.example)
            print("\n".join([usage, *sections_text(self.config)]))
            return 0
        file, settings = config_file(options)
        program = f"python -m {self.program}"
        config = read_run_config(self.config, program, file, settings, self.renamed)
        if options.print_config:
            values = config.model_dump(mode="json")
            print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
            return 0
        _check_names(config)
        from engine.cli.offline_run import run  # torch takes seconds; a wrong name needs none

        run(config, dry_run=options.dry_run)
        return 0


def _check_names(config: OfflineRunConfig) -> None:
    """Raise an EngineError that names the first setting whose value isn't there."""
    if not config.model.path:
        raise ConfigError("model.path is missing; give a Hugging Face folder or hub id")
    if not config.data.train_files:
        raise ConfigError(
            "data.train_files is missing; give one JSONL, JSON, CSV or Parquet file, or a list"
        )
    for file in (*config.data.train_files, *config.data.val_files):
        if not is_remote(file) and not as_path(file).exists():
            raise DataError(f"{file} does not exist; check the path")
    require_packages(config.run.logger, "run.logger")
    pin_revision(config.model.path)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(f"python -m {program}", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--config-path")
    parser.add_argument("--config-name")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("settings", nargs="*")
    return parser
