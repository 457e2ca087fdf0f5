"""A reward that is easily learned, in a module that imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def digit_share(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of a completion's characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
