"""A sample of a step's rollouts: some groups of completions, and what is recorded of them.

`pick` runs in the training loop and copies a few rows; `as_table` runs elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from engine.batch import Batch
from engine.rollouts.columns import COMPONENT, SCHEMA, TOKEN_VALUES
from engine.rollouts.token_texts import TokenTexts

LONGEST_PROMPT = 20_000  # characters of it that are recorded
_TENSORS = (
    "attention_mask",
    "first_turn",
    "environment_rewards",
    "group_ids",
    "policy_version",
    "responses",
    "reward_components",
    "token_level_rewards",
    "token_level_scores",
    "token_versions",
    "truncated",
    *TOKEN_VALUES,
)
_OF_EPISODES = ("prompts", "response_mask")
_COLUMNS = (
    "completion",
    "data_source",
    "environment_seconds",
    "episode_end",
    "episode_error",
    "episode_info",
    "episode_reward",
    "episode_turn_spans",
    "episode_turns",
    "ground_truth",
    "has_format",
    "prompt",
    "reward_component_names",
    "reward_correct",
    "reward_error_cause",
)


_SPANS = "episode_turn_spans"


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of the batch of one step."""

    step: int
    split: str  # TRAIN or VALIDATION
    rows: Batch


def pick(batch: Batch, step: int, split: str, most: int) -> Sample:
    """Copy at most `most` rows: whole groups, as far as they fit.

    Groups are chosen by a digest of their prompt, so that one which comes again in a later step is
    likely to be in that sample too, and can be compared.
    """
    ids: list[int] = batch["group_ids"].tolist()
    first: dict[int, int] = {}
    for row, group in enumerate(ids):
        first.setdefault(group, row)
    prompts = batch.columns["prompt"]
    ranks = {group: (_rank(prompts[row]), row) for group, row in first.items()}
    order = sorted(range(len(ids)), key=lambda row: (ranks[ids[row]], row))
    wanted = (*_TENSORS, *_COLUMNS, *(_OF_EPISODES if _SPANS in batch else ()))
    names = [name for name in wanted if name in batch]
    return Sample(step, split, batch.select(names).rows(order[:most]))


def as_table(sample: Sample, texts: TokenTexts) -> pa.Table:
    """The sample as a table of `SCHEMA`, and a column `reward.NAME` for each component."""
    rows, count = sample.rows, len(sample.rows)
    width = rows["responses"].shape[1]
    lengths: list[int] = rows["attention_mask"][:, -width:].sum(1).tolist()
    ids = _ragged(rows["responses"].numpy(), lengths)
    columns: dict[str, Sequence[object]] = {
        "step": [sample.step] * count,
        "split": [sample.split] * count,
        "group": rows["group_ids"].tolist(),
        "data_source": _texts(rows, "data_source"),
        "prompt": [text[:LONGEST_PROMPT] for text in _prompts(rows, texts)],
        "ground_truth": _texts(rows, "ground_truth"),
        "completion": _texts(rows, "completion"),
        "reward": _sums(rows, "token_level_scores"),
        "shaped_reward": _sums(rows, "token_level_rewards"),
        "correct": _flags(rows, "reward_correct"),
        "has_format": _flags(rows, "has_format"),
        "truncated": rows["truncated"].tolist() if "truncated" in rows else [None] * count,
        "reward_error": _texts(rows, "reward_error_cause"),
        "policy_version": _sums(rows, "policy_version"),
        "token_ids": ids,
        "tokens": [[_text(text) for text in texts(one)] for one in ids],
    }
    for name in TOKEN_VALUES:
        known = name in rows
        columns[name] = _ragged(rows[name].numpy(), lengths) if known else [None] * count
    columns["token_versions"] = _mixed_versions(rows, lengths)
    columns |= _episode_columns(rows, lengths)
    table = pa.table(columns, schema=SCHEMA)
    for name, values in _components(rows):
        table = table.append_column(COMPONENT + name, pa.array(values, pa.float32()))
    return table


def _prompts(rows: Batch, texts: TokenTexts) -> list[str]:
    """What completions go on from: the row's messages, or the very ids that an episode began with.

    An environment may have written those.
    """
    if _SPANS not in rows:
        return [prompt_text(messages) for messages in rows.columns["prompt"]]
    prompts, mask = rows["prompts"], rows["attention_mask"].bool()
    kept = mask[:, : prompts.shape[1]]
    return [
        _text("".join(texts(ids[own].tolist()))) for ids, own in zip(prompts, kept, strict=True)
    ]


def _mixed_versions(rows: Batch, lengths: Sequence[int]) -> list[list[int] | None]:
    """Policy versions by token of the rows that have more than one."""
    if "token_versions" not in rows:
        return [None] * len(rows)
    each = _ragged(rows["token_versions"].numpy(), lengths)
    return [one if len(set(one)) > 1 else None for one in each]


def _episode_columns(rows: Batch, lengths: Sequence[int]) -> dict[str, Sequence[object]]:
    """The columns of rows of episodes; null for those of single completions."""
    names = ("trained", "turns", "first_turn", "episode_turns", "episode_reward", "end",
             "episode_error", "episode_info", "environment_seconds")  # fmt: skip
    if _SPANS not in rows:
        return {name: [None] * len(rows) for name in names}
    given, own = rows["environment_rewards"], rows.columns
    return {
        "trained": _ragged(rows["response_mask"].bool().numpy(), lengths),
        "turns": [
            [_turn(turn, given[row]) for turn in turns] for row, turns in enumerate(own[_SPANS])
        ],
        "first_turn": rows["first_turn"].tolist() if "first_turn" in rows else [0] * len(rows),
        "episode_turns": [int(value) for value in own["episode_turns"]],
        "episode_reward": [float(value) for value in own["episode_reward"]],
        "end": _texts(rows, "episode_end"),
        "episode_error": _texts(rows, "episode_error"),
        "episode_info": _texts(rows, "episode_info"),
        "environment_seconds": [float(value) for value in own["environment_seconds"]],
    }


def _turn(turn: dict[str, Any], rewards: Tensor) -> dict[str, object]:
    """A turn of `TURN`, from an entry of `turn_spans`; `rewards` [R] are the environment's."""
    start, stop = turn["start"], turn["stop"]
    return {
        "start": start,
        "stop": stop,
        "reward": float(rewards[start:stop].sum()),
        "calls": [
            {"name": _text(name), "arguments": _text(arguments)}
            for name, arguments in turn["calls"]
        ],
        "malformed": [_text(sentence) for sentence in turn["malformed"]],
    }


def prompt_text(messages: Sequence[dict[str, object]]) -> str:
    """Chat messages to read: a lone user's as it is, others below their roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return _text(messages[0]["content"])
    return "\n\n".join(f"[{_text(m['role'])}]\n{_text(m['content'])}" for m in messages)


def _rank(messages: Sequence[dict[str, object]]) -> bytes:
    """Of a prompt among others: by chance, but always the same."""
    last = str(messages[-1]["content"])
    digest = hashlib.blake2b(last[-4096:].encode("utf-8", "replace"), digest_size=8)
    return digest.digest()


def _components(rows: Batch) -> list[tuple[str, list[float]]]:
    if "reward_components" not in rows or not len(rows):
        return []
    names = rows.columns["reward_component_names"][0]
    values = rows["reward_components"].unbind(1)
    return [(_text(name), one.tolist()) for name, one in zip(names, values, strict=True)]


def _sums(rows: Batch, name: str) -> list[float | None]:
    """A value a row: of a tensor `[B]`, or the sum of one `[B, R]`."""
    if name not in rows:
        return [None] * len(rows)
    return rows[name].reshape(len(rows), -1).sum(1).tolist() if len(rows) else []


def _flags(rows: Batch, name: str) -> list[bool | None]:
    values = rows.columns.get(name)
    if values is None:
        return [None] * len(rows)
    return [None if value is None else bool(value) for value in values]


def _texts(rows: Batch, name: str) -> list[str]:
    values = rows.columns.get(name)
    return [""] * len(rows) if values is None else [_text(value) for value in values]


def _text(value: object) -> str:
    """Any value as text that UTF-8 has; null is empty."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode("utf-8")


def _ragged(values: np.ndarray, lengths: Sequence[int]) -> list[list[Any]]:
    return [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]
