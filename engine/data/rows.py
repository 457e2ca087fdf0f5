"""One row of each kind in the data contract, and RL rows in their canonical form.

A canonical row has the contract's columns and any others of its file, chat messages as `prompt`,
and its ground truth in `reward_model` alone. This module loads neither pandas nor torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np

from engine.data.cells import as_text, brief, is_missing, texts_of
from engine.data.messages import canonical_messages
from engine.errors import DataError
from engine.storage import json_rows
from engine.storage.json_rows import Row

M = TypeVar("M", bound=Mapping[str, Any])  # a chat message
# Columns of messages, or of text that becomes tokens.
CONVERSATIONS = ("prompt", "response", "chosen", "rejected", "completion", "messages")
EXTRA, RULE, TRUTH = "extra_info", "reward_model", "ground_truth"  # columns, and a field


def rl_row(
    data_source: str, question: str, ground_truth: str, extra_info: Mapping[str, object]
) -> dict[str, object]:
    """A row of RL data, verl's columns: a prompt and what a rule checks it against."""
    return {
        "data_source": data_source,
        "prompt": user_message(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def sft_row(question: str, response: str, extra_info: Mapping[str, object]) -> dict[str, object]:
    """A row of SFT data: a prompt and the response to learn."""
    prompt = user_message(question)
    return {"prompt": prompt, "response": response, "extra_info": dict(extra_info)}


def user_message(text: str) -> list[dict[str, str]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def prompt_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """The words of a prompt, a plain string or chat messages, one message a line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def is_continued(messages: Sequence[Mapping[str, object]]) -> bool:
    """Whether the last message is the assistant's, which a prompt leaves open."""
    return len(messages) > 0 and messages[-1]["role"] == "assistant"


def answered_messages(prompt: Sequence[M]) -> Sequence[M]:
    """The messages of a prompt that a turn answers: without what it has begun of the turn."""
    return prompt[:-1] if is_continued(prompt) else prompt


def normalise(text: str) -> str:
    """The text without case and spacing, for telling whether two prompts are the same."""
    return " ".join(text.casefold().split())


def words_of(text: str) -> tuple[str, ...]:
    """A text's words without case and punctuation."""
    return tuple(re.findall(r"\w+", text.casefold()))


def is_messages(value: object) -> TypeGuard[Sequence[dict[str, object]]]:
    """Chat messages: a sequence of {"role": str, "content": str}; Parquet gives it as an array."""
    return isinstance(value, list | tuple | np.ndarray) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )


def has_words(value: object) -> bool:
    """False for an empty text or prompt, whose last message counts; True for other types."""
    if is_messages(value):
        return len(value) > 0 and bool(str(value[-1]["content"]).strip())
    return bool(value.strip()) if isinstance(value, str) else True


def is_utf8(value: object) -> bool:
    """False for a text, or messages, with half of a surrogate pair; True for other types."""
    is_text = isinstance(value, str) or is_messages(value)
    return json_rows.is_utf8("".join(texts_of(value) if is_text else ()))


def is_filled(value: object) -> bool:
    """False for a text, or messages, without words or with half of a character."""
    return has_words(value) and is_utf8(value)


ColumnTypes = dict[str, object]  # a type by column, e.g. {"index": int}

_MESSAGES = list[dict[str, str]]

RL_PROMPTS: ColumnTypes = {
    "data_source": str,
    "prompt": _MESSAGES,
    "ability": str,
    "reward_model": dict[str, str],
}

SFT_PAIRS: ColumnTypes = {"prompt": _MESSAGES, "response": str}

EVALUATION_ROWS: ColumnTypes = {  # a row a problem and model
    "dataset": str,  # the evaluation set: test, or a name of data.evaluation_sets
    "index": int,  # position of the problem in its set
    "data_source": str,  # where the problem is from, e.g. "gsm8k"
    "level": str,  # how hard it is, e.g. "Level 3"; empty where the data don't say
    "prompt": str,
    "ground_truth": str,
    "model": str,  # warm_start, rl or champion
    "greedy_completion": str,  # text decoded at temperature 0
    "greedy_answer": str,  # answer read from it, or None
    "greedy_correct": bool,
    "greedy_score": float,
    "greedy_truncated": bool,  # it hit the limit of tokens
    "sample_answers": list[str],  # of the sampled completions, None where there is none
    "samples_correct": int,
    "samples": int,
    "sample_score": float,  # their mean
    "majority_answer": str,  # most frequent answer of the samples, or None
    "majority_correct": bool,  # of that answer, or of the most frequent text where none is read
    "response_length": float,  # mean tokens of the samples
    "greedy_length": int,  # tokens
    "truncated": float,  # share of the samples that hit the limit of tokens
    "format_rate": float,  # share that keeps the format; 1 where the scorer knows none
    "errors": int,  # completions that could not be scored, and count as wrong
}

EPISODE_COLUMNS: ColumnTypes = {  # besides, where problems are episodes: a text is of all turns
    "greedy_turns": int,  # of the policy
    "greedy_return": float,  # what its environment gave
    "greedy_calls": int,  # tools that it called
    "greedy_malformed": int,  # calls that can't be read
    "greedy_end": str,  # done, turns, tokens, seconds or failed
    "sample_turns": float,  # means over the sampled episodes
    "sample_return": float,
    "sample_called": float,  # share that called a tool
    "sample_malformed": float,
}


def same_columns(rows: Sequence[Row]) -> list[Row]:
    """The rows with the columns of all of them; None where a row has none of that name."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return [row | {column: None for column in columns if column not in row} for row in rows]


def canonical_row(row: Row, where: str) -> Row:
    """One row in canonical form; DataError, which begins with `where`, where that is not possible.

    `prompt` may be a string, `ground_truth` a column, and other columns may be missing.
    """
    check_names(row, where)
    canonical = {column: value for column, value in row.items() if column != TRUTH}
    for column, default in {"data_source": "file", "ability": "", EXTRA: {}}.items():
        if is_missing(value := row.get(column)):
            canonical[column] = default
        elif not isinstance(value, type(default)):
            kind = "a dictionary" if column == EXTRA else "text"
            raise DataError(f"{where}: column {column!r} is {brief(value)}; give {kind}, or none")
    prompt = prompt_messages(row.get("prompt"), where)
    return {**canonical, "prompt": prompt, RULE: reward_model(row, where)}


def check_names(columns: Iterable[str], where: str) -> None:
    """Raise DataError for a column that has the name of one that the engine fills."""
    from engine.batch import COLUMNS, FIELDS  # it loads torch, which a workflow's start does not

    for column in columns:
        if column in FIELDS or column in COLUMNS:
            raise DataError(
                f"{where}: column {column!r} has the name of a field that the engine fills; "
                "rename or remove it"
            )


def reward_model(row: Row, where: str) -> Row:
    """The cell of `reward_model`, with the row's `ground_truth`, or None where it has none."""
    rule, column = row.get(RULE), row.get(TRUTH)
    if is_missing(rule) or rule == {}:
        rule = {"style": "rule"}
    if not isinstance(rule, dict):
        raise DataError(
            f'{where}: column {RULE!r} is {brief(rule)}; give {{"style": "rule", "{TRUTH}": …}}'
        )
    inner = rule.get(TRUTH)
    if is_missing(column) or is_missing(inner):
        truth = inner if is_missing(column) else column
        return {**rule, TRUTH: None if is_missing(truth) else truth}
    if as_text(column) != as_text(inner):
        raise DataError(
            f"{where}: column {TRUTH!r} is {brief(column)}, but {RULE}.{TRUTH} is {brief(inner)}; "
            "keep the right one of them"
        )
    return {**rule, TRUTH: column}


def prompt_messages(cell: object, where: str) -> list[dict[str, object]]:
    """The cell of `prompt` as canonical messages; DataError for what is neither text nor messages.

    What is said of fine-tuning, `weight`, is left out: a prompt has nothing to learn.
    """
    messages: object = user_message(cell) if isinstance(cell, str) else cell
    if isinstance(messages, list | tuple | np.ndarray) and len(messages):
        messages = [
            {name: value for name, value in message.items() if name != "weight"}
            for message in canonical_messages(messages, f"{where}: column 'prompt'")
        ]
    if not is_messages(messages) or not is_filled(messages):
        raise DataError(
            f"{where}: column 'prompt' is {brief(cell)}; give a string that is not empty, or "
            'messages [{"role": "user", "content": …}] of which the last is not'
        )
    return list(messages)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a prompt of more than `limit` tokens is cut: where tokens are taken away."""

    limit: int
    side: Literal["left", "right", "middle"]

    def cut(self, ids: list[int]) -> list[int]:
        """At most `limit` of the tokens: left keeps the last, right the first, middle both ends.

        >>> Truncation(3, "middle").cut([1, 2, 3, 4, 5])
        [1, 4, 5]
        """
        if len(ids) <= self.limit:
            return ids
        head = {"left": 0, "right": self.limit, "middle": self.limit // 2}[self.side]
        return ids[:head] + ids[len(ids) - (self.limit - head) :]
