"""Environments by name.

Adding one: a module in `engine/agents/environments`, or a plugin of yours, whose class carries
`@register_environment("name")`. Its options are the keyword-only parameters with defaults of its
`__init__`. `package.module:Class` names one that is registered in its module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.agents.protocol import Environment
from engine.errors import ConfigError
from engine.registry import Options, Registry

_C = TypeVar("_C", bound=Callable[..., Any])
_METHODS = ("reset", "step", "close")

_registry: Registry[Callable[..., Environment]] = Registry(
    "environment",
    "rollout.agent.environment.name",
    "engine.agents.environments",
    "@register_environment(name)",
)


def register_environment(name: str) -> Callable[[_C], _C]:
    """Make an environment's class selectable by name; a name can be taken once.

    Raises ConfigError for a name that is taken, and for a class without the protocol's coroutines.
    """

    def add(made: _C) -> _C:
        _check(name, made)
        _registry.add(name, made)
        return made

    return add


def environment_class(name: str) -> Callable[..., Environment]:
    """What makes environments of this name, or stands at `package.module:Class`.

    Raises ConfigError where there is none, or it has not the protocol's coroutines.
    """
    made: Any = _registry.load(name) if ":" in name else _registry.get(name)
    if not callable(made):
        raise ConfigError(
            f"rollout.agent.environment.name={name!r} is {made!r}, which makes no environments"
        )
    _check(name, made)
    return made


def make_environment(name: str, options: Mapping[str, object] | None = None) -> Environment:
    """Make the environment registered as `name`, or the one of the class at `package.module:Class`.

    Raises ConfigError where there is none, and for an option that it doesn't declare.
    """
    made = environment_class(name)
    given = Options(f"environment {name!r}", made).parse(
        options or {}, "rollout.agent.environment.options"
    )
    return made(**given)


def environment_module(name: str) -> str:
    """The module of an environment, e.g. "my_module"; one named by its path isn't imported."""
    if ":" in name:
        return name.partition(":")[0]
    return str(getattr(_registry.get(name), "__module__", ""))


def _check(name: str, made: Callable[..., object]) -> None:
    """Refuse a class that can't play; of a function nothing is known before it is called."""
    missing = [m for m in _METHODS if not inspect.iscoroutinefunction(getattr(made, m, None))]
    if inspect.isclass(made) and missing:
        raise ConfigError(
            f"environment {name!r}: {made.__qualname__} has no `async def {missing[0]}`; write it "
            "as engine.agents.Environment has it"
        )
