"""Resolve a file and `key=value` arguments to a checked configuration, and its errors to keys.

A key is looked up in the table of its program, then among the paths of the program's configuration.
The table is `verl_keys.yaml`, whose head says how it is read: keys of verl's that are renamed, in
other units, or unsupported. Which programs there are, and what each adds, is in `forms`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from engine.config.base import section_of
from engine.config.text import (
    PRESET,
    PRESETS,
    config_path,
    explain,
    read_yaml,
    suggestion,
    validated,
)
from engine.errors import ConfigError

C = TypeVar("C", bound=BaseModel)
Pairs = Sequence[tuple[str, object]]  # dotted keys with their values, the later ones on top
Convert = Callable[[Any, str], Any]  # of the value, and its key for messages
_NO_EFFECT = " has no effect here: "


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
    settings: dict[str, Key]
    unsupported: tuple[UnsupportedKey, ...]  # the first that matches holds


@cache
def key_table(*sections: str) -> KeyTable:
    """Read sections of the table, e.g. "main_ppo"."""
    settings: dict[str, Key] = {}
    unsupported: list[UnsupportedKey] = []
    for key, words, entry in (item for section in sections for item in _entries(section)):
        entry = entry if isinstance(entry, dict) else {"to": entry}
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


def _verl_defaults(pairs: Pairs) -> Pairs:
    """Return verl's defaults, those of the critic where the estimator of `pairs` has one."""
    chosen = [value for key, value in pairs if key.endswith("algorithm.adv_estimator")]
    critic = [] if chosen and chosen[-1] != "gae" else [*_entries("verl_critic_defaults")]
    return [(key, value) for key, _, value in [*_entries("verl_defaults"), *critic]]


Words = tuple[tuple[int, str], ...]  # number and text of the word that each pair of braces gives
_BRACES = re.compile(r"\{(.*?)\}")


def _entries(section: str) -> Iterator[tuple[str, Words, Any]]:
    """Yield each key that a key of the section stands for, its words, and what the table says."""
    for written, entry in _sections()[section].items():
        choices = [enumerate(words.split(",")) for words in _BRACES.findall(written)]
        for words in product(*choices):
            yield _with_words(written, words), words, entry


@cache
def _sections() -> dict[str, dict[str, object]]:
    text = Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other one takes 0.1 s
    return yaml.load(text, loader)


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


def _paths(value: object, key: str) -> list[object]:
    files = value if isinstance(value, list | tuple) else [value]
    return [os.path.expanduser(file) if isinstance(file, str) else file for file in files]


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
    "paths": _paths,
    "pair": _pair,  # AdamW's betas
    "zero_alone": _zero_alone,  # Megatron's least learning rate; here it is a share of the peak
    # With `auto` the planner chooses the number of ranks.
    "size_or_auto": lambda value, key: [None, "auto"] if value == "auto" else [value, None],
    "whole_epochs": lambda value, key: max(1, round(value)),
}


@dataclass(frozen=True, eq=False)
class Form(Generic[C]):
    """The arguments that a program takes, and the configuration that they become."""

    program: str  # its name, and that of its section in the table of keys, e.g. "main_ppo"
    config: type[C]
    prefix: str = ""  # may be left out before a path, e.g. "rl."
    keys: Mapping[str, type | None] = field(default_factory=dict)  # that `finish` makes settings of
    finish: Callable[[Resolved[C]], None] = lambda resolved: None
    complete: Callable[[C], tuple[C, list[str]]] = lambda config: (config, [])  # with notices
    more_sections: tuple[str, ...] = ()  # of the table, whose names hold as well
    common: tuple[str, ...] = ()  # paths of what most people set, which --help begins with

    @cached_property
    def table(self) -> KeyTable:
        """The table of keys that are no paths."""
        return key_table(self.program, *self.more_sections)

    @cached_property
    def paths(self) -> dict[str, type | None]:
        """The settings by path; `dict` for those that have entries of their own."""
        return {**dict(setting_paths(self.config)), **self.keys}

    @cached_property
    def known(self) -> frozenset[str]:
        """All keys that have an effect."""
        short = {path.removeprefix(self.prefix) for path in self.paths}
        return frozenset({*self.table.settings, *self.paths, *short})

    def find(self, key: str) -> Key | None:
        """Return the setting of a key; an entry of a setting that is a mapping belongs to it."""
        settings = self.table.settings
        if key in settings:
            return settings[key]
        for parent in filter(settings.get, _parents(key)):
            path = settings[parent].paths[0]
            if self.paths.get(path) is dict:
                return Key((path + key.removeprefix(parent),))
        return self.find_path(key)

    def find_path(self, key: str) -> Key | None:
        """Return the setting of a path, in full or without `prefix`; None for any other key."""
        for path in (key, self.prefix + key):
            if path in self.paths or any(self.paths.get(p) is dict for p in _parents(path)):
                return Key((path,))
        return None

    def flatten(self, value: object, key: str = "") -> Iterator[tuple[str, object]]:
        """Yield the dotted keys of nested sections; a setting that is a mapping stays whole."""
        if value is None and any(known.startswith(f"{key}.") for known in self.known):
            return  # a section with nothing in it
        if not isinstance(value, Mapping) or (key and (not value or self.find(key))):
            yield key, value
            return
        for name, inner in value.items():
            if name != "_target_":  # verl's YAML names its own classes
                yield from self.flatten(inner, f"{key}.{name}" if key else str(name))


@dataclass(frozen=True, slots=True)
class Override:
    """A value of a setting from the command line or file."""

    value: Any  # e.g. 16; None: the default, whatever came before
    key: str  # as typed, e.g. "actor_rollout_ref.actor.ppo_mini_batch_size"
    times: str = ""  # path of its factor, e.g. "rl.rollout.n"


@dataclass(slots=True)
class Resolved(Generic[C]):
    """A configuration, notices about it, and the overrides that it was made from."""

    config: C  # the defaults, until all is resolved
    notices: list[str] = field(default_factory=list)
    overrides: dict[str, Override] = field(default_factory=dict)  # by path, in the order typed

    def value(self, path: str) -> Any:
        """Return what a setting is: as overridden, or its default."""
        if path in self.overrides and self.overrides[path].value is not None:
            return self.overrides[path].value
        value = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
        return value

    def drop_nulls(self) -> None:
        """Leave settings that are overridden by null to their defaults."""
        self.overrides = {p: o for p, o in self.overrides.items() if o.value is not None}

    def no_effect(self, key: str, why: str) -> None:
        self.notices.append(f"{key}{_NO_EFFECT}{why}")

    def with_typed_keys(self, message: str) -> str:
        """Replace our paths in a message by the typed keys; a scaled value shows its factor."""
        words: dict[str, str] = {}
        for path, override in self.overrides.items():
            factor = f"={override.value}×{self.value(override.times)}" if override.times else ""
            words[path] = words[path.removeprefix("rl.")] = override.key + factor
        if not words:
            return message
        known = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.])({known})(?!\w|\.[a-z_])", lambda m: words[m[1]], message)

    def grouped_notices(self) -> list[str]:
        """Return the notices; keys that have no effect for the same reason share one."""
        keys: dict[str, list[str]] = {}
        for notice in self.notices:
            key, _, why = notice.partition(_NO_EFFECT)
            keys.setdefault(why or notice, []).append(key)
        return [
            why
            if names == [why]
            else f"{', '.join(names)} {'have' if names[1:] else 'has'} no effect here: {why}"
            for why, names in keys.items()
        ]

    def nested(self) -> dict[str, object]:
        root: dict[str, Any] = {}
        for path, override in self.overrides.items():
            *sections, name = path.split(".")
            section = root
            for section_name in sections:
                section = section.setdefault(section_name, {})
            section[name] = override.value
            if override.times:
                factor = require_int(override.times, self.value(override.times))
                section[name] = require_int(override.key, override.value) * factor
        return root


def resolve_file(
    form: Form[C], file: Path | None, arguments: Sequence[str], *, defaults_of_verl: bool = False
) -> Resolved[C]:
    """Read `file`, put the `key=value` arguments on top, and check all of it.

    With `defaults_of_verl` settings that neither file nor arguments name are verl's. Raises
    ConfigError, in the words of the file or the command line.
    """
    values = read_yaml(file, f"--config {file}") if file else {}
    of_preset = values if file and file.parent == PRESETS else {}
    if "preset" in values:
        preset = config_path(f"{PRESET}{values.pop('preset')}")
        of_preset = read_yaml(preset, f"--config {preset}")
    pairs = list(form.flatten(of_preset))
    left_out = [key for key, _ in pairs if form.find_path(key) is None]  # of the whole pipeline
    pairs = [(key, value) for key, value in pairs if key not in left_out]
    pairs.extend(form.flatten(values) if values is not of_preset else ())
    for argument in arguments:
        key, value = split_argument(argument)
        pairs.extend(form.flatten(value, key))
    resolved = resolve_pairs(form, pairs, defaults_of_verl=defaults_of_verl)
    for key in left_out:
        resolved.no_effect(key, "for workflows only")
    return resolved


def resolve_pairs(form: Form[C], pairs: Pairs, *, defaults_of_verl: bool = False) -> Resolved[C]:
    """Make the configuration of dotted keys and their values; raises ConfigError."""
    values: dict[str, object] = {}
    for key, value in [*(_verl_defaults(pairs) if defaults_of_verl else ()), *pairs]:
        # The last key for a setting holds, so a repeated key moves to the end.
        values.pop(key, None)
        values[key] = None if value == "???" else value  # OmegaConf's mark for a missing value
    resolved = Resolved(form.config())
    unsupported: dict[str, object] = {}
    for key, value in _follow_references(values).items():
        target = form.find(key)
        if target is None:
            unsupported[key] = value
            continue
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{key}={value!r} refers to another setting, which is not given")
        several = len(target.paths) > 1
        converted = None if value is None else target.convert(value, key)
        items = converted if several and converted else [converted] * len(target.paths)
        for path, item in zip(target.paths, items, strict=True):
            if several and converted and item is None:
                continue  # this one of several is left as it is
            resolved.overrides.pop(path, None)
            resolved.overrides[path] = Override(item, key, target.times)
    form.finish(resolved)
    resolved.drop_nulls()
    for key, value in unsupported.items():
        _note_unsupported(form, resolved, key, value)
    try:
        resolved.config, notices = form.complete(form.config.model_validate(resolved.nested()))
    except ValidationError as error:
        raise ConfigError(resolved.with_typed_keys(explain(error, form.config))) from None
    except ConfigError as error:
        raise error.with_message(resolved.with_typed_keys(str(error))) from None
    resolved.notices += map(resolved.with_typed_keys, notices)
    return resolved


def _note_unsupported(form: Form[C], resolved: Resolved[C], key: str, value: object) -> None:
    """Note a key that is no setting; raise ConfigError where its value matters."""
    entry = next((e for e in form.table.unsupported if fnmatchcase(key, e.pattern)), None)
    if entry is None:
        names = sorted(form.known)
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else suggestion(key, names)
        hint = hint or f"python -m engine.{form.program} --help lists all keys"
        raise ConfigError(f"unknown key {key!r}; {hint}")
    if value is None or any(same_value(accepted, value) for accepted in entry.accepted):
        return
    if entry.rejected:
        raise ConfigError(f"{key}={value!r} is verl's and not available here: {entry.reason}")
    resolved.no_effect(key, entry.reason)


def _follow_references(values: dict[str, object]) -> dict[str, object]:
    """Put other keys' values for `${…}`, by OmegaConf's rules; a reference to nothing stays."""
    references = [key for key, value in values.items() if isinstance(value, str) and "${" in value]
    if not references:
        return values
    from omegaconf import OmegaConf  # 0.2 s
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create(flags={"allow_objects": True})
    for key, value in values.items():
        with contextlib.suppress(OmegaConfBaseException):  # it is no reference by its grammar
            OmegaConf.update(tree, key, value, force_add=True)
    for key in references:
        with contextlib.suppress(OmegaConfBaseException):
            value = OmegaConf.select(tree, key, default=values[key])
            values[key] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return values


def split_argument(argument: str) -> tuple[str, object]:
    """Split `key=value`; the value is YAML."""
    key, equals, text = argument.partition("=")
    key = key.lstrip("+")  # Hydra's mark for a key that its schema lacks
    if not equals or not key or key.startswith("~"):
        raise ConfigError(f"argument {argument!r} is not of the form key=value")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: the value {text!r} is not valid YAML; quote it") from None


def section_of_arguments(
    section: type[C], prefix: str, arguments: Sequence[str], fixed: Mapping[str, object]
) -> C:
    """Return one section from `key=value` arguments, which may start with `prefix` ("data.")."""
    values: dict[str, Any] = dict(fixed)
    for argument in arguments:
        key, value = split_argument(argument)
        *parents, name = key.removeprefix(prefix).split(".")
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}: {parent} is a value, not a section")
        inner[name] = value
    return validated(section, values)


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type | None]]:
    """Yield the settings of a configuration: path, and `dict` where it has entries of its own."""
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            yield from setting_paths(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", get_origin(info.annotation)


def require_int(key: str, value: object, least: int | None = None) -> int:
    """Return a whole number as it is; raise ConfigError for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or (least or value) > value:
        bound = "" if least is None else f" of {least} or more"
        raise ConfigError(f"{key}={value!r} must be a whole number{bound}")
    return value


def _parents(key: str) -> Iterator[str]:
    """Yield the sections that a dotted key is in, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
