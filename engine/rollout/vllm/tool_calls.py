"""vLLM's parsers of tool calls, by its names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CallReader = Callable[[str], tuple[str, list[tuple[str, str]]]]
"""Of a turn's text: what stands outside of its calls, and each one's name and JSON arguments."""


def call_reader(
    name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, object]] = ()
) -> CallReader | None:
    """What vLLM reads with `--tool-call-parser name`; None where it has no such parser.

    It raises ValueError where the parser fails. `tools` are the schemas that some parsers read
    types of arguments in. Raises ConfigError for a tokenizer that lacks the parser's tokens.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class: Any = ToolParserManager.get_tool_parser(name)
    except KeyError:
        return None
    asked: list[Any] = [{"role": "user", "content": ""}]
    schemas: Any = [dict(tool) for tool in tools] or None
    request = ChatCompletionRequest(messages=asked, tools=schemas)
    try:
        parser_class(tokenizer, request.tools)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"rollout.multi_turn.format={name}: vLLM's parser needs another tokenizer ({error}); "
            "choose the format that the model's own chat template writes"
        ) from None

    def read(text: str) -> tuple[str, list[tuple[str, str]]]:
        try:  # a new one for each turn: some keep what they have read
            found = parser_class(tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception as error:  # it is given whatever a model writes
            raise ValueError(f"{type(error).__name__}: {error}") from error
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return found.content or "", calls

    return read
