"""From arguments and a file to a configuration, and from its errors back to the arguments.

Also `${…}` in files, verl's defaults, and whether what a run names is there. The tables of keys
are in `verl_keys`.
"""

from __future__ import annotations

import difflib
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from engine.cli.reward_file import KNOWN as REWARD_KEYS
from engine.cli.reward_file import RewardKeys, is_reward_key
from engine.cli.settings import RunConfig, fill_layouts
from engine.cli.verl_keys import VERL, Key, find_unsupported
from engine.config import explain
from engine.config.base import section_of
from engine.config.text import PRESET, PRESETS, config_path
from engine.console import say
from engine.errors import ConfigError, DataError
from engine.registry import import_plugins
from engine.rewards import require_rewards
from engine.storage.filesystem import as_path, is_remote, pin_revision, refuse_own_code
from engine.tracking.metric_logs import require_packages

# `${…}` in files of settings, as in OmegaConf: another key's value, or an environment variable.
#
# `${a.b}` and `${.b}` (beside the key) are other keys, `${oc.select:a.b,default}` one that may be
# missing, `${oc.env:NAME,default}` a variable. Others stay as they are.

_ONE = re.compile(r"\$\{([^${}]+)\}")
_DEPTH = 20  # of references to references


def resolved_values(values: Mapping[str, object]) -> dict[str, object]:
    """The values by dotted key, with what they refer to; a reference that leads nowhere stays.

    `???`, OmegaConf's mark for a value that is still missing, is none.
    """
    values = {key: None if value == "???" else value for key, value in values.items()}
    return {key: _value(value, key, values, _DEPTH) for key, value in values.items()}


def _value(value: object, key: str, values: Mapping[str, object], depth: int) -> object:
    if not isinstance(value, str) or "${" not in value or depth == 0:
        return value
    whole = _ONE.fullmatch(value)
    if whole:
        found, there = _looked_up(whole[1].strip(), key, values, depth)
        return found if there else value

    def text(match: re.Match[str]) -> str:
        found, there = _looked_up(match[1].strip(), key, values, depth)
        return str(found) if there else match[0]

    replaced = _ONE.sub(text, value)
    return replaced if replaced == value else _value(replaced, key, values, depth - 1)


def _looked_up(
    reference: str, key: str, values: Mapping[str, object], depth: int
) -> tuple[object, bool]:
    """What a reference stands for, and whether there is such a thing."""
    kind, colon, rest = reference.partition(":")
    if not colon:
        path = _absolute(reference, key)
        if path in values:
            return _value(values[path], path, values, depth - 1), True
        return None, False
    name, comma, default = (part.strip() for part in rest.partition(","))
    if kind == "oc.env" and name in os.environ:
        return os.environ[name], True
    if kind == "oc.select":
        found, there = _looked_up(name, key, values, depth)
        if there:
            return found, True
    if kind in ("oc.env", "oc.select") and comma:
        return yaml.safe_load(default), True
    return None, kind == "oc.select"  # without a default it is null


def _absolute(reference: str, key: str) -> str:
    """The dotted key of a reference: each dot before it after the first goes up one section."""
    name = reference.lstrip(".")
    up = len(reference) - len(name)
    if not up:
        return name
    sections = key.split(".")[:-up]
    return ".".join([*sections, name])


# Which file a command line names: the first argument, `--config`, or Hydra's two options.
#
# A shipped one is `preset:NAME`.

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


# verl's defaults, and what its command lines leave to them.
#
# `python -m engine.trainer.main_ppo` and `--verl-defaults` take all of them. Otherwise defaults
# are
# this project's, and only the estimator follows verl: keys of a critic ask for one.

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_BOTH: dict[str, object] = {  # of either optimizer
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "lr_warmup_steps_ratio": 0.0,
    "min_lr_ratio": 0.0,
    "lr_scheduler_type": "constant",
}

# What verl's configuration has where this project's default is another one.
VERL_DEFAULTS: dict[str, object] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.model.lora_alpha": 16,
    f"{_ACTOR}.optim.lr": 1e-6,
    **{f"{_ACTOR}.optim.{name}": value for name, value in _BOTH.items()},
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ROLLOUT}.n": 1,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.test_freq": -1,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
# Of the critic, where there is one.
CRITIC_DEFAULTS: dict[str, object] = {
    "critic.optim.lr": 1e-5,
    **{f"critic.optim.{name}": value for name, value in _BOTH.items()},
    "critic.ppo_mini_batch_size": 256,
    "critic.ppo_epochs": 1,
}

# Sections of verl's that say nothing unless another setting turns them on, as in verl itself.
_IDLE = {
    "rl.algorithm.use_kl_in_reward": ("rl.algorithm.kl_ctrl.", "rl.algorithm.kl_penalty"),
    "rl.actor.use_kl_loss": ("rl.actor.kl_loss_coef", "rl.actor.kl_loss_type"),
    "rl.rollout.val_kwargs.do_sample": ("rl.rollout.val_kwargs.",),
}


def choose_estimator(result: Resolved) -> None:
    """verl's default, GAE, where keys of a critic were given, and nothing that chooses without."""
    paths = ("rl.algorithm.adv_estimator", "rl.algorithm.dataflow")
    if any(path in result.overrides for path in paths):
        return
    critic = next(
        (o for path, o in result.overrides.items() if path.startswith("rl.critic.")), None
    )
    if critic is not None:
        result.overrides[paths[0]] = replace(critic, path=paths[0], value="gae", times="")
        result.notices.append(f"algorithm.adv_estimator is gae, as in verl: {critic.key} is given")


def drop_idle(result: Resolved) -> None:
    """verl's keys that have no effect in verl either, or tune an engine that doesn't decode."""
    chosen = result.overrides.get("rl.rollout.engine")
    engine = _default("rl.rollout.engine") if chosen is None else chosen.value
    for path, override in list(result.overrides.items()):
        why = ""
        if engine != "vllm" and path.startswith("rl.rollout.vllm.") and _is_verls(override):
            why = f"{engine} decodes, not vllm; see actor_rollout_ref.rollout.name"
        for switch, idle in _IDLE.items():
            given = result.overrides.get(switch)
            if path.startswith(idle) and not (_default(switch) if given is None else given.value):
                why = f"{switch.removeprefix('rl.')} is false"
        if why and not override.key.startswith("rl."):
            if override.value != _default(path):
                result.notices.append(f"{override.key} has no effect here: {why}")
            del result.overrides[path]


def _default(path: str) -> object:
    """A setting's default here."""
    value: object = RunConfig()
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def _is_verls(override: Override) -> bool:
    return override.key.startswith("actor_rollout_ref.")


# From arguments to a configuration, and from its errors back to the arguments.
#
# A key is looked up in three places: verl's names (`renamed_keys`), our own paths (of `settings`,
# with or without `rl.`), and `unsupported_keys`.

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


# Whether what a run names is there: model, teacher, data files, reward, packages of loggers.
#
# It loads neither torch nor Ray, so that a wrong name is known at once. What is in the files is
# checked by `data` and the trainer.


def check_names(config: RunConfig) -> None:
    """Raise an EngineError that names the first setting whose value isn't there."""
    if not config.model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path is missing; give a Hugging Face folder or hub id"
        )
    for file in (*config.data.train_files, *config.data.val_files):
        if not is_remote(file) and not as_path(file).exists():
            raise DataError(f"{file} does not exist; check the path")
    require_packages(config.run.logger, "run.logger")
    import_plugins(config.rl.plugins)
    require_rewards(config.rl.reward)
    for setting, teacher in config.rl.algorithm.teacher_models.items():
        pin_revision(teacher, setting)
    if config.rl.critic.model_path:
        pin_revision(config.rl.critic.model_path, "rl.critic.model_path")
    pin_revision(config.model.path)
    if config.model.trust_remote_code:
        refuse_own_code(config.model.path)
    if config.run.val_only and not config.data.val_files:
        raise ConfigError("run.val_only=true has nothing to validate on; give data.val_files")
    if config.run.resume_mode == "resume_path" and not config.rl.trainer.resume_from:
        raise ConfigError(
            "run.resume_mode=resume_path without trainer.resume_from_path; name the checkpoint"
        )
