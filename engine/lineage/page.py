"""Lineage as one HTML page that needs nothing else: graph, details, differences, findings.

The page makes no request: a content security policy permits its own style and script, by their
digests, and nothing more. Without JavaScript all details are shown one below the other. Markup,
style and script are in `templates/`.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from engine import html_templates
from engine.errors import StorageError
from engine.lineage.audit import Audit
from engine.lineage.compare import ArtifactComparison, as_text, flatten
from engine.lineage.differences import data_line, metric, row_lines, signed
from engine.lineage.graph import ArtifactNode, Edge, Graph
from engine.lineage.graph_layout import BOX_HEIGHT, BOX_WIDTH
from engine.lineage.graph_svg import draw
from engine.lineage.review import Review

MOST_FILES = 200  # files of one artifact that the page lists
# Kinds with a colour of their own in page.css; the others share one.
KINDS = (
    "source",
    "dataset",
    "sft",
    "rl",
    "preference",
    "reward_model",
    "evaluation",
    "promotion",
    "checkpoint",
    "model_version",
)


@dataclass(frozen=True, slots=True)
class PageRow:
    """A line of the table of all nodes."""

    node: ArtifactNode
    made: str  # e.g. "2026-11-20 02:14"
    run: str  # Flyte execution, or MLflow run of a model version
    mark: str  # "fault", "missing" or empty

    @property
    def words(self) -> str:
        """What the page's filter searches."""
        node = self.node
        words = (node.kind, node.name, node.digest, node.uri, self.run, self.made, self.mark)
        return " ".join(words).lower()


def render_page(
    review: Review, audit: Audit | None = None, comparison: ArtifactComparison | None = None
) -> str:
    """Return the page. audit: what checking found, None if nothing was checked."""
    graph = review.graph
    marks = _marks(graph, audit)
    parents: dict[str, list[Edge]] = defaultdict(list)
    children: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges.values():
        parents[edge.child].append(edge)
        children[edge.parent].append(edge)
    faults, notes = _findings(graph, audit)
    templates = _templates()
    css, script = (html_templates.asset(__package__, name) for name in ("page.css", "page.js"))
    return templates.get_template("page.html.j2").render(
        audit=audit,
        box_height=BOX_HEIGHT,
        box_width=BOX_WIDTH,
        children=children,
        comparison=comparison,
        css=css,
        drawing=draw(graph),
        faults=faults,
        graph=graph,
        ids={key: f"lineage-{number}" for number, key in enumerate(graph.nodes)},
        marks=marks,
        most_files=MOST_FILES,
        notes=notes,
        parents=parents,
        policy=html_templates.content_policy(css, script),
        review=review,
        rows=_rows(graph, marks),
        script=script,
        title=_title(review, comparison),
    )


def write_page(target: str | Path, page: str) -> None:
    """Write a page whole or not at all; StorageError when the file system does not permit it."""
    path = Path(target).expanduser()
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            draft.write_text(page, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't write {path}: {error.strerror or error}; choose another file"
        ) from error


@functools.cache
def _templates() -> Environment:
    environment = html_templates.environment(__package__)
    environment.filters |= {
        "as_text": as_text,
        "data_line": data_line,
        "kind_class": lambda kind: f"k-{kind}" if kind in KINDS else "k-other",
        "metric": metric,
        "row_lines": row_lines,
        "signed": signed,
    }
    environment.globals |= {"facts": _facts, "flatten": flatten}
    return environment


def _title(review: Review, comparison: ArtifactComparison | None) -> str:
    if comparison is not None:
        return f"{comparison.before.name} and {comparison.after.name}: what differs"
    names = [node.name for node in review.starts]
    return (
        f"Lineage of {', '.join(names)}" if names else f"Lineage: {', '.join(review.index.roots)}"
    )


def _marks(graph: Graph, audit: Audit | None) -> dict[str, str]:
    marks = {finding.key: "fault" for finding in audit.faults} if audit else {}
    return marks | {key: "missing" for key, node in graph.nodes.items() if node.missing}


def _findings(
    graph: Graph, audit: Audit | None
) -> tuple[defaultdict[str, list[str]], defaultdict[str, list[str]]]:
    """The faults and the notes of each node, by key."""
    faults: defaultdict[str, list[str]] = defaultdict(list)
    notes: defaultdict[str, list[str]] = defaultdict(list)
    for finding in audit.findings if audit else ():
        (faults if finding.is_fault else notes)[finding.key].append(finding.text)
    for key, node in graph.nodes.items():
        if node.missing and node.missing not in faults[key]:
            faults[key].append(node.missing)
    return faults, notes


def _facts(node: ArtifactNode) -> dict[str, str]:
    """What is known of a node, by label; empty values are not shown."""
    facts = {"kind": node.kind, "content": node.digest, "place": node.uri}
    manifest = node.manifest
    if manifest is not None:
        facts |= {
            "made": f"{manifest.created_at:%Y-%m-%d %H:%M:%S %Z}",
            "code version": manifest.code_version,
            "sources": manifest.sources_digest,
            "config": manifest.config_digest,
            "manifest": manifest.own_digest,
            "Flyte execution": manifest.flyte_execution,
            "MLflow run": manifest.mlflow_run,
        }
    return facts | {name.replace("_", " "): value for name, value in node.facts.items()}


def _rows(graph: Graph, marks: dict[str, str]) -> list[PageRow]:
    """All nodes in order of time."""
    order = sorted(graph.nodes.values(), key=lambda n: (str(n.created_at or ""), n.kind))
    return [
        PageRow(
            node,
            f"{node.created_at:%Y-%m-%d %H:%M}" if node.created_at else "",
            node.manifest.flyte_execution if node.manifest else node.facts.get("run_id", ""),
            marks.get(node.key, ""),
        )
        for node in order
    ]
