"""One row of each kind in the data contract, and when two prompts count as the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rl_row(
    data_source: str, question: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a row of RL data, verl's columns: a prompt and what a rule checks it against."""
    return {
        "data_source": data_source,
        "prompt": user_message(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def sft_row(question: str, response: str, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of SFT data: a prompt and the response to learn."""
    return {
        "prompt": user_message(question),
        "response": response,
        "extra_info": dict(extra_info),
    }


def user_message(text: str) -> list[dict[str, str]]:
    """Return a prompt of one user message: `[{"role": "user", "content": text}]`."""
    return [{"role": "user", "content": text}]


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the words of a prompt, a plain string or chat messages, one message a line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


def normalise(text: str) -> str:
    """Return `text` without case and spacing, for telling whether two prompts are the same."""
    return " ".join(text.casefold().split())
