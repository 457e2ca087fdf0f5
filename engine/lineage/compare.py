"""What differs between two artifacts, as values and in words."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.errors import LineageError
from engine.lineage.graph import CHECKPOINT, MODEL_VERSION, ArtifactNode, Graph
from engine.storage.artifacts import SOURCE
from engine.storage.digests import FileEntry
from engine.storage.filesystem import read_file
from engine.tracking.connection import flatten

# How many rows of a table were added and removed between two versions of its file.

LARGEST = 256 << 20  # bytes of a file that is read for this


@dataclass(frozen=True, slots=True)
class RowChange:
    """A table before and after, its rows taken as a multiset."""

    name: str  # file below the folder, e.g. "train.parquet"
    before: int  # rows
    after: int
    added: int
    removed: int
    columns: str = ""  # "+new, -old" where the columns differ


def row_change(name: str, before: str, after: str) -> RowChange | None:
    """Compare one Parquet or JSON Lines file of two folders; None for other or unreadable ones."""
    if not name.endswith((".parquet", ".jsonl")):
        return None
    sides = []
    for folder in (before, after):
        try:
            data = read_file(f"{folder}/{name}", LineageError)
        except (FileNotFoundError, LineageError):
            return None
        if len(data) > LARGEST:
            return None
        try:
            sides.append(_read_table(name, data))
        except (OSError, ValueError):  # pyarrow's errors are of these
            return None
    (columns_before, one), (columns_after, two) = sides
    signs = [f"+{c}" for c in columns_after if c not in columns_before]
    signs += [f"-{c}" for c in columns_before if c not in columns_after]
    return RowChange(
        name,
        before=one.total(),
        after=two.total(),
        added=(two - one).total(),
        removed=(one - two).total(),
        columns=", ".join(signs),
    )


def _read_table(name: str, data: bytes) -> tuple[list[str], Counter[str]]:
    """Return the columns, and how often each row occurs, by its digest."""
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
        columns = {c: None for row in rows if isinstance(row, dict) for c in row}
        return list(columns), Counter(map(_digest, rows))
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    return list(table.schema_arrow.names), Counter(_parquet_rows(table))


def _parquet_rows(table: object) -> Iterator[str]:
    for batch in table.iter_batches(batch_size=1024):  # type: ignore[attr-defined]
        for row in batch.to_pylist():
            yield _digest(row)


def _digest(row: object) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


# What differs between two artifacts: configuration, data, code, files, parents and metrics.

ABSENT = "—"
DATA = (SOURCE, "dataset")


@dataclass(frozen=True, slots=True)
class Change:
    """One value on both sides, as JSON text; `ABSENT` where a side has none."""

    name: str  # e.g. "rl.actor.optim.lr"
    before: str
    after: str

    @property
    def differs(self) -> bool:
        """Whether the sides are unequal."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric on both sides; None where a side has none."""

    name: str
    before: float | None
    after: float | None

    @property
    def delta(self) -> float | None:
        """After less before, where both are finite."""
        if self.before is None or self.after is None:
            return None
        delta = self.after - self.before
        return delta if math.isfinite(delta) else None


@dataclass(frozen=True, slots=True)
class DataChange:
    """A dataset or source that only one side was made from, or that differs between them."""

    kind: str
    before: ArtifactNode | None
    after: ArtifactNode | None
    files: tuple[Change, ...] = ()  # digests of files that differ
    rows: tuple[RowChange, ...] = ()  # of tables among them


@dataclass(frozen=True, slots=True)
class ArtifactComparison:
    """All differences; empty tuples where there are none."""

    before: ArtifactNode
    after: ArtifactNode
    code: tuple[Change, ...]
    config: tuple[Change, ...]
    parents: tuple[Change, ...]
    data: tuple[DataChange, ...]
    files: tuple[Change, ...]
    metrics: tuple[MetricChange, ...]  # those of both sides, equal ones too

    @property
    def same_content(self) -> bool:
        """Whether both hold the same bytes."""
        return self.before.digest == self.after.digest


def compare(graph: Graph, before: ArtifactNode, after: ArtifactNode) -> ArtifactComparison:
    """Compare two nodes of a graph; a model version is compared by its artifact."""
    before, after = _artifact(graph, before), _artifact(graph, after)
    return ArtifactComparison(
        before=before,
        after=after,
        code=_changes(_code(before), _code(after)),
        config=_changes(_texts(before.config), _texts(after.config)),
        parents=_changes(_parents(graph, before), _parents(graph, after)),
        data=_data(graph, before, after),
        files=_files(before, after),
        metrics=_metrics(before, after),
    )


def _artifact(graph: Graph, node: ArtifactNode) -> ArtifactNode:
    if node.kind != MODEL_VERSION:
        return node
    above = [graph.nodes[edge.parent] for edge in graph.parents(node.key)]
    return next((n for n in above if not n.missing), node)


def as_text(value: object) -> str:
    """Return a setting as a person would write it."""
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def _texts(config: Mapping[str, object]) -> dict[str, str]:
    return {name: as_text(value) for name, value in flatten(config).items()}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    changes = (Change(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in names)
    return tuple(change for change in changes if change.differs)


def _code(node: ArtifactNode) -> dict[str, str]:
    if node.manifest is not None:
        manifest = node.manifest
        return {"code version": manifest.code_version, "sources": manifest.sources_digest}
    names = {"code version": "code_version", "sources": "sources_digest"}
    return {k: node.facts[v] for k, v in names.items() if v in node.facts}


def _parents(graph: Graph, node: ArtifactNode) -> dict[str, str]:
    return {edge.name: graph.nodes[edge.parent].name for edge in graph.parents(node.key)}


def _files(before: ArtifactNode, after: ArtifactNode) -> tuple[Change, ...]:
    sides = [_sums(node.manifest.files if node.manifest else {}) for node in (before, after)]
    return _changes(*sides)


def _sums(files: Mapping[str, FileEntry]) -> dict[str, str]:
    return {name: f"{entry.sha256[:12]} ({entry.size:,} bytes)" for name, entry in files.items()}


def _metrics(before: ArtifactNode, after: ArtifactNode) -> tuple[MetricChange, ...]:
    one, two = (_numbers(node) for node in (before, after))
    return tuple(MetricChange(n, one.get(n), two.get(n)) for n in dict.fromkeys([*one, *two]))


def _numbers(node: ArtifactNode) -> Mapping[str, float]:
    if node.kind == CHECKPOINT:
        names = {"step", "sequence"}
        return {k: float(v) for k, v in node.facts.items() if k in names}
    return node.metrics


def _data(graph: Graph, before: ArtifactNode, after: ArtifactNode) -> tuple[DataChange, ...]:
    """Pair the datasets and sources behind both sides; equal ones are left out."""
    sides = []
    for node in (before, after):
        behind = [node, *graph.ancestors(node.key)]
        sides.append({n.digest: n for n in behind if n.kind in DATA})
    only_before = [n for digest, n in sides[0].items() if digest not in sides[1]]
    only_after = [n for digest, n in sides[1].items() if digest not in sides[0]]
    changes = []
    for kind in reversed(DATA):
        left = [n for n in only_before if n.kind == kind]
        right = [n for n in only_after if n.kind == kind]
        for position in range(max(len(left), len(right))):
            one = left[position] if position < len(left) else None
            two = right[position] if position < len(right) else None
            changes.append(_data_change(kind, one, two))
    return tuple(changes)


def _data_change(kind: str, before: ArtifactNode | None, after: ArtifactNode | None) -> DataChange:
    if before is None or after is None or before.manifest is None or after.manifest is None:
        return DataChange(kind, before, after)
    files = _files(before, after)
    both = [c.name for c in files if ABSENT not in (c.before, c.after)]
    rows = [row_change(name, before.uri, after.uri) for name in both]
    return DataChange(kind, before, after, files, tuple(r for r in rows if r is not None))


# A comparison of two artifacts in words: lines for a terminal, and the phrases of the page.


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
