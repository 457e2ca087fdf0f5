"""Which prompts of a split were seen before, in 16 bytes a prompt."""

from __future__ import annotations

import numpy as np

_RECENT = 1 << 16  # keys in a Python set, at some 100 bytes each
_KEY = np.dtype("S16")


class SeenPrompts:
    """A set of keys of 16 bytes: the recent ones in a set, the others in sorted arrays.

    Arrays are merged by size, so that N keys are in about log2(N / 65536) of them.

    >>> seen = SeenPrompts()
    >>> [seen.add(key) for key in (b"a" * 16, b"b" * 16, b"a" * 16)]
    [True, True, False]
    """

    def __init__(self, recent: int = _RECENT) -> None:
        self._limit, self._recent = recent, set[bytes]()
        self._sorted: list[np.ndarray[tuple[int], np.dtype[np.bytes_]]] = []  # largest first

    def add(self, key: bytes) -> bool:
        """Add a key; return whether it is new."""
        if key in self._recent or any(_holds(array, key) for array in self._sorted):
            return False
        self._recent.add(key)
        if len(self._recent) >= self._limit:
            self._merge()
        return True

    def _merge(self) -> None:
        array = np.fromiter(self._recent, _KEY, len(self._recent))
        self._recent.clear()
        while self._sorted and len(self._sorted[-1]) <= len(array):
            array = np.concatenate([self._sorted.pop(), array])
        array.sort()
        self._sorted.append(array)


def _holds(array: np.ndarray[tuple[int], np.dtype[np.bytes_]], key: bytes) -> bool:
    at = int(array.searchsorted(np.bytes_(key)))
    return at < len(array) and bytes(array[at]) == key.rstrip(b"\0")  # NumPy drops NULs at the end
