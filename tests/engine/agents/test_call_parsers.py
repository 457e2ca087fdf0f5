"""Calls in what a policy wrote, in the formats of Hermes, Qwen and Llama 3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.agents import ToolCall
from engine.agents.call_parsers import parse_turn, parsed_action, resolve_call_parser
from engine.errors import ConfigError

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
CALL = ToolCall("add", {"a": 1, "b": [2]}, "call_0")


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{ADD}\n</tool_call>",
        f"<tool_call>{ADD}",  # the end of the turn closes it
        f"Let me see.\n<tool_call>\n{ADD}\n</tool_call>\n",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}</tool_call>',
        f"<think><tool_call>{{}}</tool_call></think><tool_call>{ADD}</tool_call>",
    ],
)
def test_hermes_reads_a_call(text: str) -> None:
    parsed = parse_turn(resolve_call_parser("qwen"), text)
    assert (parsed.tool_calls, parsed.malformed) == ((CALL,), ())


def test_hermes_reads_several_and_says_what_is_none() -> None:
    text = (
        f"A<tool_call>{ADD}</tool_call><tool_call>{{oops</tool_call><tool_call>[1]<tool_call>{ADD}"
    )
    action = parsed_action(resolve_call_parser("hermes"), text, (1, 2))
    assert (action.text, action.token_ids) == (text, (1, 2))
    assert [call.id for call in action.tool_calls] == ["call_0", "call_1"]
    assert len(action.malformed) == 2
    assert action.malformed[0].startswith("the call '{oops' can't be read: Expecting property name")
    assert action.malformed[1].endswith("a call is an object, not list")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"arguments": {}}', 'a call has a "name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" is an object, not list'),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_call_is_told(body: str, words: str) -> None:
    parsed = resolve_call_parser("hermes")(f"<tool_call>{body}</tool_call>")
    assert parsed.tool_calls == ()
    assert words in parsed.malformed[0]
    assert len(parsed.malformed[0]) < 250


def test_programs_in_arguments_may_have_line_breaks() -> None:
    text = '<tool_call>{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}</tool_call>'
    (call,) = resolve_call_parser("hermes")(text).tool_calls
    assert call.arguments == {"code": "a = 1\nprint(a)"}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "y"}}',
            [("f", {}), ("g", {"x": "y"})],
        ),
        ('<|python_tag|>search.call(query="rain", n=-2)', [("search", {"query": "rain", "n": -2})]),
        ('Well: <function=add>{"a": 1}</function>', [("add", {"a": 1})]),
        ("The answer is {5}.", []),
    ],
)
def test_llama_reads_its_forms(text: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    parsed = resolve_call_parser("llama3")(text)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert parsed.malformed == ()


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", ',
        "{5}",
        "<|python_tag|>f.call(1)",
        "<|python_tag|>print(1)",
        "<function=f>{]",
    ],
)
def test_llama_says_what_is_no_call(text: str) -> None:
    parsed = resolve_call_parser("llama3_json")(text)
    assert parsed.tool_calls == ()
    assert len(parsed.malformed) == 1


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    '"name"',
    ":",
    '"f"',
    "[",
    "<|python_tag|>",
    ".call(",
]


@given(st.lists(st.sampled_from([*PIECES, "</think>", "<function=f>", "é", ";", "\\"])), st.text())
def test_no_text_breaks_a_parser(pieces: list[str], more: str) -> None:
    for name in ("hermes", "llama3_json"):
        parsed = parse_turn(resolve_call_parser(name), "".join(pieces) + more)
        assert all(isinstance(call.name, str) for call in parsed.tool_calls)


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        resolve_call_parser("herms")
