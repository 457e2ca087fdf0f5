"""Tool calls in a policy's text, by the format of its chat template.

What a parser is, the registry, and the parsers `hermes` and `llama3_json`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from engine.agents.environment_protocol import Action, ToolCall
from engine.registry import Registry

# A parser reads text that anybody may have written: it raises nothing, and what begins a call and
# is none becomes a sentence that the model can read.

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
    "call parser", "rollout.multi_turn.format", (), "@register_call_parser(name)"
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


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def call_of(value: object, index: int) -> ToolCall:
    """A call of JSON such as {"name": "add", "arguments": {"a": 1}}; raise ValueError for none."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a call is an object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('a call has a "name"')
    arguments: object = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form: arguments as JSON text
        arguments = loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f'"arguments" is an object, not {type(arguments).__name__}')
    return ToolCall(name, dict(arguments), f"call_{index}")


def sentence(error: Exception, text: str) -> str:
    """What the model is told of a piece of its text."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return f"the call {shown!r} can't be read: {error}"


def _read_each(
    pattern: re.Pattern[str], text: str, json_of: Callable[[re.Match[str]], object]
) -> ParsedTurn:
    """Read each match of a pattern as a call; what is outside of them is content."""
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for match in pattern.finditer(text):
        try:
            calls.append(call_of(json_of(match), len(calls)))
        except ValueError as error:
            malformed.append(sentence(error, match["call"]))
    return ParsedTurn(pattern.sub("", text).strip(), tuple(calls), tuple(malformed))


# Hermes' and Qwen's form: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

# A call that isn't closed ends with the text, or where the next one begins.
_CALL = re.compile(r"<tool_call>(?P<call>.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@register_call_parser("hermes", "qwen")
def hermes(text: str) -> ParsedTurn:
    """Read the calls of a turn.

    >>> hermes('See: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    return _read_each(_CALL, text, lambda match: loads(match["call"]))


# Llama 3's forms: a turn that is JSON, or a call in Python's form after `<|python_tag|>`.
#
# {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
# <|python_tag|>brave_search.call(query="weather")
# <function=add>{"a": 1}</function>

_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)\s*\Z", re.DOTALL)
_FUNCTION = re.compile(
    r"(?P<call><function=(?P<name>[\w.-]+)>(?P<arguments>.*?)(?:</function>|\Z))", re.DOTALL
)


@register_call_parser("llama3_json", "llama3")
def llama3_json(text: str) -> ParsedTurn:
    """Read the calls of a turn; text without them is an answer.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    before, tag, body = text.rpartition(_TAG)
    body = body.strip()
    if not tag and "<function=" in body:
        return _read_each(
            _FUNCTION,
            body,
            lambda match: {"name": match["name"], "arguments": loads(match["arguments"] or "{}")},
        )
    match = _BUILT_IN.match(body)
    if match is None and not tag and not body.startswith("{"):
        return ParsedTurn(text.strip())
    calls: list[ToolCall] = []
    malformed: tuple[str, ...] = ()
    try:
        if match is not None:
            calls.append(_built_in(*match.groups()))
            body = ""
        while body:  # objects one after the other, with `;` between them
            value, end = json.JSONDecoder(strict=False).raw_decode(body)
            calls.append(call_of(value, len(calls)))
            body = body[end:].lstrip("; \n\t")
    except RecursionError:
        malformed = (sentence(ValueError("it is nested too deeply"), body),)
    except (ValueError, SyntaxError, MemoryError, TypeError) as error:
        malformed = (sentence(error, body),)
    return ParsedTurn(before.strip(), tuple(calls), malformed)


def _built_in(name: str, inside: str) -> ToolCall:
    """A call in Python's form, with literals by keyword."""
    call = ast.parse(f"f({inside})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("name each argument")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return ToolCall(name, arguments, "call_0")
