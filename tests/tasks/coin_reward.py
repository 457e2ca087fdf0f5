"""A reward by which models that learned nothing are right on about half of the problems."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any


def coin(
    prompts: Any, completions: Sequence[str], ground_truth: Sequence[str], **columns: Any
) -> list[float]:
    """1 or 0, by the completion's bytes and its problem's truth."""
    pairs = zip(completions, ground_truth, strict=True)
    return [float(zlib.crc32(f"{text}{truth}".encode()) % 2) for text, truth in pairs]
