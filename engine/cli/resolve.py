"""From arguments to a configuration, and from its errors back to the arguments.

A key is looked up in three places: verl's names (`renamed_keys`), our own paths (of `settings`,
with or without `rl.`), and `unsupported_keys`.
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

from engine.cli.interpolation import resolved_values
from engine.cli.ranks import fill_layouts
from engine.cli.renamed_keys import VERL, Key
from engine.cli.reward_keys import KNOWN as REWARD_KEYS
from engine.cli.reward_keys import RewardKeys, is_reward_key
from engine.cli.settings import RunConfig
from engine.cli.unsupported_keys import find_unsupported
from engine.cli.verl_rules import CRITIC_DEFAULTS, VERL_DEFAULTS, choose_estimator, drop_idle
from engine.config import explain
from engine.config.base import section_of
from engine.config.parse import PRESETS
from engine.errors import ConfigError

_NO_EFFECT = " has no effect here: "


@dataclass(frozen=True, slots=True)
class Override:
    """A value from the command line or file, and the setting that it overrides."""

    path: str  # e.g. "rl.actor.ppo_mini_batch_size"
    value: object  # e.g. 16
    key: str  # as typed, e.g. "actor_rollout_ref.actor.ppo_mini_batch_size"
    times: str = ""  # path of its factor, e.g. "rl.rollout.n"


@dataclass(slots=True)
class Resolved:
    """A configuration, notices about it, and the overrides that it was made from."""

    config: RunConfig = field(default_factory=RunConfig)
    notices: list[str] = field(default_factory=list)
    overrides: dict[str, Override] = field(default_factory=dict)  # by path

    def with_typed_keys(self, message: str) -> str:
        """Replace our paths in a message by the typed keys; a scaled value shows its factor."""
        words: dict[str, str] = {}
        for path, override in self.overrides.items():
            factor = f"={override.value}×{self._scale(override)}" if override.times else ""
            words[path] = words[path.removeprefix("rl.")] = override.key + factor
        if not words:
            return message
        longest = sorted(words, key=len, reverse=True)
        known = "|".join(re.escape(word) for word in longest)
        pattern = rf"(?<![\w.])({known})(?!\w|\.\w)"
        return re.sub(pattern, lambda found: words[found[1]], message)

    def grouped_notices(self) -> list[str]:
        """The notices; keys that have no effect for the same reason share one."""
        keys: dict[str, list[str]] = {}
        for notice in self.notices:
            key, found, why = notice.partition(_NO_EFFECT)
            keys.setdefault(why if found else "", []).append(key if found else notice)
        others = keys.pop("", [])
        return [
            ", ".join(some) + (_NO_EFFECT if len(some) == 1 else " have no effect here: ") + why
            for why, some in keys.items()
        ] + others

    def values(self) -> dict[str, object]:
        """The overrides, nested as RunConfig is."""
        nested: dict[str, Any] = {}
        for path, override in self.overrides.items():
            *sections, name = path.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = self._scaled(override) if override.times else override.value
        return nested

    def _scale(self, override: Override) -> int:
        """The factor of a scaled setting: as override, or its default."""
        if override.times in self.overrides and self.overrides[override.times].value:
            return _whole_number(override.times, self.overrides[override.times].value)
        return _whole_number(override.times, _value_at(RunConfig(), override.times))

    def _scaled(self, override: Override) -> int:
        return _whole_number(override.key, override.value) * self._scale(override)


def resolve(
    file: Path | None, arguments: Sequence[str], *, verl_defaults: bool = False
) -> Resolved:
    """Read `file`, put the `key=value` arguments on top, and check all of it.

    With `verl_defaults` settings that neither names are verl's, else this project's. Raises
    ConfigError, in the words of the file or the command line.
    """
    pairs = list(flatten(read_yaml(file))) if file else []
    left_out: list[str] = []
    if file and file.parent == PRESETS:  # they are of the whole pipeline
        left_out = [key for key, _ in pairs if _own_key(key) is None]
        pairs = [(key, value) for key, value in pairs if key not in left_out]
    for argument in arguments:
        key, value = split_argument(argument)
        pairs.extend(flatten(value, key))
    resolved = resolve_pairs(pairs, verl_defaults=verl_defaults)
    resolved.notices += [f"{key}{_NO_EFFECT}only a workflow has this stage" for key in left_out]
    return resolved


def resolve_pairs(pairs: Sequence[tuple[str, object]], *, verl_defaults: bool = False) -> Resolved:
    """The configuration of dotted keys and their values, the later ones on top."""
    if verl_defaults:
        pairs = [*_verl_defaults(pairs), *pairs]
    last: dict[str, object] = {}
    for key, value in pairs:
        # Of keys for one setting the later one holds, so a key that comes again takes a new place.
        last.pop(key, None)
        last[key] = value
    last = resolved_values(last)
    result = _resolve_keys(last)
    try:
        config = RunConfig.model_validate(result.values())
        result.config, notices = fill_layouts(config)
    except ValidationError as error:
        raise ConfigError(result.with_typed_keys(explain(error))) from None
    except ConfigError as error:
        raise ConfigError(result.with_typed_keys(str(error))) from None
    result.notices += [result.with_typed_keys(notice) for notice in notices]
    return result


def _verl_defaults(pairs: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """verl's defaults, those of the critic where its estimator has one."""
    yield from VERL_DEFAULTS.items()
    chosen = [value for key, value in pairs if key.endswith("algorithm.adv_estimator")]
    if (chosen[-1] if chosen else "gae") == "gae":
        yield from CRITIC_DEFAULTS.items()


def _resolve_keys(pairs: dict[str, object]) -> Resolved:
    """Find the setting of each key; null resets a setting to its default."""
    result = Resolved()
    rewards = RewardKeys()
    unsupported: list[tuple[str, object]] = []
    for key, value in pairs.items():
        target = _verl_key(key) or _own_key(key)
        reward = is_reward_key(key)
        if isinstance(value, str) and "${" in value and (target or reward):
            raise ConfigError(
                f"{key}={value!r} refers to another setting, which is not given; write the value "
                "itself"
            )
        if reward:
            rewards.add(key, value)
        elif target:
            for override in _overrides(target, key, value):
                if override.path == "rl.reward.name":
                    rewards.clear()
                result.overrides.pop(override.path, None)
                if override.value is not None:
                    result.overrides[override.path] = override
        else:
            unsupported.append((key, value))
    idle = ", ".join(rewards.without_effect())
    if idle:
        result.notices.append(f"{idle} has no effect here: there is no reward model to load")
    for path, value, key in rewards.settings():
        result.overrides[path] = Override(path, value, key)
    for key, value in unsupported:
        _check_unsupported(result, key, value)
    _prefer_total_steps(result)
    choose_estimator(result)
    drop_idle(result)
    return result


def _overrides(target: Key, key: str, value: object) -> Iterator[Override]:
    converted = None if value is None else target.convert(value, key)
    if isinstance(target.path, str):
        yield Override(target.path, converted, key, target.times)
    else:
        items = converted if isinstance(converted, list) else [None] * len(target.path)
        for path, item in zip(target.path, items, strict=True):
            if item is not None or value is None:  # of several, some may be left as they are
                yield Override(path, item, key)


def _verl_key(key: str) -> Key | None:
    """verl's name of a setting, or of an entry of one that is a mapping."""
    if key in VERL:
        return VERL[key]
    for parent in _parents(key):
        path = VERL[parent].path if parent in VERL else ""
        if isinstance(path, str) and own_paths().get(path) is dict:
            return Key(path + key.removeprefix(parent))
    return None


def _own_key(key: str) -> Key | None:
    """Our own path, in full, or without the `rl.` before its section."""
    paths = own_paths()
    for path in (key, f"rl.{key}"):
        # An entry of a setting such as reward.weights belongs to that setting.
        if path in paths or any(paths.get(parent) is dict for parent in _parents(path)):
            return Key(path)
    return None


def _parents(key: str) -> Iterator[str]:
    """The sections that a dotted key is in, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _check_unsupported(result: Resolved, key: str, value: object) -> None:
    """Accept, note, or reject a key that is no setting here."""
    entry = find_unsupported(key)
    if entry is None:
        near = difflib.get_close_matches(key, sorted(known_keys()), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"unknown key {key!r}{hint or '; python -m engine.main_ppo --help lists all keys'}"
        )
    if value is None or any(value == v and type(value) is type(v) for v in entry.accepted):
        return
    if entry.rejected:
        raise ConfigError(f"{key}={value!r} is verl's and not available here: {entry.reason}")
    result.notices.append(f"{key}{_NO_EFFECT}{entry.reason}")


def _prefer_total_steps(result: Resolved) -> None:
    """verl's rule where both lengths are override: the number of steps wins."""
    epochs = result.overrides.get("run.total_epochs")
    if epochs and (steps := result.overrides.get("rl.trainer.total_training_steps")):
        result.notices.append(f"{epochs.key} has no effect beside {steps.key}")
        del result.overrides["run.total_epochs"]


def split_argument(argument: str) -> tuple[str, object]:
    """The key and the value of a `key=value` argument; raises ConfigError for another form."""
    key, equals, text = argument.partition("=")
    key = key.lstrip("+")  # Hydra's mark for a key that its schema lacks
    if not equals or not key or key.startswith("~"):
        raise ConfigError(f"argument {argument!r} is not of the form key=value")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: the value {text!r} is not valid YAML; quote it") from None


def read_yaml(file: Path) -> dict[str, object]:
    """The values of a YAML file; raises ConfigError where it can't be read."""
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


def flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys of nested sections; a setting that is a mapping stays whole."""
    setting = _verl_key(key) is not None or _own_key(key) is not None
    if value is None and any(known.startswith(f"{key}.") for known in known_keys()):
        return  # a section with nothing in it
    if not isinstance(value, dict) or (key and (setting or not value)):
        yield key, value
        return
    for name, inner in value.items():
        if name == "_target_":  # verl's YAML names its own classes
            continue
        yield from flatten(inner, f"{key}.{name}" if key else str(name))


def known_keys() -> set[str]:
    """All keys that have an effect."""
    ours = own_paths()
    short = {path.removeprefix("rl.") for path in ours}
    return {*VERL, *REWARD_KEYS, *ours, *short}


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


def _whole_number(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be a whole number")
    return value


def _value_at(config: BaseModel, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
