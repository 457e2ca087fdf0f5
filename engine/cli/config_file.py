"""Which file a command line names: the first argument, `--config`, or Hydra's two options.

A shipped one is `preset:NAME`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from engine.config.parse import PRESET, config_path
from engine.console import say
from engine.errors import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json")
# verl's own files of defaults; what is in them is known here.
_VERLS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer")


def config_file(options: Namespace) -> tuple[Path | None, list[str]]:
    """The file, if any, and the `key=value` arguments; ConfigError where two are named.

    `options` has `settings`, `config`, and Hydra's `config_path` and `config_name`.
    """
    settings = list(options.settings)
    named = [config_path(options.config)] if options.config is not None else []
    if settings and "=" not in settings[0] and settings[0].startswith(PRESET):
        named.append(config_path(settings.pop(0)))
    if settings and "=" not in settings[0] and settings[0].endswith(_SUFFIXES):
        named.append(Path(settings.pop(0)).expanduser())
    named += _hydras(options.config_path, options.config_name)
    if len(named) > 1:
        raise ConfigError(f"{named[0]} and {named[1]} are both configurations; give one file")
    return (named[0] if named else None), settings


def _hydras(folder: str | None, name: str | None) -> list[Path]:
    """The file of `--config-path` and `--config-name`; none for a file of verl's package."""
    if name is None:
        if folder is not None:
            raise ConfigError(f"--config-path={folder} names a folder; give --config-name, too")
        return []
    file = Path(folder or "config").expanduser() / name
    if file.suffix not in _SUFFIXES:
        file = file.with_name(f"{file.name}.yaml")
    if not file.exists() and file.stem in _VERLS:
        say(
            f"note: --config-name={name} is verl's file of defaults; the defaults here are those "
            "of --help, or verl's with --verl-defaults",
            error=True,
        )
        return []
    return [file]
