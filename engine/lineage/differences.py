"""A comparison of two artifacts in words: lines for a terminal, and the phrases of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.lineage.compare import ABSENT, ArtifactComparison, DataChange
from engine.lineage.graph import ArtifactNode


def lines(found: ArtifactComparison) -> Iterator[str]:
    """Yield the differences as lines for a terminal."""
    yield f"- {found.before.name}  {found.before.uri}"
    yield f"+ {found.after.name}  {found.after.uri}"
    if found.same_content:
        yield "both hold the same bytes"
    for title, changes in (
        ("code", found.code),
        ("configuration", found.config),
        ("parents", found.parents),
    ):
        yield from _section(title, [f"{c.name}: {c.before} → {c.after}" for c in changes])
    data = [line for c in found.data for line in (data_line(c), *row_lines(c, "  "))]
    yield from _section("data", data)
    yield from _section("files", [f"{c.name}: {c.before} → {c.after}" for c in found.files])
    yield from _section(
        "metrics",
        [
            f"{m.name}: {metric(m.before)} → {metric(m.after)}"
            + (f"  ({signed(m.delta)})" if m.delta else "")
            for m in found.metrics
            if m.before != m.after
        ],
    )


def _section(title: str, entries: Sequence[str]) -> Iterator[str]:
    yield f"{title}: {'no difference' if not entries else ''}".rstrip()
    yield from (f"  {entry}" for entry in entries)


def data_line(change: DataChange) -> str:
    """Return in a line which data takes the place of which."""

    def name(node: ArtifactNode | None) -> str:
        if node is None:
            return ABSENT
        return f"{node.label} ({node.digest[:12]})" if node.label else node.digest[:12]

    return f"{change.kind}: {name(change.before)} → {name(change.after)}"


def row_lines(change: DataChange, indent: str = "") -> list[str]:
    """Return a line for each table whose rows could be compared."""
    return [
        f"{indent}{rows.name}: {rows.before:,} → {rows.after:,} rows, {rows.added:,} added, "
        f"{rows.removed:,} removed" + (f"; columns {rows.columns}" if rows.columns else "")
        for rows in change.rows
    ]


def metric(value: float | None) -> str:
    """Return a metric with six digits, or the sign for none."""
    return ABSENT if value is None else f"{value:.6g}"


def signed(value: float | None) -> str:
    """Return a difference with its sign, empty where there is none."""
    return f"{value:+.6g}" if value else ""
