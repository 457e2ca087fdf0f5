"""A graph as text for a terminal and as JSON values for a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rich.markup import escape
from rich.tree import Tree

from engine.lineage.audit import Audit
from engine.lineage.compare import ArtifactComparison, Change
from engine.lineage.graph import ArtifactNode, Edge, Graph
from engine.lineage.review import Review
from engine.lineage.rows import RowChange
from engine.redaction import presentable

SHOWN_METRICS = 4


def trees(review: Review) -> list[Tree]:
    """Return, for each node asked about, a tree of its ancestors and one of its descendants."""
    found = []
    for node in review.starts:
        found.append(_tree(review.graph, node, up=True))
        if review.graph.children(node.key):
            found.append(_tree(review.graph, node, up=False))
    return found


def _tree(graph: Graph, root: ArtifactNode, up: bool) -> Tree:
    """Walk parents, or children; a node's subtree is shown where it first occurs."""
    edges: dict[str, list[Edge]] = {}
    for edge in graph.edges.values():
        edges.setdefault(edge.child if up else edge.parent, []).append(edge)
    tree = Tree(label(root) if up else f"[bold]what came of {_shown(root.name)}[/bold]")
    shown = {root.key}
    todo = [(tree, root.key)]
    while todo:
        branch, key = todo.pop()
        below = []
        for edge in edges.get(key, []):
            node = graph.nodes[edge.parent if up else edge.child]
            repeated = node.key in shown and bool(edges.get(node.key))
            part = f"as {edge.name}" if not up else edge.name
            below_it = branch.add(label(node, part, repeated))
            shown.add(node.key)
            if not repeated:
                below.append((below_it, node.key))
        todo += reversed(below)
    return tree


def label(node: ArtifactNode, part: str = "", repeated: bool = False) -> str:
    """Return one or two lines: part, kind and digest; then what made it and how well it did."""
    head = f"[bold]{_shown(node.kind)}[/bold] [cyan]{_shown(node.digest[:12])}[/cyan]"
    if node.label and node.manifest is None and node.kind != "source":
        head = f"[bold]{_shown(node.label)}[/bold] [cyan]{_shown(node.digest[:12])}[/cyan]"
    if part and part != node.kind:
        head = f"{_shown(part)}: {head}"
    if node.missing:
        return f"{head} [red]missing[/red] [dim]{_shown(node.uri)}[/dim]"
    if repeated:
        return f"{head} [dim]shown elsewhere[/dim]"
    if node.manifest is None:
        aliases = node.facts.get("aliases", "")
        named = f" [green]@{_shown(aliases)}[/green]" if aliases else ""
        return f"{head}{named} [dim]{_shown(node.uri)}[/dim]"
    manifest = node.manifest
    facts = [
        f"{manifest.created_at:%Y-%m-%d %H:%M}",
        f"code {_short_version(manifest.code_version)}",
        f"config {manifest.config_digest[:12]}",
    ]
    if manifest.mlflow_run:
        facts.append(f"run {manifest.mlflow_run[:12]}")
    facts += [f"{k}={v:.4g}" for k, v in list(manifest.metrics.items())[:SHOWN_METRICS]]
    return f"{head} [dim]{_shown(node.uri)}[/dim]\n{_shown(' · '.join(facts))}"


def _shown(text: str) -> str:
    """Text of a manifest, which is neither markup nor a terminal's control sequence."""
    return escape(presentable(text))


def _short_version(version: str) -> str:
    """Shorten a git commit, keep its -dirty mark, and leave any other version as it is."""
    commit, dash, mark = version.partition("-")
    is_commit = len(commit) == 40 and all(c in "0123456789abcdef" for c in commit)
    return f"{commit[:10]}{dash}{mark}" if is_commit else version


def as_json(
    review: Review, audit: Audit | None = None, comparison: ArtifactComparison | None = None
) -> dict[str, object]:
    """Return all as JSON values; each artifact with its whole manifest less the file list."""
    graph = review.graph
    values: dict[str, object] = {
        "focus": list(graph.focus),
        "nodes": [_node_json(node) for node in graph.nodes.values()],
        "edges": [asdict(edge) for edge in graph.edges.values()],
        "notes": review.notes,
    }
    if audit is not None:
        values["verified"] = not audit.faults
        values["checked"] = audit.checked
        values["faults"] = [{"key": f.key, "text": f.text} for f in audit.faults]
        values["notes"] = [finding.text for finding in audit.notes]
    if comparison is not None:
        values["differences"] = comparison_json(comparison)
    return values


def _node_json(node: ArtifactNode) -> dict[str, object]:
    manifest = node.manifest
    return {
        "key": node.key,
        "kind": node.kind,
        "digest": node.digest,
        "label": node.label,
        "uri": node.uri,
        "missing": node.missing,
        "facts": node.facts,
        "manifest_digest": manifest.own_digest if manifest else "",
        "manifest": manifest.model_dump(mode="json", exclude={"files"}) if manifest else None,
    }


def comparison_json(found: ArtifactComparison) -> dict[str, object]:
    """Return the differences as JSON values, sides by their keys in the graph."""

    def sides(changes: Iterable[Change | RowChange]) -> list[dict[str, object]]:
        return [asdict(change) for change in changes]

    return {
        "before": found.before.key,
        "after": found.after.key,
        "same_content": found.same_content,
        "code": sides(found.code),
        "config": sides(found.config),
        "parents": sides(found.parents),
        "files": sides(found.files),
        "metrics": [
            {"name": m.name, "before": m.before, "after": m.after, "change": m.delta}
            for m in found.metrics
        ],
        "data": [
            {
                "kind": change.kind,
                "before": change.before.key if change.before else None,
                "after": change.after.key if change.after else None,
                "files": sides(change.files),
                "rows": sides(change.rows),
            }
            for change in found.data
        ],
    }
