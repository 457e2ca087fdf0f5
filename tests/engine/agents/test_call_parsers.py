"""Calls of tools in what policies write: one table, which vLLM's parsers are held against too."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, NamedTuple

import pytest
from chat_templates import family_tokenizer

from engine.agents.call_parsers import (
    ParsedTurn,
    parse_turn,
    parsed_action,
    resolve_call_parser,
)
from engine.agents.episode import EpisodeTokenizer
from engine.data.templates import encode_prompt, encode_response
from engine.errors import ConfigError


def call(name: str = "add", key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


class Case(NamedTuple):
    """What is written, and the calls in it; `vllm` are those that vLLM reads where it differs."""

    parser: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    malformed: int = 0
    content: str = ""
    vllm: list[tuple[str, dict[str, Any]]] | None = None


ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1})
END, OPEN = "</tool_call>", "<tool_call>"
LOST: list[tuple[str, dict[str, Any]]] = []  # vLLM's expression ends a call at the first tag
CASES = {
    "a call": Case("hermes", f"{OPEN}\n{call(a=1)}\n{END}", [ADD]),
    "a call that the turn's end closes": Case("hermes", f"{OPEN}{call(a=1)}", [ADD]),
    "text before": Case("hermes", f"So:\n{OPEN}{call(a=1)}{END}", [ADD], content="So:"),
    "two calls": Case(
        "hermes", f"{OPEN}{call(a=1)}{END}\n{OPEN}{call('f')}{END}", [ADD, ("f", {})]
    ),
    "text between": Case(
        "hermes",
        f"{OPEN}{call(a=1)}{END} and {OPEN}{call('f')}{END} so",
        [ADD, ("f", {})],
        content="and  so",
    ),
    "nested arguments": Case(
        "hermes", f"{OPEN}{call(a={'b': [{'c': '}'}]})}{END}", [("add", {"a": {"b": [{"c": "}"}]}})]
    ),
    "no call": Case("hermes", "It is 4.", [], content="It is 4."),
    "an end in an argument": Case(
        "hermes", f"{OPEN}{call(a=f'x {END} y')}{END}", [("add", {"a": f"x {END} y"})], vllm=LOST
    ),
    "a begin in an argument": Case(
        "hermes", f"{OPEN}{call(a=f'x {OPEN} y')}{END}", [("add", {"a": f"x {OPEN} y"})]
    ),
    "a thought's end in an argument": Case(
        "hermes", f"{OPEN}{call(a='x </think> y')}{END}", [("add", {"a": "x </think> y"})]
    ),
    "both tags in an argument": Case(
        "hermes",
        f"{OPEN}{call(a=f'{OPEN}{{}}{END}')}{END}",
        [("add", {"a": f"{OPEN}{{}}{END}"})],
        vllm=LOST,
    ),
    "two calls in a tag": Case(
        "hermes", f"{OPEN}{call(a=1)}\n{call('f')}{END}", [ADD, ("f", {})], vllm=LOST
    ),
    "text after the JSON": Case(
        "hermes", f"{OPEN}{call(a=1)} thanks{END}", [ADD], malformed=1, vllm=LOST
    ),
    "a broken call beside a good one": Case(
        "hermes", f"{OPEN}{{oops{END}{OPEN}{call(a=1)}{END}", [ADD], malformed=1, vllm=LOST
    ),
    "JSON that is no call": Case("hermes", f"{OPEN}[1]{END}", [], malformed=1),
    "llama, a call": Case("llama3_json", call(key="parameters", a=1), [ADD]),
    "llama, arguments": Case("llama3_json", call(a=1), [ADD]),
    "llama, two calls": Case("llama3_json", f"{call(a=1)}; {call('f')}", [ADD, ("f", {})]),
    "llama, the tag": Case("llama3_json", f"<|python_tag|>{call(a=1)}", [ADD]),
    "llama, text before": Case("llama3_json", f"So: {call(a=1)}", [ADD], content="So:"),
    "llama, the tag in an argument": Case(
        "llama3_json", call(a="<|python_tag|> {"), [("add", {"a": "<|python_tag|> {"})]
    ),
    "llama, a call in Python's form": Case(
        "llama3_json", '<|python_tag|>search.call(query="rain")', [], malformed=1
    ),
    "llama, a broken call after the tag": Case(
        "llama3_json", '<|python_tag|>{"name": ', [], malformed=1
    ),
    "llama, an answer in braces": Case("llama3_json", "It is {4}.", [], content="It is {4}."),
    "llama, JSON that is no call": Case(
        "llama3_json", 'The set is {"a": 1}.', [], content='The set is {"a": 1}.'
    ),
}


def read(parsed: ParsedTurn) -> list[tuple[str, Any]]:
    return [(one.name, dict(one.arguments)) for one in parsed.tool_calls]


@pytest.mark.parametrize("name", CASES)
def test_every_call_is_read_or_told(name: str) -> None:
    case = CASES[name]
    parsed = parse_turn(resolve_call_parser(case.parser), case.text)
    assert read(parsed) == case.calls
    assert len(parsed.malformed) == case.malformed
    if not case.malformed:
        assert parsed.content == case.content
    assert [one.id for one in parsed.tool_calls] == [f"call_{i}" for i in range(len(case.calls))]


@pytest.mark.slow  # it loads vLLM
def test_vllm_reads_the_same_calls() -> None:
    pytest.importorskip("vllm")
    from engine.rollout.vllm.tool_calls import call_reader

    tokenizer = family_tokenizer("llama3")
    tokenizer.add_tokens(["<|python_tag|>"])
    readers = {name: call_reader(name, tokenizer) for name in ("hermes", "llama3_json")}
    for name, case in CASES.items():
        reader = readers[case.parser]
        assert reader is not None
        theirs = [(function, json.loads(text)) for function, text in reader(case.text)[1]]
        assert theirs == (case.calls if case.vllm is None else case.vllm), name


@pytest.mark.slow
def test_a_format_of_vllms_is_read_by_its_parser() -> None:
    pytest.importorskip("vllm")
    tokenizer = family_tokenizer("qwen2.5")
    parser = resolve_call_parser("pythonic", tokenizer)
    assert read(parse_turn(parser, "[add(a=1), f()]")) == [ADD, ("f", {})]
    assert parse_turn(parser, "It is 4.").tool_calls == ()
    with pytest.raises(ConfigError, match="vLLM's parser needs another tokenizer"):
        resolve_call_parser("mistral", tokenizer)
    with pytest.raises(ConfigError, match="is unknown"):
        resolve_call_parser("nobodys", tokenizer)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>{OPEN}{call('f')}{END}</think>{OPEN}{call(a=1)}{END}", [ADD]),
        (f"<think>\n{OPEN}{call('f')}{END}", []),  # cut in its thought
        (f"I think</think>{OPEN}{call(a=1)}{END}", [ADD]),
        (f"<think></think>{OPEN}{call(a='</think>')}{END}", [("add", {"a": "</think>"})]),
    ],
)
def test_calls_in_a_thought_don_t_count(text: str, calls: list[Any]) -> None:
    parsed = parse_turn(resolve_call_parser("hermes"), text)
    assert read(parsed) == calls
    assert parsed.content == text.rpartition(OPEN)[0] if calls else parsed.content == text


def test_what_the_prompt_has_opened_is_known() -> None:
    """A thought that R1's prompt opens and a limit cuts: its call is no call."""
    tokenizer = family_tokenizer("r1-distill")
    stop = tokenizer.eos_token_id
    reader = EpisodeTokenizer(
        tokenizer, (stop,), partial(parsed_action, resolve_call_parser("hermes"))
    )
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "1?"}])
    text = f"I could {OPEN}{call('f')}{END}"
    cut = reader.action(prompt, tokenizer.encode(text, add_special_tokens=False))
    assert (cut.text, cut.tool_calls) == (f"<think>\n{text}", ())
    said = encode_response(tokenizer, f"<think>\nAdd.</think>{OPEN}{call(a=1)}{END}")
    action = reader.action(prompt, said)
    assert action.text == f"<think>\nAdd.</think>{OPEN}{call(a=1)}{END}"
    assert [(one.name, one.arguments) for one in action.tool_calls] == [ADD]


def test_control_tokens_of_a_format_reach_its_parser() -> None:
    tokenizer = family_tokenizer("llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    end, tag = (tokenizer.convert_tokens_to_ids(t) for t in ("<|eot_id|>", "<|python_tag|>"))
    parser = resolve_call_parser("llama3_json")
    reader = EpisodeTokenizer(tokenizer, (end,), partial(parsed_action, parser))
    said = tokenizer.encode("search()", add_special_tokens=False)
    action = reader.action([], [tag, *said, end])
    assert (action.text, action.content) == ("search()", "")
    assert len(action.malformed) == 1  # a call, for its control token


@pytest.mark.parametrize("piece", [OPEN, "{", "{};", f'{OPEN}{{"a": "', f"{OPEN}[", '[{"'])
def test_a_long_turn_is_read_in_time(piece: str) -> None:
    start = time.perf_counter()
    for name, opening in (("hermes", ""), ("hermes", OPEN), ("llama3_json", "")):
        text = opening + piece * (200_000 // len(piece))
        assert len(parse_turn(resolve_call_parser(name), text).malformed) <= 101
    assert time.perf_counter() - start < 5
