"""The frame of every `python -m engine.main_…`: arguments, help, signals and exit status."""

import argparse
import difflib
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel

from engine.cli.forms import REWARD_FILES, check_names
from engine.cli.resolve import Form, resolve_file
from engine.cli.run_folder import INPUT_ERRORS, short_message
from engine.cli.settings import OfflineRunConfig, RunConfig
from engine.config.text import PRESET, as_yaml, config_path, sections, summary
from engine.console import command_line, quiet, say
from engine.errors import ConfigError, EngineError, PreemptedError

C = TypeVar("C", bound=BaseModel)
F = TypeVar("F", bound=OfflineRunConfig)

FAILED, WRONG_INPUT = 1, 2
_SUFFIXES = (".yaml", ".yml", ".json")
# verl's own files of defaults; what is in them is known here.
_VERLS_FILES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer")


class ArgumentParser(argparse.ArgumentParser):
    """A parser of arguments that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


@command_line(left="workers are stopped")
def run_program(
    form: Form[C],
    usage: str,
    arguments: Sequence[str] | None,
    run: Callable[[C, argparse.Namespace], None],
    **options: dict[str, Any],
) -> int:
    """Do what arguments (None: the process's) of `form` say; return the exit status.

    That is help, the configuration, or `run`; `options` are those that not all programs have. The
    status is 0, 1 where the run failed, 2 for wrong input, 130 after Ctrl-C, 143 after SIGTERM.
    """
    quiet()
    try:
        _run_form(form, usage, sys.argv[1:] if arguments is None else arguments, run, options)
    except PreemptedError as error:
        say(str(error), error=True)
        raise SystemExit(int(signal.SIGTERM)) from error
    except EngineError as error:
        say(f"error: {short_message(error)}", error=True)
        return WRONG_INPUT if isinstance(error, INPUT_ERRORS) else FAILED
    return 0


def _run_form(
    form: Form[C],
    usage: str,
    arguments: Sequence[str],
    run: Callable[[C, argparse.Namespace], None],
    options: Mapping[str, dict[str, Any]],
) -> None:
    parser = ArgumentParser(f"python -m engine.{form.program}", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("settings", nargs="*")
    for name in ("--config", "--config-path", "--config-name"):
        parser.add_argument(name)
    for name in ("--print-config", "--dry-run"):
        parser.add_argument(name, action="store_true")
    for name, keywords in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.help is not None:
        print(help_text(form, usage, chosen.help))
        return
    file, settings = _config_file(chosen)
    verls = getattr(chosen, "verl_defaults", False)
    resolved = resolve_file(form, file, settings, defaults_of_verl=verls)
    for notice in resolved.grouped_notices():
        say(f"note: {notice}", error=True)
    if chosen.print_config:
        print(config_text(resolved.config), end="")
        return
    try:
        run(resolved.config, chosen)
    except EngineError as error:
        raise error.with_message(resolved.with_typed_keys(str(error))) from error


def _config_file(options: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the one file, as first argument, --config or Hydra's options, and the settings."""
    settings = list(options.settings)
    files = [config_path(options.config)] if options.config is not None else []
    first = settings[0] if settings and "=" not in settings[0] else ""
    if first.startswith(PRESET) or first.endswith(_SUFFIXES):
        files.append(config_path(settings.pop(0)))
    folder, name = options.config_path, options.config_name
    if folder is not None and name is None:
        raise ConfigError(f"--config-path={folder} names a folder; give --config-name, too")
    if name is not None:
        file = Path(folder or "config").expanduser() / name
        if file.suffix not in _SUFFIXES:
            file = file.with_name(f"{file.name}.yaml")
        if file.exists() or file.stem not in _VERLS_FILES:
            files.append(file)
        else:
            say(
                f"note: --config-name={name} is verl's file of defaults; the defaults here are "
                "those of --help, or verl's with --verl-defaults",
                error=True,
            )
    if len(files) > 1:
        raise ConfigError(f"{files[0]} and {files[1]} are both configurations; give one file")
    return (files[0] if files else None), settings


WIDTH, INDENT = 100, 56  # of --help
ALL = "all"
_SEARCH = """\
These are {shown} of {known} keys. --help WORD (lr, kl, vllm, …) searches names and meanings; --help
all prints all of them. What a run has, with your own settings in place: --print-config
"""


def help_text(form: Form[Any], usage: str, word: str = "") -> str:
    """Usage and the keys of `form.common`, or those with `word` ("all": any); or ConfigError."""
    found = list(_help_sections(form))
    if not word:
        known = {path: (head, about) for _, rows in found for path, head, about in rows}
        width = WIDTH - INDENT
        lines = [
            _entry(head, textwrap.shorten(about, width, placeholder=" …"))
            for head, about in map(known.__getitem__, form.common)
        ]
        usage = usage.rstrip().rpartition("\n\n")[0]  # without what is good to know later
        search = _SEARCH.format(shown=len(lines), known=len(known))
        return "\n".join([usage, "", *lines, "", search])
    parts = [usage] if word == ALL else []
    for heading, rows in found:
        shown = [
            _entry(head, about)
            for path, head, about in rows
            if word in (ALL, heading) or word.lower() in f"{path} {head} {about}".lower()
        ]
        if shown:
            parts.append("\n".join([heading, *shown, ""]))
    if not parts:
        close = difflib.get_close_matches(word, form.known, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else "--help all lists all keys"
        raise ConfigError(f"--help {word}: no key has that in its name or meaning; {hint}")
    return "\n".join(parts)


def _help_sections(form: Form[Any]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each section's heading, with path, key and default, and meaning of its settings."""
    names: dict[str, tuple[str, str]] = {}  # by path: the first key of the table, and its note
    for name, key in form.table.settings.items():
        if len(key.paths) == 1:
            names.setdefault(key.paths[0], (name, key.note))
    for path, model, settings in sections(form.config):
        rows = []
        for setting in settings:
            short = setting.path.removeprefix(form.prefix)
            own = setting.path if short in form.table.settings else short  # else another's key
            name, note = names.get(setting.path, (own, ""))
            about = "; ".join(filter(None, (setting.about, note)))
            rows.append((setting.path, f"{name} = {setting.default}", about))
        if rows:
            yield f"{path or 'top level'}: {summary(model)}", rows
    if form.config is RunConfig:
        about = "File, function, its arguments: rl.reward"
        rows = [(n, f"{n}.path, .name, .reward_kwargs", about) for n in REWARD_FILES]
        about = "A sequence-classification folder: rl.reward"
        rows.append(("reward_model", "reward_model.enable, .model.path", about))
        yield "reward from a file:", rows
    rows = []
    for entry in form.table.unsupported:
        only = f" (only {', '.join(map(as_yaml, entry.accepted))})" if entry.accepted else ""
        kind = "rejected" if entry.rejected else "no effect"
        rows.append((entry.pattern, entry.pattern + only, f"{kind}: {entry.reason}"))
    if rows:
        yield "verl's keys that have no effect here, or only some values (null: any)", rows


def _entry(head: str, about: str) -> str:
    indent, head = " " * INDENT, f"  {head}"
    first = f"{head:<{INDENT}}" if len(head) <= INDENT - 2 else f"{head}\n{indent}"
    lines = textwrap.wrap(about, WIDTH - INDENT)
    return (first + f"\n{indent}".join(lines)).rstrip()


def config_text(config: BaseModel) -> str:
    """Return the whole configuration as YAML that `--config` reads."""
    values = config.model_dump(mode="json")
    if isinstance(config, RunConfig) and config.run.total_epochs is not None:
        del values["rl"]["trainer"]["total_training_steps"]  # known when the data are read
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


_OFFLINE_USAGE = """\
python -m engine.{program} [FILE.yaml] [--dry-run] [--print-config] [key=value ...]

{about}

  FILE.yaml        YAML with the same keys, as sections or dotted; key=value overrides it. The
                   same as --config FILE
  --dry-run        check settings and data, say what would be done, and exit
  --print-config   print the configuration as --config reads it, and exit
  --help [WORD]    print this, or the keys that have WORD in name or meaning, and exit

Values are YAML: true, 1e-6, [a,b], null (the default). The defaults are made for small models: give
a pretrained one its own learning rate. docs/preference.md says which method fits which data.
Exit status: 0; 1 for a run that failed; 2 for wrong input; 130 for Ctrl-C; 143 for SIGTERM.
"""


def run_offline(form: Form[F], about: str, arguments: Sequence[str] | None = None) -> int:
    """Train on rows of files as a command line says; return the exit status."""

    def run(config: F, options: argparse.Namespace) -> None:
        check_names(config)
        from engine.cli.offline_run import run  # torch takes seconds; a wrong name needs none

        run(config, dry_run=options.dry_run)

    usage = _OFFLINE_USAGE.format(program=form.program, about=about)
    return run_program(form, usage, arguments, run)
