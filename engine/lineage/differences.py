"""A comparison of two artifacts as HTML tables and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.lineage.compare import ABSENT, Change, Comparison, DataChange, MetricChange
from engine.lineage.graph import Node
from engine.lineage.markup import element, table, text


def difference_tables(found: Comparison) -> str:
    """Return the differences as HTML."""
    parts = [
        _card("Metrics", _metric_table(found.metrics)),
        _card("Configuration", _change_table(found.config)),
        _card("Data", "".join(_data_table(change) for change in found.data)),
        _card("Code", _change_table(found.code)),
        _card("Parents", _change_table(found.parents)),
        _card("Files", _change_table(found.files)),
    ]
    sides = (
        f'<p><span class="was">before</span> {text(found.before.name)} '
        f'<code>{text(found.before.uri)}</code></p><p><span class="is">after</span> '
        f"{text(found.after.name)} <code>{text(found.after.uri)}</code></p>"
    )
    same = "<p>Both hold the same bytes.</p>" if found.same_content else ""
    return f'<div class="panel card" id="differences">{sides}{same}</div>{"".join(parts)}'


def _card(title: str, inside: str) -> str:
    inside = inside or '<p class="soft">no difference</p>'
    return f'<section class="panel card"><h3>{title}</h3>{inside}</section>'


def _change_table(changes: Sequence[Change]) -> str:
    rows = [
        (
            f"<code>{text(change.name)}</code>",
            f'<code class="was">{text(change.before)}</code>',
            f'<code class="is">{text(change.after)}</code>',
        )
        for change in changes
    ]
    return table(("", "before", "after"), rows)


def _metric_table(metrics: Sequence[MetricChange]) -> str:
    rows = [
        (
            text(metric.name),
            f'<span class="num">{text(number(metric.before))}</span>',
            f'<span class="num">{text(number(metric.after))}</span>',
            f'<span class="num">{text(signed(metric.delta))}</span>',
        )
        for metric in metrics
    ]
    return table(("", "before", "after", "change"), rows)


def _data_table(change: DataChange) -> str:
    head = element("p", data_line(change))
    lines = "".join(element("li", line) for line in row_lines(change))
    return head + (f"<ul>{lines}</ul>" if lines else "") + _change_table(change.files)


def lines(found: Comparison) -> Iterator[str]:
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
            f"{m.name}: {number(m.before)} → {number(m.after)}"
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

    def name(node: Node | None) -> str:
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


def number(value: float | None) -> str:
    """Return a metric with six digits, or the sign for none."""
    return ABSENT if value is None else f"{value:.6g}"


def signed(value: float | None) -> str:
    """Return a difference with its sign, empty where there is none."""
    return f"{value:+.6g}" if value else ""
