"""The answer in LaTeX's `\\boxed{…}`, as MATH's solutions and many models write it."""

from __future__ import annotations

LONGEST = 1000  # characters; no answer needs more, and a longer one must not cost time
_MARK = "\\boxed{"
_MARKS = (_MARK, "\\fbox{")


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` or `\\fbox{…}`; None where there is none, or no end.

    >>> last_boxed(r"so \\boxed{1} or \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start, mark = max((text.rfind(mark), mark) for mark in _MARKS)
    if start < 0:
        return None
    first = start + len(mark)
    depth = 1
    for place in range(first, min(len(text), first + LONGEST)):
        letter = text[place]
        if letter in "{}" and text[place - 1] != "\\":
            depth += 1 if letter == "{" else -1
            if not depth:
                return _unwrapped(text[first:place].strip())
    return None


def _unwrapped(inner: str) -> str:
    """The inside of a box that holds nothing but a box."""
    while inner.startswith(_MARK) and inner.endswith("}"):
        within = inner[len(_MARK) : -1]
        depth = 0
        for letter in within:
            depth += (letter == "{") - (letter == "}")
            if depth < 0:
                return inner
        inner = within.strip()
    return inner
