"""Reward functions by name.

Adding one: a module in this package whose function carries `@register_reward("name")`, with
`components=("answer", ...)` if it returns named components. Its options are its keyword-only
parameters with defaults; `reward.options` sets them.

A completion is right where its reward says so with at least 1 (`right_from`): by the component
`correct` (else `answer`), or by the score of a reward that has neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import ConfigError
from engine.plugins import import_plugins
from engine.registry import Options, Registry
from engine.rewards.protocol import RewardFunction, RewardResult

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RegisteredReward:
    """A registered reward; no components where it returns a plain list."""

    function: RewardFunction
    components: tuple[str, ...]  # in the order in which it returns them, e.g. ("answer", "format")
    pooled: bool = False
    imports: tuple[str, ...] = ()
    answer: Callable[..., str | None] | None = None
    well_formed: Callable[..., bool] | None = None
    right_from: Callable[..., float] | None = None


_registry: Registry[RegisteredReward] = Registry(
    "reward", "reward.name", "engine.rewards", "@register_reward(name)"
)


def register_reward(
    name: str,
    components: tuple[str, ...] = (),
    *,
    pooled: bool = False,
    imports: tuple[str, ...] = (),
    answer: Callable[..., str | None] | None = None,
    well_formed: Callable[..., bool] | None = None,
    right_from: Callable[..., float] | None = None,
) -> Callable[[_F], _F]:
    """Make a reward function selectable as `reward.name=<name>`; a name can be taken once.

    `components` are the names that it returns, in order; none for a reward that returns a plain
    list. `pooled` is for the engine's own rewards whose time depends on what a model writes: they
    run in processes of their own, each completion with a deadline (see `pool`); those processes
    load `imports` once. `answer(completion)` reads the answer that evaluation shows and votes on;
    `well_formed(completion)` says whether it keeps the format; `right_from()` is the least score
    of a right one, 1 without it. Options of the reward that are keywords of these are given to
    them. Raises ConfigError for a name that is taken and for a component that is named twice.
    """
    if isinstance(components, str) or len(set(components)) < len(components):
        raise ConfigError(
            f"reward {name!r} declares components={components!r}; give a tuple of different names"
        )

    def add(function: _F) -> _F:
        entry = RegisteredReward(
            function, tuple(components), pooled, imports, answer, well_formed, right_from
        )
        _registry.add(name, entry, function)
        return function

    return add


def resolve_reward(name: str, options: Mapping[str, object] | None = None) -> RewardFunction:
    """Return the reward registered as `name`, or the function at `package.module:function`.

    `options` are those of `reward.options`; one that has a column's name stands in its place.
    Raises ConfigError where there is no such reward, where it can't be called as a reward function,
    and for an option that it doesn't declare.
    """
    function: object = _registry.load(name) if ":" in name else _registry.get(name).function
    if not callable(function):
        raise ConfigError(f"reward.name={name!r} is {function!r}, which is not a function")
    _check_signature(name, function)
    given = Options(f"reward {name!r}", function).parse(options or {}, "reward.options")
    return _with_options(function, given) if given else function


def registered_reward(name: str) -> RegisteredReward | None:
    """The entry of a name or path; None for a function at a path that was not registered.

    Raises ConfigError for a name that can't be resolved.
    """
    return _registry.registered(_registry.load(name)) if ":" in name else _registry.get(name)


def declared_components(reward: str | RewardFunction) -> tuple[str, ...] | None:
    """Return the component names that a reward (its name, or the function) was registered with.

    () says that it returns a plain list; None that nothing is known before its first call, as for
    a function at `package.module:function` that was not registered. Raises ConfigError for a name
    that can't be resolved.
    """
    registered = _registry.registered(resolve_reward(reward) if isinstance(reward, str) else reward)
    return None if registered is None else registered.components


def reward_module(name: str) -> str:
    """The module of a reward, e.g. "my_rewards"; one that is named by its path isn't imported.

    Raises ConfigError for a name that is not registered.
    """
    if ":" in name:
        return name.partition(":")[0]
    return str(getattr(_registry.get(name).function, "__module__", ""))


def import_reward(name: str, modules: Iterable[str]) -> None:
    """Import modules in turn until one of them has registered `name`."""
    for module in modules:
        import_plugins([module])
        if name in _registry.names():
            return


def _with_options(function: RewardFunction, options: Mapping[str, object]) -> RewardFunction:
    @functools.wraps(function)
    def configured(
        prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> RewardResult | Awaitable[RewardResult]:
        return function(prompts, completions, **{**columns, **options})

    return configured


def _check_signature(name: str, function: Callable[..., object]) -> None:
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
