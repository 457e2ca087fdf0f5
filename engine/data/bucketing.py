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
