"""What a reward function is; calling one safely is `runner`'s job.

A reward function takes prompts and their completions, the rows' `ground_truth`, and every other
column of the data by keyword, and returns one float a completion:

    def reward(prompts, completions, *, ground_truth, **columns) -> list[float]: ...

It may be a coroutine function (`async def`) of the same signature.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol


class RewardFunction(Protocol):
    """`prompts`, `completions`, `ground_truth` and every column have B entries, as does the result.

    A prompt is the text of its last message, e.g. "What is 2+3?"; a completion is the assistant's
    text, special tokens removed.
    """

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        *,
        ground_truth: Sequence[Any],
        **columns: Sequence[Any],
    ) -> Sequence[float] | Awaitable[Sequence[float]]: ...
