"""Llama 3's forms: a turn that is JSON, or a call in Python's form after `<|python_tag|>`.

{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
<|python_tag|>brave_search.call(query="weather")
<function=add>{"a": 1}</function>
"""

from __future__ import annotations

import ast
import json
import re

from engine.agents.call_parsers._base import (
    ParsedTurn,
    call_of,
    loads,
    register_call_parser,
    sentence,
)
from engine.agents.protocol import ToolCall

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
    found = _BUILT_IN.match(body)
    if found:
        return _built_in(before, *found.groups())
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
            told = error if isinstance(error, ValueError) else ValueError("it is nested too deeply")
            return ParsedTurn(before.strip(), tuple(calls), (sentence(told, rest),))
        rest = rest[end:].lstrip("; \n\t")
    return ParsedTurn(before.strip(), tuple(calls))


def _functions(body: str) -> ParsedTurn:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for found in _FUNCTION.finditer(body):
        name, given = found.groups()
        try:
            calls.append(call_of({"name": name, "arguments": loads(given or "{}")}, len(calls)))
        except ValueError as error:
            malformed.append(sentence(error, found.group()))
    return ParsedTurn(_FUNCTION.sub("", body).strip(), tuple(calls), tuple(malformed))


def _built_in(before: str, name: str, inside: str) -> ParsedTurn:
    """A call in Python's form, with literals by keyword."""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("name each argument")
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        told = ValueError(str(error) or "it is no call")
        return ParsedTurn(before.strip(), (), (sentence(told, f"{name}.call({inside})"),))
    return ParsedTurn(before.strip(), (ToolCall(name, given, "call_0"),))
