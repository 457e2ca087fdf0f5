"""From what was typed to a configuration, and from its errors back to what was typed.

A key is looked up in three places: verl's names (`keys`), our own paths (of `settings`, with or
without `rl.`), and what we knowingly don't have (`absent`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from engine.cli.renamed_keys import REWARD_FILES, VERL, Key
from engine.cli.reward_file import reward_name
from engine.cli.settings import RunConfig
from engine.cli.unsupported_keys import find_absent
from engine.config import explain
from engine.config.base import section_of
from engine.errors import ConfigError

_REWARD_KEYS = {**{k: k for k in REWARD_FILES}, **{v: k for k, v in REWARD_FILES.items()}}


@dataclass(frozen=True, slots=True)
class Given:
    """A value, where it goes, and the words in which it was asked for."""

    path: str  # e.g. "rl.actor.ppo_mini_batch_size"
    value: Any  # e.g. 16
    key: str  # as typed, e.g. "actor_rollout_ref.actor.ppo_mini_batch_size"
    times: str = ""  # path of its factor, e.g. "rl.rollout.n"


@dataclass(slots=True)
class Resolved:
    """A configuration, what is to be said about it, and the words of the one who asked for it."""

    config: RunConfig = field(default_factory=RunConfig)
    notices: list[str] = field(default_factory=list)
    given: dict[str, Given] = field(default_factory=dict)  # by path

    def in_users_words(self, message: str) -> str:
        """Put the typed keys in place of our paths; a scaled value shows its factor."""
        words: dict[str, str] = {}
        for path, given in self.given.items():
            factor = f"={given.value}×{self._scale(given)}" if given.times else ""
            words[path] = words[path.removeprefix("rl.")] = given.key + factor
        if not words:
            return message
        longest = sorted(words, key=len, reverse=True)
        known = "|".join(re.escape(word) for word in longest)
        pattern = rf"(?<![\w.])({known})(?!\w|\.\w)"
        return re.sub(pattern, lambda found: words[found[1]], message)

    def values(self) -> dict[str, Any]:
        """What was given, nested as RunConfig is."""
        nested: dict[str, Any] = {}
        for path, given in self.given.items():
            *sections, name = path.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = given.value * self._scale(given) if given.times else given.value
        return nested

    def _scale(self, given: Given) -> int:
        factor = self.given[given.times].value if given.times in self.given else None
        default = _at(RunConfig(), given.times)
        for key, number in ((given.key, given.value), (given.times, factor or default)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise ConfigError(f"{key}={number!r} must be a whole number")
        return int(factor or default)


def resolve(file: Path | None, arguments: Sequence[str]) -> Resolved:
    """Read `file`, put the `key=value` arguments on top, and check all of it.

    Raises ConfigError, in the words of the file or the command line.
    """
    pairs = list(_flatten(_read(file))) if file else []
    for argument in arguments:
        key, value = _split(argument)
        pairs.extend(_flatten(value, key))
    last: dict[str, Any] = {}
    for key, value in pairs:
        # Of keys for one setting the later one holds, so a key that comes again takes a new place.
        last.pop(key, None)
        last[key] = value
    result = _place(last)
    try:
        result.config = RunConfig.model_validate(result.values())
    except ValidationError as error:
        raise ConfigError(result.in_users_words(explain(error))) from None
    return result


def _place(pairs: dict[str, Any]) -> Resolved:
    """Find each key's place; null takes a setting back to its default."""
    result = Resolved()
    rewards: dict[str, dict[str, Any]] = {}  # by the file's key
    absent: list[tuple[str, Any]] = []
    for key, value in pairs.items():
        target = VERL.get(key) or _own(key)
        if isinstance(value, str) and "${" in value and (target or key in _REWARD_KEYS):
            raise ConfigError(f"{key}={value!r} refers to another setting; write the value itself")
        if key in _REWARD_KEYS:
            both = rewards.pop(_REWARD_KEYS[key], {})
            rewards[_REWARD_KEYS[key]] = both | {key: value}
        elif target:
            for given in _givens(target, key, value):
                if given.path == "rl.reward.name":
                    rewards.clear()  # of files that were named before
                result.given.pop(given.path, None)
                if value is not None:
                    result.given[given.path] = given
        else:
            absent.append((key, value))
    for path_key, both in rewards.items():
        path, name = both.get(path_key), both.get(REWARD_FILES[path_key])
        if path is not None:
            value = reward_name(str(path), str(name or "compute_score"))
            result.given["rl.reward.name"] = Given("rl.reward.name", value, path_key)
    for key, value in absent:
        _judge(result, key, value)
    _one_length(result)
    return result


def _givens(target: Key, key: str, value: Any) -> Iterator[Given]:
    converted = None if value is None else target.convert(value, key)
    if isinstance(target.path, str):
        yield Given(target.path, converted, key, target.times)
    else:
        items = converted or [None] * len(target.path)
        for path, item in zip(target.path, items, strict=True):
            yield Given(path, item, key)


def _own(key: str) -> Key | None:
    """Our own path, in full, or without the `rl.` before its section."""
    paths = own_paths()
    for path in (key, f"rl.{key}"):
        if path in paths:
            return Key(path)
        parent, _, _ = path.rpartition(".")
        if paths.get(parent) is dict:  # one entry of a setting such as reward.weights
            return Key(path)
    return None


def _judge(result: Resolved, key: str, value: Any) -> None:
    """Accept, note, or refuse a key that has no place here."""
    entry = find_absent(key)
    if entry is None:
        near = difflib.get_close_matches(key, sorted(known_keys()), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"unknown key {key!r}{hint or '; python -m engine.main_ppo --help lists all keys'}"
        )
    same = entry.same_as and entry.same_as in result.given
    harmless = (*entry.harmless, *([result.given[entry.same_as].value] if same else []))
    if value is None or any(value == v and type(value) is type(v) for v in harmless):
        return
    if entry.refused:
        raise ConfigError(f"{key}={value!r} is verl's and not available here: {entry.say}")
    result.notices.append(f"{key} has no effect here: {entry.say}")


def _one_length(result: Resolved) -> None:
    """verl's rule where both lengths are given: the number of steps holds."""
    epochs = result.given.get("run.total_epochs")
    if epochs and (steps := result.given.get("rl.trainer.total_training_steps")):
        result.notices.append(f"{epochs.key} has no effect beside {steps.key}")
        del result.given["run.total_epochs"]


def _split(argument: str) -> tuple[str, Any]:
    key, equals, text = argument.partition("=")
    key = key.lstrip("+")  # Hydra's mark for a key that its schema lacks
    if not equals or not key or key.startswith("~"):
        raise ConfigError(f"argument {argument!r} is not of the form key=value")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: the value {text!r} is not valid YAML; quote it") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {file} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} can't be read: {error}; give a YAML file") from None
    except yaml.YAMLError as error:
        place = str(error).replace("\n", " ")
        raise ConfigError(f"--config {file} is not valid YAML: {place}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"--config {file} holds a {type(values).__name__}, not sections of keys")
    return values or {}


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested sections; what is a setting itself stays whole."""
    setting = key in VERL or _own(key) is not None
    if value is None and any(known.startswith(f"{key}.") for known in known_keys()):
        return  # a section with nothing in it
    if not isinstance(value, dict) or (key and (setting or not value)):
        yield key, value
        return
    for name, inner in value.items():
        if name == "_target_":  # verl's YAML names its own classes
            continue
        yield from _flatten(inner, f"{key}.{name}" if key else str(name))


def known_keys() -> set[str]:
    """All keys that have an effect."""
    ours = own_paths()
    short = {path.removeprefix("rl.") for path in ours}
    return {*VERL, *_REWARD_KEYS, *ours, *short}


@cache
def own_paths() -> dict[str, type | None]:
    """The settings of RunConfig by path; `dict` for those that have entries of their own."""
    return dict(_walk(RunConfig, ""))


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type | None]]:
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", get_origin(info.annotation)


def _at(config: BaseModel, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
