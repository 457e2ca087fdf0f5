"""Prompt/response rows of files as tokens, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.config import RowsConfig
from engine.data.bad_rows import BadRows, mapped_rows
from engine.data.mapping import RowMapper
from engine.data.row_files import data_files
from engine.data.rows import brief, is_messages, user_message
from engine.data.templates import encode_prompts, encode_response, with_template_variables
from engine.errors import DataError
from engine.storage.json_rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[list[int], list[int]]  # ids of the prompt, and of the response with its end token


def read_sft_pairs(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    config: RowsConfig | None = None,
    max_length: int = 0,
    too_long: str = "fail",
) -> list[Pair]:
    """Read and encode rows `{prompt, response}` of files, folders, s3://… or hf://….

    `prompt` is text or chat messages, `response` text. Without them, `messages` is a conversation
    whose last message is the response. Rows of more than `max_length` tokens (0: any) are an error,
    or left out with `too_long="drop"`. Raises DataError, in a sentence, for bad rows.
    """
    config = config or RowsConfig()
    tokenizer = with_template_variables(tokenizer, config.apply_chat_template_kwargs)
    mapper = RowMapper(config)
    pairs: list[Pair] = []
    for address in [file for path in paths for file in data_files(path)]:
        bad = BadRows(address, config.bad_rows)
        numbered = list(mapped_rows(address, config, bad, mapper=lambda r, w: _row(mapper, r, w)))
        bad.check()
        numbers = [number for number, _ in numbered]
        prompts = encode_prompts(
            tokenizer, (row["prompt"] for _, row in numbered), address, numbers
        )
        for (number, row), prompt in zip(numbered, prompts, strict=True):
            response = encode_response(tokenizer, row["response"])
            length = len(prompt) + len(response)
            if not max_length or length <= max_length:
                pairs.append((prompt, response))
            elif too_long != "drop":
                raise DataError(
                    f"{address}, row {number}: {length} tokens are more than {max_length}; shorten "
                    "it, or leave such rows out with data.too_long=drop"
                )
    return pairs


def _row(mapper: RowMapper, raw: Row, where: str) -> Row:
    """The prompt as messages, and the response."""
    row = mapper.named(raw, where)
    if "prompt" not in row and is_messages(row.get("messages")):
        *prompt, last = row["messages"]
        if last["role"] != "assistant" or not prompt:
            raise DataError(f"{where}: 'messages' must end with what the assistant says")
        row = {"prompt": prompt, "response": last["content"]}
    missing = [name for name in ("prompt", "response") if name not in row]
    if missing:
        raise DataError(
            f"{where}: there is no column {missing[0]!r}; name one of {sorted(raw)} in "
            f"data.columns, e.g. data.columns.{missing[0]}=answer"
        )
    prompt, response = row["prompt"], row["response"]
    if isinstance(prompt, str):
        prompt = user_message(prompt)
    if not is_messages(prompt):
        raise DataError(f"{where}: column 'prompt' is {brief(prompt)}; give text, or messages")
    if not isinstance(response, str) or not response.strip():
        raise DataError(f"{where}: column 'response' is {brief(response)}; give text")
    return {"prompt": mapper.with_system(prompt), "response": response}
