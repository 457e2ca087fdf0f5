"""Tools, and the parsers of their calls."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from engine.agents import Action, Observation, ToolCall, make_environment, tool_schemas
from engine.agents.builtin_tools import evaluate
from engine.agents.call_parsers import parse_turn, parsed_action, resolve_call_parser
from engine.agents.tools import Tool, answer, function_tool, register_tool
from engine.errors import ConfigError


@register_tool("weather of a test")
def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", *, station: str = "none"
) -> dict[str, Any]:
    """Tell the weather.

    Args:
        city: The city, e.g. "Bern"; one that is
            not known is an error.
        days: How many days ahead.
        unit: Of the temperature.

    Returns:
        What the station says.
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return {"city": city, "days": days, "unit": unit, "station": station}


def said(tools: list[Any], name: str, arguments: dict[str, Any], **limits: Any) -> str:
    found = {tool.name: tool for tool in tools}
    call = ToolCall(name, arguments, "call_7")
    message = asyncio.run(answer(found, call, **limits))
    assert message["role"] == "tool"
    assert (message["name"], message["tool_call_id"]) == (name, "call_7")
    return str(message["content"])


def test_a_schema_is_that_of_transformers() -> None:
    def plain(city: str, days: int, share: float, loud: bool, names: list[str]) -> str:
        """Say something.

        Args:
            city: The city.
            days: How many.
            share: Of all.
            loud: Whether to shout.
            names: Who is there.
        """
        return city

    theirs = get_json_schema(plain)
    theirs["function"].pop("return")
    assert function_tool(plain).schema == theirs
    ours = function_tool(weather).schema["function"]["parameters"]
    assert ours["required"] == ["city"]
    assert list(ours["properties"]) == ["city", "days", "unit"]  # no option
    assert ours["properties"]["unit"]["enum"] == ["C", "F"]
    assert ours["properties"]["city"]["description"].endswith("one that is not known is an error.")


def test_a_call_is_answered_whatever_it_asks() -> None:
    tools = [function_tool(weather, {"station": "north"})]
    right = {"city": "Bern", "days": 1, "unit": "C", "station": "north"}
    assert json.loads(said(tools, weather.__name__, {"city": "Bern"})) == right
    assert json.loads(said(tools, "weather", {"city": "Bern", "days": "3"}))["days"] == 3
    assert said(tools, "whether", {}) == "error: there is no tool 'whether'; call one of weather"
    assert said(tools, "weather", {}) == "error: argument 'city' is missing"
    wrong = said(tools, "weather", {"city": "Bern", "days": "many", "hour": 2})
    assert "argument 'days': Input should be a valid integer" in wrong
    assert "there is no argument 'hour' (it takes city, days, unit)" in wrong
    assert said(tools, "weather", {"city": "x", "station": "mine"}).startswith("error: there is no")
    assert said(tools, "weather", {"city": "Atlantis"}) == "error: LookupError: no such city"


def test_calls_that_hang_end_and_long_results_are_cut() -> None:
    released = threading.Event()

    def hang() -> str:
        """Never end."""
        released.wait(60)
        return ""

    async def sleep() -> str:
        """Never end."""
        await asyncio.sleep(60)
        return ""

    def leave() -> str:
        """End the program."""
        raise SystemExit(3)

    def much(count: int) -> str:
        """Say much.

        Args:
            count: How much.
        """
        return "x" * count

    tools = [function_tool(one) for one in (hang, sleep, leave, much)]
    start = time.monotonic()
    assert said(tools, "hang", {}, timeout_s=0.05) == "error: hang took longer than 0.05 s"
    assert said(tools, "sleep", {}, timeout_s=0.05) == "error: sleep took longer than 0.05 s"
    assert "SystemExit: 3" in said(tools, "leave", {})
    cut = said(tools, "much", {"count": 50}, max_output=10)
    assert cut == "x" * 10 + "\n[cut: 40 of 50 characters left out]"
    assert time.monotonic() - start < 30
    released.set()


def test_what_makes_no_tool_is_refused_by_name() -> None:
    def bare(a: int) -> int:
        return a

    def silent(a: int) -> int:
        """Do something."""
        return a

    def untyped(a) -> int:  # type: ignore[no-untyped-def]
        """Do something.

        Args:
            a: What.
        """
        return int(a)

    def strange(a: Path.__class__) -> int:  # type: ignore[name-defined]
        """Do something.

        Args:
            a: What.
        """
        return 1

    for function, words in (
        (bare, "'bare' has no docstring"),
        (silent, "doesn't describe argument 'a'"),
        (untyped, "argument 'a' needs a type hint"),
        (strange, "no JSON schema"),
    ):
        with pytest.raises(ConfigError, match=words):
            function_tool(function)
    with pytest.raises(ConfigError, match="doesn't read 'speed'"):
        function_tool(weather, {"speed": 1})
    with pytest.raises(ConfigError, match="two tools 'calculator'"):
        make_environment("tools", {"tools": ["calculator", "calculator"]})
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        make_environment("tools", {"tools": ["calculater"]})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48271 * 90317", "4359691907"),
        ("(1 + 2) * 3 ** 2 - 7 // 2 % 5", "24"),
        ("2^0.5", "1.41421356237"),
        ("−3 × 4 ÷ 2", "-6"),
        ("sqrt(16) + max(1, 2)", "6"),
        ("10 / 4", "2.5"),
        ("10**40 / 10**39", "10"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "too large"),
        ("(-8)**0.5", "no finite real"),
        ("1e308*10", "no finite real"),
        ("__import__('os')", "not allowed"),
        ("().__class__", "not allowed"),
        ("'a'*9", "not allowed"),
        ("True + 1", "not allowed"),
        ("2 +", "no arithmetic expression"),
        ("(" * 400, "no arithmetic expression"),
        ("1" * 501, "more than 500"),
        ("1 << 9", "not allowed"),
        ("-" * 499 + "1", "none"),
        ("round(1, 2, 3)", "argument"),
        ("exp(1e9)", "too large"),
    ],
)
def test_the_calculator_is_bounded(expression: str, words: str) -> None:
    start = time.monotonic()
    if expression == "-" * 499 + "1":
        assert evaluate(expression) == "-1"
        return
    with pytest.raises(ValueError, match=words):
        evaluate(expression)
    assert time.monotonic() - start < 1


def test_python_shows_what_a_program_prints_and_its_errors() -> None:
    (tool,) = (make_environment("tools", {"tools": ["python"]})._tools.values(),)  # type: ignore[attr-defined]
    tools = list(tool)
    assert said(tools, "python", {"code": "x = 3\nprint(x)\nx * 2"}) == "3\n6\n"
    assert said(tools, "python", {"code": "x = 1"}) == "(nothing was printed)"
    raised = said(tools, "python", {"code": "def f():\n    return 1 / 0\nf()"})
    assert 'File "program.py", line 2, in f' in raised
    assert raised.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in said(tools, "python", {"code": "1 +"})
    refused = said(tools, "python", {"code": "import socket\nsocket.socket()"})
    assert "PermissionError" in refused
    slow = function_tool(tools[0].function.__class__ and _python(), {"timeout_s": 0.5})
    assert "longer than 0.5 s" in said([slow], "python", {"code": "while True: pass"})


def _python() -> Any:
    from engine.agents.builtin_tools import python

    return python


def test_search_finds_the_passage_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    texts = [
        "Bern is the capital of Switzerland.",
        "Paris is the capital of France.",
        "Rain falls.",
    ]
    rows = [json.dumps({"title": f"t{i}", "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows))
    environment = make_environment(
        "tools", {"tools": [{"name": "search", "options": {"corpus": str(path), "top_k": 2}}]}
    )
    call = ToolCall("search", {"query": "capital of France"}, "c")
    seen = asyncio.run(environment.step(Action("…", tool_calls=(call,))))
    content = seen.messages[0]["content"]
    assert content.split("\n\n") == [f"[1] t1: {texts[1]}", f"[0] t0: {texts[0]}"]
    lost = ToolCall("search", {"query": "zebra"}, "c")
    seen = asyncio.run(environment.step(Action("…", tool_calls=(lost,))))
    assert seen.messages[0]["content"] == "(nothing was found)"


def test_the_environment_answers_calls_until_there_is_none() -> None:
    environment = make_environment("tools", {"tools": ["calculator", f"{__name__}:weather"]})
    assert [one["function"]["name"] for one in tool_schemas(environment)] == [
        "calculator",
        "weather",
    ]

    async def play() -> list[Observation]:
        calls = tuple(ToolCall("calculator", {"expression": f"{i}+1"}, f"c{i}") for i in range(10))
        return [
            await environment.reset({"prompt": []}),
            await environment.step(Action("…", tool_calls=calls, malformed=("no JSON",))),
            await environment.step(Action("It is 2.")),
        ]

    first, second, last = asyncio.run(play())
    assert (first.messages, first.done) == ((), False)
    contents = [message["content"] for message in second.messages]
    assert contents[:8] == [str(i + 1) for i in range(8)]
    assert contents[8:] == ["error: at most 8 calls a turn are run"] * 2 + ["error: no JSON"]
    assert (second.done, last.done, last.info["calls"]) == (False, True, 11)


def test_a_tool_of_ones_own_is_used_as_it_is() -> None:
    tool = Tool("echo", {"type": "function"}, lambda **given: given["x"], dict)
    assert said([tool], "echo", {"x": "hello"}) == "hello"


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
        '<|python_tag|>search.call(query="rain")',
        "<|python_tag|>",
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
]


@given(st.lists(st.sampled_from([*PIECES, "</think>", "é", ";", "\\"])), st.text())
def test_no_text_breaks_a_parser(pieces: list[str], more: str) -> None:
    for name in ("hermes", "llama3_json"):
        parsed = parse_turn(resolve_call_parser(name), "".join(pieces) + more)
        assert all(isinstance(call.name, str) for call in parsed.tool_calls)


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        resolve_call_parser("herms")
