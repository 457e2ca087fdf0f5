"""The table of keys that are no paths of the settings: renamed, in other units, or unsupported.

The table is `verl_keys.yaml`, whose head says how it is read; here are its converters of values.
Keys of rewards are in `forms`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError

Convert = Callable[[Any, str], Any]  # of the value, and its key for messages


@dataclass(frozen=True, slots=True)
class Key:
    """The setting, or settings, that a key stands for."""

    paths: tuple[str, ...]  # in the configuration, e.g. "rl.actor.optim.lr"
    convert: Convert = lambda value, key: value  # to a list of values where there are several paths
    times: str = ""  # path of a setting that the value is multiplied by, e.g. "rl.rollout.n"
    note: str = ""  # what differs, for --help


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """A key of verl's, or many of them, that this project does not have."""

    pattern: str  # the key, with * for anything, e.g. "actor_rollout_ref.*.fsdp_config.*"
    reason: str  # what to do instead, or why nothing is lost
    accepted: tuple[object, ...]  # values that change nothing; null always is one
    rejected: bool  # False: other values cost a notice, not the run


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The keys of one program."""

    settings: dict[str, Key]
    unsupported: tuple[UnsupportedKey, ...]  # the first that matches holds


@cache
def key_table(*sections: str) -> KeyTable:
    """Read sections of the table, e.g. "main_ppo"."""
    settings: dict[str, Key] = {}
    unsupported: list[UnsupportedKey] = []
    for written, entry in (item for name in sections for item in _sections()[name].items()):
        entry = entry if isinstance(entry, dict) else {"to": entry}
        for key, words in _expanded(written):
            if "to" in entry:
                paths = entry["to"] if isinstance(entry["to"], list) else [entry["to"]]
                more = {name: entry[name] for name in ("times", "note") if name in entry}
                if "as" in entry:
                    more["convert"] = _CONVERTERS[entry["as"]]
                elif "values" in entry:
                    more["convert"] = partial(_other_value, entry["values"])
                settings[key] = Key(tuple(_with_words(path, words) for path in paths), **more)
            else:
                rejected = "refused" in entry
                reason = entry["refused" if rejected else "no_effect"]
                accepted = tuple(entry.get("except", ()))
                unsupported.append(UnsupportedKey(key, reason, accepted, rejected))
    return KeyTable(settings, tuple(unsupported))


def verl_defaults(pairs: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return verl's defaults, those of the critic where the estimator of `pairs` has one.

    Without them defaults are this project's, and only the estimator follows verl: keys of a critic
    ask for one.
    """
    chosen = [value for key, value in pairs if key.endswith("algorithm.adv_estimator")]
    sections = ["verl_defaults"]
    if not chosen or chosen[-1] == "gae":
        sections.append("verl_critic_defaults")
    values = [item for name in sections for item in _sections()[name].items()]
    return [(key, value) for written, value in values for key, _ in _expanded(written)]


@cache
def _sections() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes 0.1 s
    sections: dict[str, dict[str, Any]] = yaml.load(text, loader)
    return sections


Words = tuple[tuple[int, str], ...]  # number and text of the word that each pair of braces gives
_BRACES = re.compile(r"\{(.*?)\}")


def _expanded(key: str) -> Iterator[tuple[str, Words]]:
    """Yield each key that `key` stands for, and its words."""
    choices = [enumerate(words.split(",")) for words in _BRACES.findall(key)]
    for words in product(*choices):
        yield _with_words(key, words), words


def _with_words(text: str, words: Words) -> str:
    """Fill the braces: with the word of the same number, or where they are empty the same word."""
    parts = _BRACES.split(text)
    for i, (number, word) in zip(range(1, len(parts), 2), words, strict=False):
        parts[i] = parts[i].split(",")[number] if parts[i] else word
    return "".join(parts)


def _other_value(values: dict[object, object], value: object, key: str) -> object:
    """Return what stands for `value`; itself where it is not among `values`."""
    if True in values and False in values and not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return next((new for old, new in values.items() if same_value(old, value)), value)


def same_value(first: object, second: object) -> bool:
    """Compare two values of YAML, where true is not 1."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _pair(value: object, key: str) -> list[object]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def _zero_alone(value: object, key: str) -> object:
    if value != 0:
        raise ConfigError(f"{key}={value!r} is not available here: set min_lr_ratio, over lr")
    return value


_CONVERTERS: dict[str, Convert] = {  # by their names in the table
    "text": lambda value, key: str(value),  # a name that YAML may read as a number or a date
    "path": lambda value, key: os.path.expanduser(str(value)),  # the shell leaves a ~ after a =
    "paths": lambda value, key: [
        os.path.expanduser(file) if isinstance(file, str) else file for file in _listed(value)
    ],
    "pair": _pair,  # AdamW's betas
    "zero_alone": _zero_alone,  # Megatron's least learning rate; here it is a share of the peak
    # With `auto` the planner chooses the number of ranks.
    "size_or_auto": lambda value, key: [None, "auto"] if value == "auto" else [value, None],
    "whole_epochs": lambda value, key: max(1, round(value)),
}
