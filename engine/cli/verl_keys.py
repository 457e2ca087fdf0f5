"""The table of keys that are no paths of the settings: renamed, in other units, or unsupported.

The table is `verl_keys.yaml`, whose head says how it is read; here are its converters of values.
Keys of rewards, and verl's defaults, are in `resolve`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError

Convert = Callable[[object, str], object]  # the value, and its key for messages

NEVER = 10**9  # steps: longer than any run
LOGGERS = ("console", "file", "jsonl", "mlflow", "tensorboard", "wandb")


@dataclass(frozen=True, slots=True)
class Key:
    """The setting that a key stands for."""

    path: str | tuple[str, ...]  # in the configuration, e.g. "rl.actor.optim.lr"
    convert: Convert = lambda value, key: value  # to a value of each path, where there are several
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
    unsupported: tuple[UnsupportedKey, ...]

    def find_unsupported(self, key: str) -> UnsupportedKey | None:
        """Return the first entry that matches `key`."""
        return next((e for e in self.unsupported if fnmatchcase(key, e.pattern)), None)


@cache
def key_table(section: str) -> KeyTable:
    """Read a section of the table, e.g. "main_ppo"."""
    settings: dict[str, Key] = {}
    unsupported: list[UnsupportedKey] = []
    for written, entry in _sections()[section].items():
        entry = entry if isinstance(entry, dict) else {"to": entry}
        for key, words in _expanded(written):
            if "to" in entry:
                paths = entry["to"] if isinstance(entry["to"], list) else [entry["to"]]
                paths = [_with_words(path, words) for path in paths]
                more = {name: entry[name] for name in ("times", "note") if name in entry}
                if "as" in entry:
                    more["convert"] = _CONVERTERS[entry["as"]]
                settings[key] = Key(paths[0] if len(paths) == 1 else tuple(paths), **more)
            else:
                rejected = "refused" in entry
                reason = entry["refused" if rejected else "no_effect"]
                accepted = tuple(entry.get("except", ()))
                unsupported.append(UnsupportedKey(key, reason, accepted, rejected))
    return KeyTable(settings, tuple(unsupported))


def key_values(section: str) -> list[tuple[str, object]]:
    """Read a section of the table that has values of keys."""
    return [(k, v) for written, v in _sections()[section].items() for k, _ in _expanded(written)]


@cache
def _sections() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes 0.1 s
    sections: dict[str, dict[str, Any]] = yaml.load(text, loader)
    return sections


def _expanded(key: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield each key that `key` stands for, and the number and text of its word in each braces."""
    start, opened, rest = key.partition("{")
    if not opened:
        yield key, []
        return
    choices, _, rest = rest.partition("}")
    for number, word in enumerate(choices.split(",")):
        for end, words in _expanded(rest):
            yield f"{start}{word}{end}", [(number, word), *words]


def _with_words(path: str, words: list[tuple[int, str]]) -> str:
    """Return the path with the words that go with those of its key."""
    for number, word in words:
        choices = re.search(r"\{(.*?)\}", path)
        if choices:
            chosen = choices[1].split(",")[number] if choices[1] else word
            path = path[: choices.start()] + chosen + path[choices.end() :]
    return path


# Converters by their names in the table: the value, and its key for messages.


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_true(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return value


def _loggers(value: object, key: str) -> list[object]:
    names = _listed(value)
    if foreign := [name for name in names if name not in LOGGERS]:
        raise ConfigError(
            f"{key}: {', '.join(map(str, foreign))} is not a logger here; choose from "
            f"{', '.join(LOGGERS)}"
        )
    return names


def _device(value: object, key: str) -> object:
    if value not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"{key}={value!r} is not available here; choose cuda, cpu or auto")
    return value


def _pair(value: object, key: str) -> list[object]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def _zero_alone(value: object, key: str) -> object:
    if value != 0:
        raise ConfigError(f"{key}={value!r} is not available here: set min_lr_ratio, over lr")
    return value


_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD"}  # Megatron's own Adam is AdamW
# What verl's DAPO compares in a group; its sequence scores and `acc` are our raw score.
_GROUP_METRICS = {"acc": "score", "seq_reward": "score", "seq_final_reward": "reward"}

_CONVERTERS: dict[str, Callable[[Any, str], object]] = {
    "text": lambda value, key: str(value),  # a name that YAML may read as a number or a date
    "path": lambda value, key: os.path.expanduser(str(value)),  # the shell leaves a ~ after a =
    "paths": lambda value, key: [
        os.path.expanduser(file) if isinstance(file, str) else file for file in _listed(value)
    ],
    "loggers": _loggers,
    "device": _device,
    "pair": _pair,  # AdamW's betas
    "optimizer": lambda value, key: _OPTIMIZERS.get(str(value), value),
    "zero_alone": _zero_alone,  # Megatron's least learning rate; here it is a share of the peak
    "zero_is_off": lambda value, key: 0 if value == -1 else value,  # verl switches off with -1
    "negative_is_none": lambda value, key: None if _is_number(value) and value < 0 else value,
    # A temperature of 0 goes with do_sample=False, which decodes greedily by itself.
    "zero_is_none": lambda value, key: None if value == 0 else value,
    # -1 (or 0) steps between two validations: only the first and the last are done.
    "never_below_one": lambda value, key: NEVER if _is_number(value) and value < 1 else value,
    # With `auto` the planner chooses the number of ranks.
    "size_or_auto": lambda value, key: [None, "auto"] if value == "auto" else [value, None],
    # verl's `hf` decodes with the trainer's own model, as `native` does.
    "engine_name": lambda value, key: "native" if value == "hf" else value,
    # verl frees the KV cache and the weights, which the next update loads again.
    "sleep_level": lambda value, key: 2 if _is_true(value, key) else 0,
    # Whether the log-probs of sampling stand for the trainer's own.
    "bypass": lambda value, key: "rollout" if _is_true(value, key) else "auto",
    "group_metric": lambda value, key: _GROUP_METRICS.get(str(value), value),
    # All of our schedules have a warm-up.
    "hf_schedule": lambda value, key: str(getattr(value, "value", value)).replace(
        "constant_with_warmup", "constant"
    ),
    "whole_epochs": lambda value, key: max(1, round(value)),
}
