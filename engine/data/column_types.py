"""The columns that every row of a table has, with their types, as Flyte's console shows them.

What cells must hold beyond that is the pandera schema of the same name in `engine.data.contract`,
which these agree with. They are apart from it because loading pandas takes a second.
"""

from __future__ import annotations

ColumnTypes = dict[str, object]  # a type by column, e.g. {"index": int}

_MESSAGES = list[dict[str, str]]

RL_PROMPTS: ColumnTypes = {
    "data_source": str,
    "prompt": _MESSAGES,
    "ability": str,
    "reward_model": dict[str, str],
}

SFT_PAIRS: ColumnTypes = {"prompt": _MESSAGES, "response": str}

EVALUATION_ROWS: ColumnTypes = {
    "dataset": str,
    "index": int,
    "data_source": str,
    "level": str,
    "prompt": str,
    "ground_truth": str,
    "model": str,
    "greedy_completion": str,
    "greedy_answer": str,
    "greedy_correct": bool,
    "greedy_score": float,
    "greedy_truncated": bool,
    "sample_answers": list[str],
    "samples_correct": int,
    "samples": int,
    "sample_score": float,
    "majority_answer": str,
    "majority_correct": bool,
    "response_length": float,
    "greedy_length": int,
    "truncated": float,
    "format_rate": float,
    "errors": int,
}
