"""One row of each kind in the data contract, and what its cells are: missing, messages, empty.

Also when two prompts count as the same, and how messages show cells and rows. Tables are checked in
`contract`; rows of files get this form in `rl_rows`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

SHOWN = 5  # rows that a message names
EXTRA, RULE, TRUTH = "extra_info", "reward_model", "ground_truth"  # columns, and a field


def rl_row(
    data_source: str, question: str, ground_truth: str, extra_info: Mapping[str, object]
) -> dict[str, object]:
    """Return a row of RL data, verl's columns: a prompt and what a rule checks it against."""
    return {
        "data_source": data_source,
        "prompt": user_message(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def sft_row(question: str, response: str, extra_info: Mapping[str, object]) -> dict[str, object]:
    """Return a row of SFT data: a prompt and the response to learn."""
    return {
        "prompt": user_message(question),
        "response": response,
        "extra_info": dict(extra_info),
    }


def user_message(text: str) -> list[dict[str, str]]:
    """Return a prompt of one user message: `[{"role": "user", "content": text}]`."""
    return [{"role": "user", "content": text}]


def prompt_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """Return the words of a prompt, a plain string or chat messages, one message a line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def normalise(text: str) -> str:
    """Return `text` without case and spacing, for telling whether two prompts are the same."""
    return " ".join(text.casefold().split())


def is_missing(value: object) -> bool:
    """Whether a cell holds nothing: None, NaN (JSON's, or a null of Parquet) or pandas' NA."""
    if value is None or value is getattr(sys.modules.get("pandas"), "NA", None):
        return True
    return isinstance(value, float | np.floating) and bool(value != value)


def is_messages(value: object) -> TypeGuard[Sequence[dict[str, Any]]]:
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
    texts = [value] if isinstance(value, str) else []
    if is_messages(value):
        texts = [text for m in value for text in (m["role"], m["content"])]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(value: object) -> str:
    """A value as a message shows it, in 80 characters at most."""
    text = repr(value[:80] if isinstance(value, str) else value)  # not of megabytes
    return text if len(text) <= 80 else text[:77] + "…"


def row_numbers(numbers: Sequence[int]) -> str:
    """Rows for a message, the first few of them: "rows 2, 3"."""
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return f"row{'s' * (len(numbers) > 1)} {shown}{', …' * (len(numbers) > SHOWN)}"


def as_text(value: object) -> str:
    """Text as it is, whole numbers without a point, all else as JSON: 7.0 is "7"."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, default=_plain, sort_keys=True, ensure_ascii=False)


def _plain(value: object) -> object:
    """Let JSON write what a frame read from Parquet holds."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
