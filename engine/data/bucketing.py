"""Which rows go through a model together, by their lengths; pure functions on integers."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ConfigError


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices so that rows × longest row ≤ `max_tokens`; every row comes once.

    Rows are taken in order of length, so that padding is small. A single row above the budget is
    a batch of its own; it is never left out.

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
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    prompts: Sequence[int],
    max_tokens: int,
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
        own = [lengths[row] - prompts[row] for row in group]
        whole = prompts[group[0]] + sum(own)
        if whole > room or not batches:
            batches.append([])
            room = max_tokens
        fresh = True  # the batch has nothing of this group
        for row, tokens in zip(group, own, strict=True):
            cost = tokens + (prompts[row] if fresh else 0)
            if cost > room and batches[-1]:
                batches.append([])
                room, cost = max_tokens, tokens + prompts[row]
            batches[-1].append(row)
            room -= cost
            fresh = False
    return batches
