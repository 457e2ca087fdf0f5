"""What a parser of calls is, their registry, and what they share.

A parser reads text that anybody may have written: it raises nothing, and what begins a call and is
none becomes a sentence that the model can read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from engine.agents.protocol import Action, ToolCall
from engine.registry import Registry

_LONGEST = 200_000  # characters of a turn that are looked at


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn's text, taken apart."""

    content: str  # what stands outside of calls
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # a sentence for each that is none


CallParser: TypeAlias = Callable[[str], ParsedTurn]
"""Of a turn's text after its thinking."""

_registry: Registry[CallParser] = Registry(
    "call parser",
    "rollout.multi_turn.format",
    "engine.agents.call_parsers",
    "@register_call_parser(name)",
)


def register_call_parser(name: str, *aliases: str) -> Callable[[CallParser], CallParser]:
    """Make a parser selectable by name; a name can be taken once."""
    return _registry.register(name, *aliases)


def resolve_call_parser(name: str) -> CallParser:
    """The parser of this name, alias or `package.module:function`; ConfigError without one."""
    return _registry.get(name)


def parse_turn(parser: CallParser, text: str) -> ParsedTurn:
    """Read a turn: calls in its thinking, before the last `</think>`, don't count."""
    thinking, mark, rest = text[:_LONGEST].rpartition("</think>")
    parsed = parser(rest)
    return ParsedTurn(thinking + mark + parsed.content, parsed.tool_calls, parsed.malformed)


def parsed_action(parser: CallParser, text: str, token_ids: tuple[int, ...] = ()) -> Action:
    """The action of a turn's text and ids."""
    parsed = parse_turn(parser, text)
    return Action(text, token_ids, parsed.tool_calls, parsed.malformed, parsed.content)


def loads(text: str) -> object:
    """JSON with raw line breaks in its strings, as models write programs.

    Raises ValueError with a sentence; NaN and infinities are no JSON.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def call_of(value: object, place: int, arguments: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """A call of JSON such as {"name": "add", "arguments": {"a": 1}}; raise ValueError for none."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a call is an object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('a call has a "name"')
    given: object = next((value[key] for key in arguments if key in value), {})
    if isinstance(given, str):  # OpenAI's form: arguments as JSON text
        given = loads(given)
    if not isinstance(given, Mapping):
        raise ValueError(f'"{arguments[0]}" is an object, not {type(given).__name__}')
    return ToolCall(name, dict(given), f"call_{place}")


def sentence(error: ValueError, text: str) -> str:
    """What the model is told of a piece of its text."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return f"the call {shown!r} can't be read: {error}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
