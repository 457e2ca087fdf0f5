"""Tables and lines of Markdown whose cells may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(line, cells)) + " |" for cells in lines)


def line(text: str) -> str:
    """A text that neither ends a line, nor a cell, nor begins HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
