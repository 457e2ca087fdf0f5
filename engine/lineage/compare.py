"""Compare two artifacts, and say the differences as values and in words."""

import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from engine.errors import LineageError
from engine.lineage.graph import CHECKPOINT, MODEL_VERSION, ArtifactNode, Graph
from engine.storage.artifacts import SOURCE
from engine.storage.filesystem import read_file
from engine.tracking.connection import flatten

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
            sides.append(_read_table(name, read_file(f"{folder}/{name}", LineageError)))
        except (LineageError, OSError, ValueError):  # pyarrow's errors are of these
            return None
    (columns_before, rows_before), (columns_after, rows_after) = sides
    signs = [f"+{c}" for c in columns_after if c not in columns_before]
    signs += [f"-{c}" for c in columns_before if c not in columns_after]
    added, removed = rows_after - rows_before, rows_before - rows_after
    totals = (rows_before.total(), rows_after.total(), added.total(), removed.total())
    return RowChange(name, *totals, columns=", ".join(signs))


def _read_table(name: str, data: bytes) -> tuple[list[str], Counter[str]]:
    """Return the columns, and how often each row occurs, by its digest."""
    if len(data) > LARGEST:
        raise ValueError(f"{name} is too large")
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
        columns = {c: None for row in rows if isinstance(row, dict) for c in row}
        return list(columns), Counter(map(_digest, rows))
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(data))
    batches = table.iter_batches(batch_size=1024)
    return table.schema_arrow.names, Counter(_digest(r) for b in batches for r in b.to_pylist())


def _digest(row: object) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def cut_digests(text: str) -> str:
    """Return a text with its SHA-1 and SHA-256 digests cut to 12 characters."""
    return re.sub(r"\b([0-9a-f]{12})([0-9a-f]{28}|[0-9a-f]{52})\b", r"\1", text)


ABSENT = "—"
DATA = (SOURCE, "dataset")


@dataclass(frozen=True, slots=True)
class Change:
    """One value on both sides, as JSON text; `ABSENT` where a side has none."""

    name: str  # e.g. "rl.actor.optim.lr"
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric on both sides; None where a side has none."""

    name: str
    before: float | None
    after: float | None

    @property
    def delta(self) -> float | None:
        """Return after less before; None unless both are finite."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before if math.isfinite(self.after - self.before) else None


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
        return self.before.digest == self.after.digest


def compare(graph: Graph, before: ArtifactNode, after: ArtifactNode) -> ArtifactComparison:
    """Compare two nodes of a graph; a model version is compared by its artifact."""
    sides = []
    for node in (before, after):
        above = [graph.nodes[edge.parent] for edge in graph.parents(node.key)]
        is_version = node.kind == MODEL_VERSION
        sides.append(next((n for n in above if is_version and not n.missing), node))
    before, after = sides
    code, config, parents, metrics = [], [], [], []
    names = {"code version": "code_version", "sources": "sources_digest"}
    for node in sides:
        made_by = dict(node.manifest) if node.manifest is not None else node.facts
        code.append({label: str(made_by[key]) for label, key in names.items() if key in made_by})
        config.append({k: as_text(value) for k, value in flatten(node.draft.config).items()})
        parents.append({e.name: graph.nodes[e.parent].name for e in graph.parents(node.key)})
        progress = {k: float(v) for k, v in node.facts.items() if k in ("step", "sequence")}
        metrics.append(progress if node.kind == CHECKPOINT else node.draft.metrics)
    old, new = metrics
    return ArtifactComparison(
        before=before, after=after, code=_changes(*code), config=_changes(*config),
        parents=_changes(*parents), data=_data(graph, before, after), files=_files(before, after),
        metrics=tuple(MetricChange(k, old.get(k), new.get(k)) for k in dict.fromkeys([*old, *new])),
    )  # fmt: skip


def as_text(value: object) -> str:
    """Return a setting as a person would write it."""
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    changes = (Change(n, before.get(n, ABSENT), after.get(n, ABSENT)) for n in names)
    return tuple(change for change in changes if change.before != change.after)


def _files(before: ArtifactNode, after: ArtifactNode) -> tuple[Change, ...]:
    sides = []
    for node in (before, after):
        files = node.manifest.files if node.manifest else {}
        sides.append({k: f"{e.sha256[:12]} ({e.size:,} bytes)" for k, e in files.items()})
    return _changes(*sides)


def _data(graph: Graph, before: ArtifactNode, after: ArtifactNode) -> tuple[DataChange, ...]:
    """Pair the datasets and sources behind both sides; equal ones are left out."""
    sides = []
    for node in (before, after):
        ancestors = [node, *graph.ancestors(node.key)]
        sides.append({n.digest: n for n in ancestors if n.kind in DATA})
    changes = []
    for kind in reversed(DATA):
        left, right = (
            [n for digest, n in side.items() if n.kind == kind and digest not in other]
            for side, other in (sides, reversed(sides))
        )
        for old, new in zip_longest(left, right):
            files: tuple[Change, ...] = ()
            if old and new and old.manifest and new.manifest:
                files = _files(old, new)
            both = [c.name for c in files if ABSENT not in (c.before, c.after)]
            rows = [row_change(name, old.uri, new.uri) for name in both]
            changes.append(DataChange(kind, old, new, files, tuple(filter(None, rows))))
    return tuple(changes)


def lines(comparison: ArtifactComparison) -> Iterator[str]:
    """Yield the differences as lines for a terminal."""

    def texts(changes: Sequence[Change]) -> list[str]:
        return [f"{c.name}: {c.before} → {c.after}" for c in changes]

    yield f"- {comparison.before.name}  {comparison.before.uri}"
    yield f"+ {comparison.after.name}  {comparison.after.uri}"
    if comparison.same_content:
        yield "both hold the same bytes"
    sections = {
        "code": texts(comparison.code),
        "configuration": texts(comparison.config),
        "parents": texts(comparison.parents),
        "data": [line for c in comparison.data for line in (data_line(c), *row_lines(c, "  "))],
        "files": texts(comparison.files),
        "metrics": [
            f"{m.name}: {metric(m.before)} → {metric(m.after)}"
            + (f"  ({signed(m.delta)})" if m.delta else "")
            for m in comparison.metrics
            if m.before != m.after
        ],
    }
    for title, entries in sections.items():
        yield f"{title}:" if entries else f"{title}: no difference"
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
