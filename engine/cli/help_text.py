"""`--help` and `--print-config`: the settings of a program as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from engine.cli.forms import REWARD_FILES
from engine.cli.resolve import Form
from engine.cli.settings import RunConfig
from engine.cli.verl_keys import Key
from engine.config.text import as_yaml, sections, summary

WIDTH, INDENT = 100, 56


def help_text(form: Form[Any], usage: str) -> str:
    """Return the usage, all sections with keys, defaults and meanings, and unsupported keys."""
    names: dict[str, tuple[str, Key]] = {}  # by path: the first of the table where there are more
    for name, key in form.table.settings.items():
        if len(key.paths) == 1:
            names.setdefault(key.paths[0], (name, key))
    parts = [usage]
    for path, model, settings in sections(form.config):
        rows = []
        for setting in settings:
            shown = setting.path.removeprefix(form.prefix)
            name, key = names.get(setting.path, (shown, Key((setting.path,))))
            about = "; ".join(filter(None, (setting.about, key.note)))
            rows.append(_entry(name, setting.default, about))
        if rows:
            parts.append("\n".join([f"{path or 'top level'}: {summary(model)}", *rows, ""]))
    if form.config is RunConfig:
        parts.append("\n".join(["reward from a file:", *_reward_entries(), ""]))
    if form.table.unsupported:
        title = "verl's keys that have no effect here, or only some values (null: any)"
        parts.append("\n".join([title, *_unsupported_entries(form), ""]))
    return "\n".join(parts)


def config_text(config: BaseModel) -> str:
    """Return the whole configuration as YAML that `--config` reads."""
    values = config.model_dump(mode="json")
    if isinstance(config, RunConfig) and config.run.total_epochs is not None:
        del values["rl"]["trainer"]["total_training_steps"]  # known when the data are read
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _entry(key: str, default: str, about: str) -> str:
    head = f"  {key}" + (f" = {default}" if default else "")
    lines = textwrap.wrap(about, WIDTH - INDENT) or [""]
    first = f"{head:<{INDENT}}{lines.pop(0)}" if len(head) <= INDENT - 2 else head
    return "\n".join([first.rstrip(), *(" " * INDENT + line for line in lines if line)])


def _reward_entries() -> Iterator[str]:
    for section in REWARD_FILES:
        keys = f"{section}.path, .name, .reward_kwargs"
        yield _entry(keys, "", "File, function, its arguments: rl.reward")
    about = "A sequence-classification folder: rl.reward"
    yield _entry("reward_model.enable, .model.path", "", about)


def _unsupported_entries(form: Form[Any]) -> Iterator[str]:
    for entry in form.table.unsupported:
        only = f" (only {', '.join(map(as_yaml, entry.accepted))})" if entry.accepted else ""
        kind = "rejected" if entry.rejected else "no effect"
        yield _entry(entry.pattern + only, "", f"{kind}: {entry.reason}")
