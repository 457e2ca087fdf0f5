"""Hermes' and Qwen's form: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

import re

from engine.agents.call_parsers._base import (
    ParsedTurn,
    call_of,
    loads,
    register_call_parser,
    sentence,
)
from engine.agents.protocol import ToolCall

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
    for found in _CALL.finditer(text):
        try:
            calls.append(call_of(loads(found.group(1)), len(calls), ("arguments", "parameters")))
        except ValueError as error:
            malformed.append(sentence(error, found.group(1)))
    return ParsedTurn(_CALL.sub("", text).strip(), tuple(calls), tuple(malformed))
