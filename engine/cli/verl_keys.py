"""The table of keys that are no paths of ours: renamed, in other units, or not supported.

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
                    more["convert"] = globals()[entry["as"]]
                settings[key] = Key(paths[0] if len(paths) == 1 else tuple(paths), **more)
            else:
                rejected = "refused" in entry
                reason = entry["refused" if rejected else "no_effect"]
                accepted = tuple(entry.get("except", ()))
                unsupported.append(UnsupportedKey(key, reason, accepted, rejected))
    return KeyTable(settings, tuple(unsupported))


@cache
def _sections() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes 0.1 s
    sections: dict[str, dict[str, Any]] = yaml.load(text, loader)
    return sections


def _expanded(key: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Each key that `key` stands for, with the number and the text of its word in each braces."""
    start, opened, rest = key.partition("{")
    if not opened:
        yield key, []
        return
    choices, _, rest = rest.partition("}")
    for number, word in enumerate(choices.split(",")):
        for end, words in _expanded(rest):
            yield f"{start}{word}{end}", [(number, word), *words]


def _with_words(path: str, words: list[tuple[int, str]]) -> str:
    """The path with the words that go with those of its key."""
    for number, word in words:
        choices = re.search(r"\{(.*?)\}", path)
        if choices:
            chosen = choices[1].split(",")[number] if choices[1] else word
            path = path[: choices.start()] + chosen + path[choices.end() :]
    return path


# Converters, by their names in the table.


def text(value: object, key: str) -> str:
    """Return the name that YAML may have read as a number or a date."""
    return str(value)


def path(value: object, key: str) -> str:
    """Expand ~, which the shell leaves as it is after a =."""
    return os.path.expanduser(str(value))


def paths(value: object, key: str) -> list[object]:
    """Return one path, or a list of them, as a list."""
    return [path(one, key) if isinstance(one, str) else one for one in _listed(value)]


def loggers(value: object, key: str) -> list[object]:
    """Reject loggers that only verl has, and name the others."""
    names = _listed(value)
    if foreign := [name for name in names if name not in LOGGERS]:
        raise ConfigError(
            f"{key}: {', '.join(map(str, foreign))} is not a logger here; choose from "
            f"{', '.join(LOGGERS)}"
        )
    return names


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def zero_is_off(value: object, key: str) -> object:
    """Switch top-k off with 0, where verl has -1."""
    return 0 if value == -1 else value


def negative_is_none(value: object, key: str) -> object:
    """Leave a setting to its default, as verl's -1 does."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value < 0 else value


def zero_is_none(value: object, key: str) -> object:
    """Drop a temperature of 0: it goes with do_sample=False, which decodes greedily by itself."""
    return None if value == 0 else value


def device(value: object, key: str) -> object:
    """Reject processors of other vendors."""
    if value not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"{key}={value!r} is not available here; choose cuda, cpu or auto")
    return value


def never_below_one(value: object, key: str) -> object:
    """Turn verl's -1 (or 0) steps between validations or saves into more steps than a run has."""
    return NEVER if isinstance(value, int) and value < 1 else value


def pair(value: object, key: str) -> list[object]:
    """Check that there are two numbers, such as AdamW's betas."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def optimizer(value: object, key: str) -> object:
    """Turn Megatron's names into torch's; its own Adam is AdamW."""
    return {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD"}.get(str(value), value)


def zero_alone(value: object, key: str) -> object:
    """Take only 0 as Megatron's least learning rate; here it is a share of the peak."""
    if value != 0:
        raise ConfigError(f"{key}={value!r} is not available here: set min_lr_ratio, over lr")
    return value


def size_or_auto(value: object, key: str) -> list[object]:
    """Return the number of ranks, or for `auto` the placement with which the planner chooses it."""
    return [None, "auto"] if value == "auto" else [value, None]


def engine_name(value: object, key: str) -> object:
    """Turn verl's `hf`, which decodes with the trainer's own model, into `native`."""
    return "native" if value == "hf" else value


def sleep_level(value: object, key: str) -> int:
    """Return 2 for true: verl frees the KV cache, and weights, which the next update loads."""
    return 2 if _is_true(value, key) else 0


def bypass(value: object, key: str) -> str:
    """Say whether the log-probs of sampling stand for the trainer's own."""
    return "rollout" if _is_true(value, key) else "auto"


def _is_true(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return value


def group_metric(value: object, key: str) -> object:
    """Name what DAPO compares in a group; verl's sequence scores and `acc` are our raw score."""
    names = {"acc": "score", "seq_reward": "score", "seq_final_reward": "reward"}
    return names.get(value, value) if isinstance(value, str) else value


def hf_schedule(value: object, key: str) -> object:
    """Return the name of transformers' schedule; all of ours have a warm-up."""
    return str(getattr(value, "value", value)).replace("constant_with_warmup", "constant")


def whole_epochs(value: Any, key: str) -> int:
    """Round epochs to whole ones, at least one."""
    return max(1, round(value))
