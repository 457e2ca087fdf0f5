"""Which rows go through a model together, by their lengths; pure functions on integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import ConfigError

_WINDOW_BATCHES = (
    32  # rows are sorted by length within so many batches: little padding, much chance
)


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices so that rows × longest row ≤ `max_tokens`; every row comes once.

    Rows are taken in order of length, so that padding is small. A single row above the budget is
    a batch of its own: leaving it out is not this function's decision.

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


def length_bucketed_epoch(
    lengths: Sequence[int], batch_size: int, seed: int | Sequence[int]
) -> list[list[int]]:
    """Return one epoch's batches of row indices: random, yet of similar lengths.

    Rows are shuffled, sorted by length within windows of some batches, cut, and the batches are
    shuffled. Every row comes once; one batch may be smaller than `batch_size`.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1")
    rng = np.random.default_rng(seed)
    order = [int(i) for i in rng.permutation(len(lengths))]
    window = _WINDOW_BATCHES * batch_size
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        rows = sorted(order[start : start + window], key=lambda i: lengths[i])
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[int(i)] for i in rng.permutation(len(batches))]
