"""A reward that costs nothing and gives every group signal; reward processes load it quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def even(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    """1 for completions with an even number of characters."""
    return [float(len(text) % 2 == 0) for text in completions]
