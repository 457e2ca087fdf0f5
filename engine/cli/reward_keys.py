"""verl's keys of rewards, which make one setting together: a function in a file, or a reward model.

`custom_reward_function.path`, `.name` and `.reward_kwargs` are `reward.name` (see `reward_file`);
`reward_model.enable` and `.model.path` are `reward.name=reward_model` with its options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.cli.reward_file import reward_name
from engine.errors import ConfigError

REWARD_FILES = ("custom_reward_function", "reward.custom_reward_function")
_FILE = ("path", "name", "reward_kwargs")
_MODELS = ("reward_model", "reward.reward_model")
# Of a reward model: verl's name and the option's; with an empty one, whether there is one.
_MODEL = {
    "enable": "",
    "model.path": "model",
    "model_path": "model",
    "max_length": "max_length",
    "micro_batch_size_per_gpu": "batch_size",
}
KNOWN = frozenset(
    [f"{section}.{name}" for section in REWARD_FILES for name in _FILE]
    + [f"{section}.{name}" for section in _MODELS for name in _MODEL]
)
Setting = tuple[str, object, str]  # path, value, the key as typed


def is_reward_key(key: str) -> bool:
    """Whether a key belongs here; an argument of a reward function is a key of its own."""
    return key in KNOWN or any(key.startswith(f"{s}.reward_kwargs.") for s in REWARD_FILES)


@dataclass(slots=True)
class RewardKeys:
    """The keys of a command line that name rewards, in the order in which they came."""

    _files: dict[str, dict[str, object]] = field(default_factory=dict)  # by section
    _models: dict[str, dict[str, object]] = field(default_factory=dict)
    _typed: dict[str, str] = field(default_factory=dict)  # section: its latest key

    def add(self, key: str, value: object) -> None:
        """Take a key; its section is the latest now."""
        kinds = ((self._files, REWARD_FILES), (self._models, _MODELS))
        for found, section in ((f, s) for f, sections in kinds for s in sections):
            if key.startswith(f"{section}."):
                name = key.removeprefix(f"{section}.")
                found[section] = found.pop(section, {}) | {name: value}
                self._typed[section] = f"{section}.path" if name in _FILE else key
                return
        raise KeyError(key)

    def clear(self) -> None:
        """Forget all: another reward was named after them."""
        self._files.clear()
        self._models.clear()

    def settings(self) -> Iterator[Setting]:
        """The settings that they are; ConfigError for a reward model without a folder, or beside a
        function, where verl would leave the function out."""
        named = ""
        for section, given in self._files.items():
            path, name = given.pop("path", None), given.pop("name", None)
            if path is None:
                continue
            named = f"{section}.path"
            keywords = _keywords(given)
            value = reward_name(str(path), str(name or "compute_score"), keywords)
            yield "rl.reward.name", value, named
        for section, given in self._models.items():
            yield from _model_settings(section, given, named)

    def without_effect(self) -> Iterator[str]:
        """Keys of a reward model that is not enabled."""
        for section, given in self._models.items():
            if not given.get("enable"):
                names = [n for n, v in given.items() if n != "enable" and v is not None]
                yield from (f"{section}.{name}" for name in names)


def _keywords(given: dict[str, object]) -> dict[str, object]:
    """`reward_kwargs`, whole or key by key."""
    whole = given.get("reward_kwargs") or {}
    if not isinstance(whole, dict):
        raise ConfigError(
            f"custom_reward_function.reward_kwargs={whole!r} must be names and values"
        )
    prefix = "reward_kwargs."
    single = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
    return {str(name): value for name, value in (whole | single).items()}


def _model_settings(section: str, given: dict[str, object], named: str) -> Iterator[Setting]:
    enabled = given.get("enable")
    if not enabled:
        return
    if enabled is not True:
        raise ConfigError(f"{section}.enable={enabled!r} must be true or false")
    if named:
        raise ConfigError(
            f"{section}.enable=true beside {named}: one of them scores; leave one out, or add the "
            "other in reward.components"
        )
    options = {_MODEL[n]: v for n, v in given.items() if _MODEL[n] and v is not None}
    if "model" not in options:
        raise ConfigError(
            f"{section}.enable=true needs {section}.model.path, a sequence-classification folder "
            "or hub id"
        )
    yield "rl.reward.name", "reward_model", f"{section}.enable"
    yield "rl.reward.options", options, f"{section}.model.path"
