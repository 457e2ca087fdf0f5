"""Tool calls in a policy's text, by the format of its chat template.

What a parser is, the registry, the parsers `hermes` and `llama3_json`, and those of vLLM. Ours read
JSON from each opening tag on, to where it ends: a tag that an argument holds is text.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from engine.agents.environment_protocol import Action, ToolCall
from engine.errors import ConfigError
from engine.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def parse_turn(parser: CallParser, text: str) -> ParsedTurn:
    """Read a whole turn, with what its prompt has opened: calls in its thought don't count.

    A thought that nothing ends, as of a turn that was cut, has no calls after it.
    """
    text = text[:_LONGEST]
    thinking, mark, rest = text.partition(_END_OF_THOUGHT)
    if text.lstrip().startswith(_THOUGHT):
        if not mark:
            return ParsedTurn(text)
    elif not mark or "{" in thinking:  # no thought: the tag is an argument's
        thinking, mark, rest = "", "", text
    parsed = parser(rest)
    return ParsedTurn(thinking + mark + parsed.content, parsed.tool_calls, parsed.malformed)


def parsed_action(
    parser: CallParser, text: str, token_ids: tuple[int, ...] = (), marked: str = ""
) -> Action:
    """The action of a turn's text and ids; `marked` is the text with its control tokens."""
    parsed = parse_turn(parser, marked or text)
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


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
_ARGUMENTS = {"arguments", "parameters"}


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


_MOST = 100  # malformed calls of a turn
_BETWEEN = re.compile(r"[\s;,]*")


class _Scan:
    """A turn's calls, collected from its beginning on."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []

    def skip(self, start: int, length: int = 0) -> None:
        """Take what comes before `start` as content, and go on `length` characters after it."""
        self._content.append(self.text[self.at : start])
        self.at = start + length

    def value(self) -> object:
        """The JSON value that begins here; raise ValueError for none."""
        try:  # of a piece, whose errors tell its own lines
            value, end = _DECODER.raw_decode(self.text[self.at :])
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        self.at += end
        return value

    def between(self) -> None:
        """Go on to what comes after blanks and separators."""
        match = _BETWEEN.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def calls(self, closing: str, opening: str, name: str = "") -> None:
        """Read the calls in a tag, one or more, up to its end, or where the next one begins.

        With the `name` of a function they are its arguments.
        """
        start = self.at
        try:
            self.between()
            while True:
                value = self.value()
                call = {"name": name, "arguments": value} if name else value
                self.add(call, self.text[start : self.at])
                self.between()
                if not self.text.startswith(("{", "["), self.at):
                    break
                start = self.at
            ends = (closing, opening)
            if self.at < len(self.text) and not self.text.startswith(ends, self.at):
                raise ValueError(f"text follows its JSON before {closing}")
        except ValueError as error:
            self.at = min(self._find(closing), self._find(opening))
            self._malformed.append(sentence(error, self.text[start : self.at]))
        if self.text.startswith(closing, self.at):
            self.at += len(closing)

    def _find(self, tag: str) -> int:
        at = self.text.find(tag, self.at)
        return at if at >= 0 else len(self.text)

    def add(self, value: object, text: str) -> None:
        try:
            self._calls.append(call_of(value, len(self._calls)))
        except ValueError as error:
            self._malformed.append(sentence(error, text))

    def give_up(self, error: ValueError) -> None:
        """Nothing from here on can be read."""
        self._malformed.append(sentence(error, self.text[self.at :]))
        self.at = len(self.text)

    @property
    def goes_on(self) -> bool:
        """Whether so few pieces are malformed that more are looked at."""
        return len(self._malformed) < _MOST

    def done(self) -> ParsedTurn:
        content = "".join(self._content) + self.text[self.at :]
        return ParsedTurn(content.strip(), tuple(self._calls), tuple(self._malformed))


# Hermes' and Qwen's form: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

_CALL, _END_OF_CALL = "<tool_call>", "</tool_call>"


@register_call_parser("hermes", "qwen")
def hermes(text: str) -> ParsedTurn:
    """Read the calls of a turn.

    >>> hermes('See: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    scan = _Scan(text)
    while scan.goes_on and (start := text.find(_CALL, scan.at)) >= 0:
        scan.skip(start, len(_CALL))
        scan.calls(_END_OF_CALL, _CALL)
    return scan.done()


# Llama 3's forms: JSON in a turn, or a call in Python's form after `<|python_tag|>`.
#
# {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}
# <|python_tag|>brave_search.call(query="weather")
# <function=add>{"a": 1}</function>

_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"\s*(\w+)\.call\((.*)\)\s*\Z", re.DOTALL)
_FUNCTION = "<function="
_NAMED = re.compile(r"<function=([\w.-]+)>")


@register_call_parser("llama3_json", "llama3")
def llama3_json(text: str) -> ParsedTurn:
    """Read the calls of a turn; text without them is an answer.

    >>> llama3_json('{"name": "add", "parameters": {"a": 1}}').tool_calls
    (ToolCall(name='add', arguments={'a': 1}, id='call_0'),)
    """
    scan = _Scan(text)
    brace, tag, function = (
        text.find(mark) if mark in text else len(text) for mark in ("{", _TAG, _FUNCTION)
    )
    if tag < brace:
        scan.skip(tag, len(_TAG))
        if not text[scan.at :].lstrip().startswith("{"):
            return _python_call(text[:tag], text[scan.at :])
    elif function < brace:
        while scan.goes_on and (match := _NAMED.search(text, scan.at)):
            scan.skip(match.start(), match.end() - match.start())
            scan.calls("</function>", _FUNCTION, match[1])
        return scan.done()
    is_json = text[scan.at :].lstrip().startswith("{")  # and no answer with JSON in it
    while (start := text.find("{", scan.at)) >= 0:
        scan.skip(start)
        try:
            value = scan.value()
        except ValueError as error:
            if is_json:
                scan.give_up(error)
            break
        if not is_json and not _is_call(value):
            return ParsedTurn(text.strip())
        scan.add(value, text[start : scan.at])
        scan.between()
    return scan.done()


def _python_call(before: str, body: str) -> ParsedTurn:
    """The turn of a call in Python's form."""
    try:
        match = _BUILT_IN.match(body)
        if match is None:
            raise ValueError("it is neither JSON nor name.call(…)")
        return ParsedTurn(before.strip(), (_built_in(*match.groups()),))
    except (ValueError, SyntaxError, MemoryError, TypeError, RecursionError) as error:
        return ParsedTurn(before.strip(), (), (sentence(error, body),))


def _is_call(value: object) -> bool:
    return isinstance(value, Mapping) and "name" in value and bool({*value} & _ARGUMENTS)


def _built_in(name: str, inside: str) -> ToolCall:
    """A call in Python's form, with literals by keyword."""
    call = ast.parse(f"f({inside})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("name each argument")
    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return ToolCall(name, arguments, "call_0")


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
            return ParsedTurn(text, (), (sentence(error, text),))
        for function, arguments in calls:
            scan.add({"name": function, "arguments": arguments}, arguments)
        return replace(scan.done(), content=content.strip())

    return parse
