"""Tools by name.

Adding one: a function with `@register_tool("name")` in a module of this package or in a plugin. Its
options are its keyword-only parameters with defaults. `package.module:function` names one that
isn't registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from engine.agents.tools.tool import Tool, function_tool
from engine.errors import ConfigError
from engine.registry import Registry

_F = TypeVar("_F", bound=Callable[..., object])
ToolSpec: TypeAlias = "str | Mapping[str, object] | Tool | Callable[..., object]"
"""A name, {"name": …, "options": {…}}, a tool, or the function that makes one."""

_registry: Registry[Callable[..., object]] = Registry(
    "tool", "rollout.agent.environment.options.tools", "engine.agents.tools", "@register_tool(name)"
)


def register_tool(name: str) -> Callable[[_F], _F]:
    """Make a function selectable as a tool; the model sees the function's own name.

    Raises ConfigError for a name that is taken.
    """

    def add(function: _F) -> _F:
        _registry.add(name, function)
        return function

    return add


def resolve_tools(specs: Iterable[ToolSpec]) -> dict[str, Tool]:
    """The tools by the names that a model calls; ConfigError for one that isn't there, or twice."""
    found: dict[str, Tool] = {}
    for spec in specs:
        tool = spec if isinstance(spec, Tool) else _made(spec)
        if tool.name in found:
            raise ConfigError(
                f"rollout.agent.environment.options.tools has two tools {tool.name!r}; rename one"
            )
        found[tool.name] = tool
    return found


def _made(spec: str | Mapping[str, Any] | Callable[..., object]) -> Tool:
    if callable(spec):
        return function_tool(spec)
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec.get("name"), str) or spec.keys() - {"name", "options"}:
        raise ConfigError(
            f"rollout.agent.environment.options.tools has {dict(spec)!r}; give a name, "
            "or a mapping with `name` and `options`"
        )
    name = spec["name"]
    function: object = _registry.load(name) if ":" in name else _registry.get(name)
    if not callable(function):
        raise ConfigError(f"rollout.agent.environment.options.tools: {name!r} is no function")
    return function_tool(function, spec.get("options") or {})
