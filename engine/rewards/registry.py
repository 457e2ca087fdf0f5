"""Reward functions by name.

Adding one: a module in this package whose function carries `@register_reward("name")`, with
`components=("answer", ...)` if it returns named components.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import engine.rewards
from engine.errors import ConfigError
from engine.rewards.protocol import RewardFunction


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered reward; no components where it returns a plain list."""

    function: RewardFunction
    components: tuple[str, ...]  # in the order in which it returns them, e.g. ("answer", "format")


_REWARDS: dict[str, _Entry] = {}
_F = TypeVar("_F", bound=Callable[..., Any])


def register_reward(name: str, components: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Make a reward function selectable as `reward.name=<name>`; a name can be taken once.

    `components` are the names that it returns, in order; none for a reward that returns a plain
    list. Raises ConfigError for a name that is taken and for a component that is named twice.
    """
    if isinstance(components, str) or len(set(components)) < len(components):
        raise ConfigError(
            f"reward {name!r} declares components={components!r}; give a tuple of different names"
        )

    def add(function: _F) -> _F:
        present = _REWARDS.get(name)
        if present is not None and _origin(present.function) != _origin(function):
            raise ConfigError(
                f"reward {name!r} is already registered by {_origin(present.function)}; "
                f"choose another name for {_origin(function)}"
            )
        _REWARDS[name] = _Entry(function, tuple(components))
        return function

    return add


def resolve_reward(name: str) -> RewardFunction:
    """Return the reward registered as `name`, or the function at `package.module:function`.

    Raises ConfigError where there is none, or where it can't be called as a reward function.
    """
    function = _import_reward(name) if ":" in name else _registered(name)
    if not callable(function):
        raise ConfigError(f"reward.name={name!r} is {function!r}, which is not a function")
    _check_signature(name, function)
    return function


def declared_components(reward: str | RewardFunction) -> tuple[str, ...] | None:
    """Return the component names that a reward (its name, or the function) was registered with.

    () says that it returns a plain list; None that nothing is known before its first call, as for
    a function at `package.module:function` that was not registered. Raises ConfigError for a name
    that can't be resolved.
    """
    if isinstance(reward, str):
        function = resolve_reward(reward)
        if reward in _REWARDS:
            return _REWARDS[reward].components
    else:
        function = reward
    entries = (entry for entry in _REWARDS.values() if entry.function is function)
    return next((entry.components for entry in entries), None)


def _registered(name: str) -> RewardFunction:
    for module in pkgutil.iter_modules(engine.rewards.__path__):
        importlib.import_module(f"engine.rewards.{module.name}")
    if name not in _REWARDS:
        raise ConfigError(
            f"reward.name={name!r} is unknown; choose one of {sorted(_REWARDS)}, or give your own "
            "as package.module:function"
        )
    return _REWARDS[name].function


def _import_reward(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            f"reward.name={name!r}: module {module_name!r} can't be imported "
            f"({type(error).__name__}: {error}); it must be on the Python path and import cleanly"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigError(
            f"reward.name={name!r}: module {module_name!r} has no function {attribute!r}"
        ) from None


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    """Refuse at once what could only fail after a whole rollout."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind([], [], ground_truth=[], any_other_column=[])
    except TypeError as error:
        raise ConfigError(
            f"reward.name={name!r} can't be called as a reward function ({error}); write it as "
            "def reward(prompts, completions, *, ground_truth, **columns) -> list[float]"
        ) from None


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}"
