"""Cells of rows: which are missing, and values as text and in messages.

It loads neither pandas nor torch.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

SHOWN = 5  # rows that a message names


def is_missing(value: object) -> bool:
    """Whether a cell holds nothing: None, NaN (JSON's, or a null of Parquet) or pandas' NA."""
    if value is None or value is getattr(sys.modules.get("pandas"), "NA", None):
        return True
    return isinstance(value, float | np.floating) and bool(value != value)


def brief(value: object) -> str:
    """A value as a message shows it, in 80 characters at most."""
    text = repr(value[:80] if isinstance(value, str) else value)  # not of megabytes
    return text if len(text) <= 80 else text[:77] + "…"


def row_numbers(numbers: Sequence[int]) -> str:
    """Rows for a message, the first few of them: "rows 2, 3"."""
    shown = ", ".join(str(number) for number in numbers[:SHOWN])
    return f"row{'s' * (len(numbers) > 1)} {shown}{', …' * (len(numbers) > SHOWN)}"


def as_text(value: object) -> str:
    """Text as it is, whole numbers without a point, all else as JSON: 7.0 is "7"."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, default=plain, sort_keys=True, ensure_ascii=False)


def plain(value: object) -> object:
    """Arrays and NumPy's numbers as lists and numbers, others as text; a `default` of `json`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def texts_of(value: object) -> Iterator[str]:
    """Every text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, list | tuple | np.ndarray):
        for item in value:
            yield from texts_of(item)
