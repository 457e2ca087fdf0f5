"""What a reward function is; calling one safely is `runner`'s job.

A reward function takes prompts and their completions, the rows' `ground_truth`, and every other
column of the data by keyword, and returns one float a completion:

    def reward(prompts, completions, *, ground_truth, **columns) -> list[float]: ...

or, where the score has parts, one such list for each named component:

    ... -> dict[str, list[float]]:   # e.g. {"answer": [1.0, 0.0], "format": [1.0, 1.0]}

It may be a coroutine function (`async def`) of the same signature. The names and their order must
be the same at every call; `register_reward(..., components=...)` says them before the first one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

RewardResult: TypeAlias = Sequence[float] | Mapping[str, Sequence[float]]


class RewardFunction(Protocol):
    """`prompts`, `completions`, `ground_truth` and every column have B entries, as does the result.

    A prompt is the text of its last message, e.g. "What is 2+3?"; a completion is the assistant's
    text, special tokens removed. Each completion is scored by itself: where a call on many fails,
    it is repeated on single ones, from several threads at once.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        *,
        ground_truth: Sequence[Any],
        **columns: Sequence[Any],
    ) -> RewardResult | Awaitable[RewardResult]: ...
