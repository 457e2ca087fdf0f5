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
    "call parser",
    "rollout.multi_turn.format",
    (),
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


def call_of(value: object, index: int, arguments: tuple[str, ...] = ("arguments",)) -> ToolCall:
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
    return ToolCall(name, dict(given), f"call_{index}")


def sentence(error: ValueError, text: str) -> str:
    """What the model is told of a piece of its text."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return f"the call {shown!r} can't be read: {error}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Hermes' and Qwen's form: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

# A call that isn't closed ends with the text, or where the next one begins.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@register_call_parser("hermes", "qwen")
def hermes(text: str) -> ParsedTurn:
    """Read the calls of a turn.

    >>> hermes('See: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for match in _CALL.finditer(text):
        try:
            calls.append(call_of(loads(match.group(1)), len(calls), ("arguments", "parameters")))
        except ValueError as error:
            malformed.append(sentence(error, match.group(1)))
    return ParsedTurn(_CALL.sub("", text).strip(), tuple(calls), tuple(malformed))


# Llama 3's forms: a turn that is JSON, or a call in Python's form after `<|python_tag|>`.
#
# {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
# <|python_tag|>brave_search.call(query="weather")
# <function=add>{"a": 1}</function>

_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"(\w+)\.call\((.*)\)\s*\Z", re.DOTALL)
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|\Z)", re.DOTALL)


@register_call_parser("llama3_json", "llama3")
def llama3_json(text: str) -> ParsedTurn:
    """Read the calls of a turn; text without them is an answer.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    before, tag, body = text.rpartition(_TAG)
    body = body.strip()
    if not tag and "<function=" in body:
        return _functions(body)
    match = _BUILT_IN.match(body)
    if match:
        return _built_in(before, *match.groups())
    if not tag and not body.startswith("{"):
        return ParsedTurn(text.strip())
    return _objects(before, body)


def _objects(before: str, body: str) -> ParsedTurn:
    """Objects one after the other, with `;` between them."""
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder(strict=False)
    rest = body
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
            calls.append(call_of(value, len(calls), ("parameters", "arguments")))
        except (ValueError, RecursionError) as error:
            cause = (
                error if isinstance(error, ValueError) else ValueError("it is nested too deeply")
            )
            return ParsedTurn(before.strip(), tuple(calls), (sentence(cause, rest),))
        rest = rest[end:].lstrip("; \n\t")
    return ParsedTurn(before.strip(), tuple(calls))


def _functions(body: str) -> ParsedTurn:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for match in _FUNCTION.finditer(body):
        name, given = match.groups()
        try:
            calls.append(call_of({"name": name, "arguments": loads(given or "{}")}, len(calls)))
        except ValueError as error:
            malformed.append(sentence(error, match.group()))
    return ParsedTurn(_FUNCTION.sub("", body).strip(), tuple(calls), tuple(malformed))


def _built_in(before: str, name: str, inside: str) -> ParsedTurn:
    """A call in Python's form, with literals by keyword."""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("name each argument")
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        cause = ValueError(str(error) or "it is no call")
        return ParsedTurn(before.strip(), (), (sentence(cause, f"{name}.call({inside})"),))
    return ParsedTurn(before.strip(), (ToolCall(name, given, "call_0"),))
