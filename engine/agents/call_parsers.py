"""Tool calls in a policy's text, by the format of its chat template.

The parsers `hermes` and `llama3_json` read JSON from each opening tag on, to where it ends: a tag
that an argument holds is text. A parser reads text that anybody may have written: it raises
nothing, and what begins a call and is none becomes a sentence that the model can read.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from engine.agents.environment_protocol import Action, ToolCall
from engine.errors import ConfigError
from engine.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 200_000  # characters of a turn that are looked at


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn's text, taken apart."""

    content: str  # what stands outside of calls
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # a sentence for each that is none


T = TypeVar("T")
CallParser: TypeAlias = Callable[[str], ParsedTurn]
"""Reads a turn's text after its thinking."""

_registry: Registry[CallParser] = Registry(
    "call parser", "rollout.multi_turn.format", (), "@register_call_parser(name)"
)
register_call_parser = _registry.register
"""Decorator: make a parser selectable by a name, or aliases, each of which can be taken once."""


def resolve_call_parser(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Sequence[Mapping[str, object]] = (),
) -> CallParser:
    """The parser of this name, alias or `package.module:function`; with a tokenizer vLLM's, too.

    `tools` are the schemas that vLLM's read types of arguments in. Raises ConfigError without one.
    """
    try:
        return _registry.get(name)
    except ConfigError:
        if tokenizer is None or (parser := _of_vllm(name, tokenizer, tools)) is None:
            raise
        return parser


_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"


def split_thought(text: str) -> tuple[str, str]:
    """Split a whole turn into its thought, with its tags, and what follows it.

    A thought that nothing ends, as of a turn that was cut, has nothing after it.
    """
    thought, mark, rest = text.partition(_END_OF_THOUGHT)
    return (thought + mark, rest) if mark or _begins_with_thought(text) else ("", text)


def bare_thought(thought: str) -> str:
    """A thought without its tags."""
    return thought.strip().removeprefix(_THOUGHT).removesuffix(_END_OF_THOUGHT).strip("\n")


def _begins_with_thought(text: str) -> bool:
    return text.lstrip().startswith(_THOUGHT)


def parse_turn(parser: CallParser, text: str) -> ParsedTurn:
    """Read a whole turn, with what its prompt has opened: calls in its thought don't count."""
    text = text[:_LONGEST]
    thought, rest = split_thought(text)
    if "{" in thought and not _begins_with_thought(text):  # no thought: the tag is an argument's
        thought, rest = "", text
    parsed = parser(rest) if rest else ParsedTurn("")
    return replace(parsed, content=thought + parsed.content)


def parsed_action(
    parser: CallParser, text: str, token_ids: tuple[int, ...] = (), marked: str = ""
) -> Action:
    """The action of a turn's text and ids; `marked` is the text with its control tokens."""
    parsed = parse_turn(parser, marked or text)
    return Action(text, token_ids, parsed.tool_calls, parsed.malformed, parsed.content)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Strings may have raw line breaks, as models write programs.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
_ARGUMENTS = {"arguments", "parameters"}


def _decoded(decode: Callable[[str], T], text: str) -> T:
    """Read JSON by a method of the decoder; raise ValueError for none."""
    try:
        return decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _call_of(value: object, index: int) -> ToolCall:
    """A call of JSON such as {"name": "add", "arguments": {"a": 1}}; raise ValueError for none."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a call is an object, not {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError('a call has a "name"')
    arguments: object = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form: arguments as JSON text
        arguments = _decoded(_DECODER.decode, arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f'"arguments" is an object, not {type(arguments).__name__}')
    return ToolCall(name, dict(arguments), f"call_{index}")


def _sentence(error: Exception, text: str) -> str:
    """What the model is told of a piece of its text."""
    shown = " ".join(text.split())
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return f"the call {shown!r} can't be read: {error}"


_MOST = 100  # malformed calls of a turn that are told
_SEPARATORS = re.compile(r"[\s;,]*")


class _Scan:
    """A turn's calls, collected from its beginning on."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self.malformed: list[str] = []

    def skip(self, start: int, length: int = 0) -> None:
        """Take what comes before `start` as content, and go on `length` characters after it."""
        self._content.append(self.text[self.at : start])
        self.at = start + length

    def value(self) -> object:
        """Return the JSON value that begins here, and go on after it; raise ValueError for none."""
        # Of a piece, whose errors tell its own lines.
        value, end = _decoded(_DECODER.raw_decode, self.text[self.at :])
        self.at += end
        return value

    def skip_separators(self) -> None:
        match = _SEPARATORS.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def add(self, value: object, text: str) -> None:
        """Add the call that `text` has as JSON."""
        try:
            self._calls.append(_call_of(value, len(self._calls)))
        except ValueError as error:
            self.malformed.append(_sentence(error, text))

    def done(self) -> ParsedTurn:
        content = "".join(self._content) + self.text[self.at :]
        return ParsedTurn(content.strip(), tuple(self._calls), tuple(self.malformed))


_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"


@register_call_parser("hermes", "qwen")
def hermes(text: str) -> ParsedTurn:
    """Read calls in Hermes' and Qwen's form: JSON in tags, one or more in each.

    >>> hermes('See: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    scan, tags = _Scan(text), (_END_OF_CALL, _CALL)
    while len(scan.malformed) < _MOST and (start := text.find(_CALL, scan.at)) >= 0:
        scan.skip(start, len(_CALL))
        start = scan.at
        try:
            scan.skip_separators()
            while True:
                scan.add(scan.value(), text[start : scan.at])
                scan.skip_separators()
                if len(scan.malformed) >= _MOST or not text.startswith(("{", "["), scan.at):
                    break
                start = scan.at
            if scan.at < len(text) and not text.startswith(tags, scan.at):
                raise ValueError(f"text follows its JSON before {_END_OF_CALL}")
        except ValueError as error:
            ends = [text.find(tag, scan.at) for tag in tags if tag in text[scan.at :]]
            scan.at = min(ends, default=len(text))
            scan.malformed.append(_sentence(error, text[start : scan.at]))
        if text.startswith(_END_OF_CALL, scan.at):
            scan.at += len(_END_OF_CALL)
    return scan.done()


_TAG = "<|python_tag|>"


@register_call_parser("llama3_json", "llama3")
def llama3_json(text: str) -> ParsedTurn:
    """Read calls in Llama 3's form, JSON in a turn; text without them is an answer.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    scan = _Scan(text)
    before, tag, after = text.partition(_TAG)
    is_tagged = bool(tag) and "{" not in before
    if is_tagged:
        scan.skip(len(before), len(_TAG))
    is_call = is_tagged or text.lstrip().startswith("{")  # and no answer with JSON in it
    if is_tagged and not after.lstrip().startswith("{"):
        return ParsedTurn(before.strip(), (), (_sentence(ValueError("it is no JSON"), after),))
    while len(scan.malformed) < _MOST and (start := text.find("{", scan.at)) >= 0:
        scan.skip(start)
        try:
            value = scan.value()
        except ValueError as error:
            if is_call:  # nothing after it can be read
                scan.malformed.append(_sentence(error, text[start:]))
                scan.at = len(text)
            break
        has_call = isinstance(value, Mapping) and "name" in value and {*value} & _ARGUMENTS
        if not (is_call or has_call):
            return ParsedTurn(text.strip())
        scan.add(value, text[start : scan.at])
        scan.skip_separators()
    return scan.done()


# vLLM's parsers, by its names (`--tool-call-parser`), e.g. deepseek_v3, mistral or glm45.


def _of_vllm(
    name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, object]]
) -> CallParser | None:
    """vLLM's parser of this name; None where there is no vLLM, or none of that name in it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from engine.rollout.vllm.tool_calls import call_reader

    read = call_reader(name, tokenizer, tools)
    if read is None:
        return None

    def parse(text: str) -> ParsedTurn:
        scan = _Scan("")
        try:
            content, calls = read(text)
        except ValueError as error:
            return ParsedTurn(text, (), (_sentence(error, text),))
        for function, arguments in calls:
            scan.add({"name": function, "arguments": arguments}, arguments)
        return replace(scan.done(), content=content.strip())

    return parse
