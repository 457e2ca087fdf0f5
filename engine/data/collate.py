"""Padding of prompts and completions to one `Batch`, and which rows share a forward pass.

The layout is that of `engine.batch`. It loads no pandas.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.data.rows import check_names, reward_model
from engine.errors import ConfigError, DataError


class SFTExample(NamedTuple):
    """A prompt and what follows it, of which the assistant's turns are learned."""

    prompt_ids: list[int]  # e.g. [2, 17, 9, 3]
    response_ids: list[int]  # ends with the end token, e.g. [21, 30, 1]
    learned: list[bool] | None = None  # of each of its tokens; None: all are

    @property
    def responses(self) -> tuple[list[int]]:
        return (self.response_ids,)


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices so that rows × longest row ≤ `max_tokens`, in order of length.

    Every row comes once; a single one above the budget is a batch of its own.

    >>> token_budget_batches([3, 9, 4, 2], max_tokens=12)
    [[3, 0, 2], [1]]
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} must be at least 1")
    batches: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if current and (len(current) + 1) * lengths[index] > max_tokens:
            batches.append(current)
            current = []
        current.append(index)
    return [*batches, current] if current else batches


def shared_prompt_batches(
    groups: Sequence[Sequence[int]], lengths: Sequence[int], prompts: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Batch the rows of `groups`, which share their prompts, within `max_tokens` packed tokens.

    `lengths` and `prompts` are tokens of each row and of its prompt, which counts once for the rows
    of its group in a batch. A group is cut where it has more tokens than a batch; a single row
    above the budget is a batch of its own.

    >>> shared_prompt_batches([[0, 2], [1]], lengths=[5, 4, 6], prompts=[4, 3, 4], max_tokens=8)
    [[0, 2], [1]]
    """
    batches: list[list[int]] = []
    room = 0
    for group in groups:
        responses = [lengths[row] - prompts[row] for row in group]
        if prompts[group[0]] + sum(responses) > room or not batches:
            batches.append([])
            room = max_tokens
        is_first = True  # row of this group in the batch
        for row, tokens in zip(group, responses, strict=True):
            cost = tokens + (prompts[row] if is_first else 0)
            if cost > room and batches[-1]:
                batches.append([])
                room, cost = max_tokens, tokens + prompts[row]
            batches[-1].append(row)
            room -= cost
            is_first = False
    return batches


def collate_prompts(rows: Sequence[dict[str, Any]], prompt_ids: Sequence[list[int]]) -> Batch:
    """Make the batch of prompts that a step starts from: one row a prompt, tokens not yet padded.

    Columns: `prompt_ids` (list of int), every key of the rows, and `ground_truth` (None where a row
    has none). Raises DataError when there are no rows, when they differ in their keys or a row in
    its ground truths, and for a key that the engine fills.
    """
    if not rows:
        raise DataError("a step got no prompts; give at least one row")
    names = rows[0].keys()
    check_names([name for name in names if name != "prompt_ids"], "the rows of a step")
    for row, ids in zip(rows, prompt_ids, strict=True):
        if row.keys() != names:
            raise DataError(
                f"the rows of a step differ in their columns: {sorted(row.keys() ^ names)} are in "
                "some only; give them in all"
            )
        if list(row.get("prompt_ids", ids)) != list(ids):
            raise DataError(
                "the rows of a step have 'prompt_ids' that are not the tokens of their prompts; "
                "remove that column"
            )
    columns = {name: [row[name] for row in rows] for name in names}
    if "ground_truth" in names or "reward_model" in names:
        rules = [reward_model(row, f"row {i} of a step") for i, row in enumerate(rows)]
        columns["ground_truth"] = [rule["ground_truth"] for rule in rules]
    columns["prompt_ids"] = list(prompt_ids)
    return Batch({"group_ids": torch.arange(len(rows))}, columns)


def collate_completions(
    prompts: Batch,
    prompt_index: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    *,
    pad_token_id: int,
) -> Batch:
    """Concatenate padded prompts and completions, at least one.

    `prompt_index[i]` is the row of `prompts` that completion i answers. Returns the fields
    `input_ids`, `attention_mask`, `position_ids` `[B, P+R]`, `prompts` `[B, P]`, `responses`,
    `response_mask`, `rollout_log_probs` `[B, R]` and `group_ids` `[B]`, with the prompts' columns.
    """
    if not token_ids:
        raise DataError("there are no completions to pad; give at least one row")
    sources = prompts.columns["prompt_ids"]
    left = pad([sources[i] for i in prompt_index], pad_token_id, side="left")
    right = pad(token_ids, pad_token_id, side="right")
    left_mask = _presence([len(sources[i]) for i in prompt_index], left.shape[1]).flip(1)
    right_mask = _presence([len(ids) for ids in token_ids], right.shape[1])
    mask = torch.cat([left_mask, right_mask], 1).long()
    tensors = {
        "input_ids": torch.cat([left, right], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0) * mask,
        "prompts": left,
        "responses": right,
        "response_mask": right_mask.float(),
        "rollout_log_probs": pad(log_probs, 0.0, side="right"),
        "group_ids": prompts["group_ids"][list(prompt_index)],
    }
    index = np.asarray(prompt_index, dtype=int)
    columns = {k: v[index] for k, v in prompts.columns.items() if k != "prompt_ids"}
    return Batch(tensors, columns)


def pad(rows: Sequence[Sequence[float]], value: float | int, side: str) -> Tensor:
    """Stack lists into `[len(rows), longest]`, filled up with `value` on the given side."""
    width = max(1, max(len(row) for row in rows))
    kind = np.int64 if isinstance(value, int) else np.float32
    out = np.full((len(rows), width), value, dtype=kind)
    for target, row in zip(out, rows, strict=True):
        start = width - len(row) if side == "left" else 0
        target[start : start + len(row)] = row
    return torch.from_numpy(out)


def pad_tokens(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """`[n_i, K]` of each row's first n_i tokens of `attention_mask` as `[B, P+R, K]`, else 0."""
    out = rows[0].new_zeros(*mask.shape, rows[0].shape[1])
    for target, row, start in zip(out, rows, mask.argmax(1).tolist(), strict=True):
        target[start : start + len(row)] = row
    return out


def _presence(lengths: Sequence[int], width: int) -> Tensor:
    """Boolean `[B, width]`: true in the first `lengths[i]` columns of row i."""
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]
