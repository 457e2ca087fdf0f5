"""Lineage as one HTML page that needs nothing else: graph, details, differences, findings.

The page makes no request: a content security policy permits its own style and script, by their
digests, and nothing more. Without JavaScript all details are shown one below the other.
"""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from engine.errors import StorageError
from engine.lineage.audit import Audit, Finding
from engine.lineage.compare import Comparison, as_text, flatten
from engine.lineage.differences import difference_tables
from engine.lineage.graph import Edge, Graph, Node
from engine.lineage.graph_svg import draw, kind_class
from engine.lineage.markup import attribute, element, table, text
from engine.lineage.review import Review
from engine.lineage.style import CSS, SCRIPT

MOST_FILES = 200  # files of one artifact that the page lists


def render_page(
    review: Review, audit: Audit | None = None, comparison: Comparison | None = None
) -> str:
    """Return the page. audit: what checking found, None if nothing was checked."""
    graph = review.graph
    ids = {key: f"lineage-{number}" for number, key in enumerate(graph.nodes)}
    marks = _marks(graph, audit)
    title = _title(review, comparison)
    body = [
        element("h1", title),
        element("p", review.summary, class_="soft"),
        _banner(audit, review.notes),
        difference_tables(comparison) if comparison is not None else "",
    ]
    if graph.nodes:
        body += [
            f'<div class="main">{_canvas(graph, ids, marks)}'
            f'<aside class="panel details" aria-label="Details" aria-live="polite">'
            f"{_details(graph, ids, audit)}</aside></div>",
            _all_nodes(graph, ids, marks),
        ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,">{element("title", title)}<style>{CSS}</style></head>\n'
        f'<body><div class="lineage">{"".join(body)}'
        f"<script>{SCRIPT}</script></div></body></html>\n"
    )


def write_page(target: str | Path, page: str) -> None:
    """Write a page whole or not at all; StorageError when the place does not permit it."""
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


def _policy() -> str:
    """Permit this style and this script, and no address at all."""

    def source(content: str) -> str:
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{source(CSS)}'; "
        f"script-src 'sha256-{source(SCRIPT)}'; base-uri 'none'; form-action 'none'"
    )


def _title(review: Review, comparison: Comparison | None) -> str:
    if comparison is not None:
        return f"{comparison.before.name} and {comparison.after.name}: what differs"
    names = [node.name for node in review.starts]
    return (
        f"Lineage of {', '.join(names)}" if names else f"Lineage: {', '.join(review.index.roots)}"
    )


def _marks(graph: Graph, audit: Audit | None) -> dict[str, str]:
    marks = {finding.key: "fault" for finding in audit.faults} if audit else {}
    return marks | {key: "missing" for key, node in graph.nodes.items() if node.missing}


def _banner(audit: Audit | None, notes: Sequence[str]) -> str:
    """What was checked, what was found, and what could not be."""
    if audit is None:
        said = '<div class="banner">Not verified: digests are as recorded, nothing was re-hashed.'
        return said + _items(notes) + "</div>"
    faults = [finding.text for finding in audit.faults]
    if faults:
        head = f"{len(faults)} {'thing is' if len(faults) == 1 else 'things are'} not as recorded"
        banner = f'<div class="banner bad" role="alert"><b>{head}</b>{_items(faults)}</div>'
    else:
        head = f"Verified: {audit.checked} artifacts and sources are as recorded"
        banner = f'<div class="banner good"><b>{head}</b></div>'
    if audit.notes:
        items = _items([finding.text for finding in audit.notes])
        banner += f'<div class="banner"><b>Not checked</b>{items}</div>'
    return banner


def _items(lines: Sequence[str], class_: str = "") -> str:
    items = "".join(element("li", line) for line in lines)
    return f'<ul class="{class_}">{items}</ul>' if items else ""


def _canvas(graph: Graph, ids: dict[str, str], marks: dict[str, str]) -> str:
    kinds = dict.fromkeys(node.kind for node in graph.nodes.values())
    legend = "".join(
        f'<li><span class="dot {kind_class(kind)}"></span>{text(kind.replace("_", " "))}</li>'
        for kind in kinds
    )
    return (
        '<section class="panel" aria-label="Graph"><div class="tools">'
        '<input class="filter" type="search" placeholder="Filter: kind, digest, run…" '
        'aria-label="Filter nodes">'
        '<button type="button" data-zoom="in" aria-label="Zoom in">+</button>'
        '<button type="button" data-zoom="out" aria-label="Zoom out">−</button>'
        '<button type="button" data-zoom="fit">Fit</button>'
        '<span class="soft">arrow keys follow the lines</span></div>'
        f'<div class="canvas">{draw(graph, ids, marks)}</div>'
        f'<ul class="legend">{legend}</ul></section>'
    )


def _details(graph: Graph, ids: dict[str, str], audit: Audit | None) -> str:
    above: dict[str, list[Edge]] = {}
    below: dict[str, list[Edge]] = {}
    for edge in graph.edges.values():
        above.setdefault(edge.child, []).append(edge)
        below.setdefault(edge.parent, []).append(edge)
    findings: dict[str, list[Finding]] = {}
    for finding in audit.findings if audit else ():
        findings.setdefault(finding.key, []).append(finding)
    return "".join(
        f'<section class="detail {kind_class(node.kind)}" id="{ids[key]}" tabindex="-1">'
        f'<h2><span class="dot"></span>{text(node.name)}</h2>'
        f'{_faults(node, findings.get(key, []))}<div class="columns"><div>{_facts(node)}</div><div>'
        f"{_relatives('Made from', above.get(key, []), True, graph, ids)}"
        f"{_relatives('Went into', below.get(key, []), False, graph, ids)}</div>"
        f"<div>{_metrics(node)}</div></div>{_config(node)}{_files(node)}</section>"
        for key, node in graph.nodes.items()
    )


def _faults(node: Node, findings: Sequence[Finding]) -> str:
    lines = [finding.text for finding in findings if finding.is_fault]
    if node.missing and node.missing not in lines:
        lines.append(node.missing)
    notes = [finding.text for finding in findings if not finding.is_fault]
    return _items(lines, "faults") + _items(notes, "soft")


def _facts(node: Node) -> str:
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
    facts |= {name.replace("_", " "): value for name, value in node.facts.items()}
    rows = [(text(name), f"<code>{text(value)}</code>") for name, value in facts.items() if value]
    return table(("", ""), rows, "pairs")


def _relatives(
    head: str, edges: Sequence[Edge], parents: bool, graph: Graph, ids: dict[str, str]
) -> str:
    rows = []
    for edge in edges:
        key = edge.parent if parents else edge.child
        link = f'<a href="#{ids[key]}" data-node="{ids[key]}">{text(graph.nodes[key].name)}</a>'
        rows.append((f"as {text(edge.name)}", link))
    return f"<h3>{head}</h3>{table(('', ''), rows, 'pairs')}" if rows else ""


def _metrics(node: Node) -> str:
    rows = [
        (text(name), f'<span class="num">{text(f"{value:.6g}")}</span>')
        for name, value in node.metrics.items()
    ]
    return f"<h3>Metrics</h3>{table(('', ''), rows, 'pairs long')}" if rows else ""


def _config(node: Node) -> str:
    flat = flatten(node.config)
    rows = [(text(name), f"<code>{text(as_text(value))}</code>") for name, value in flat.items()]
    if not rows:
        return ""
    inside = table(("", ""), rows, "pairs long")
    return f"<details><summary>Configuration ({len(rows)})</summary>{inside}</details>"


def _files(node: Node) -> str:
    if node.manifest is None:
        return ""
    files = node.manifest.files
    rows = [
        (
            f"<code>{text(name)}</code>",
            f'<span class="num">{entry.size:,}</span>',
            f'<code title="{attribute(entry.sha256)}">{entry.sha256[:12]}</code>',
        )
        for name, entry in list(files.items())[:MOST_FILES]
    ]
    more = f"<p>and {len(files) - MOST_FILES} more</p>" if len(files) > MOST_FILES else ""
    inside = table(("file", "bytes", "SHA-256"), rows)
    return f"<details><summary>Files ({len(files)})</summary>{inside}{more}</details>"


def _all_nodes(graph: Graph, ids: dict[str, str], marks: dict[str, str]) -> str:
    """A table of all nodes, for reading in order, for searching, and for screen readers."""
    rows = []
    order = sorted(graph.nodes.values(), key=lambda n: (str(n.created_at or ""), n.kind))
    for node in order:
        made = f"{node.created_at:%Y-%m-%d %H:%M}" if node.created_at else ""
        run = node.manifest.flyte_execution if node.manifest else node.facts.get("run_id", "")
        state = marks.get(node.key, "")
        cells = (
            f'<span class="dot {kind_class(node.kind)}"></span>{text(node.kind)}',
            f'<a href="#{ids[node.key]}" data-node="{ids[node.key]}">'
            f"{text(node.label or node.digest[:12])}</a>",
            f'<span class="num">{made}</span>',
            f"<code>{text(run)}</code>",
            f"<code>{text(node.uri)}</code>",
            f'<span class="was">{state}</span>',
        )
        words = " ".join((node.kind, node.name, node.digest, node.uri, run, made, state)).lower()
        inside = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(
            f'<tr data-node="{ids[node.key]}" data-words="{attribute(words)}">{inside}</tr>'
        )
    heads = "".join(
        element("th", name, scope="col") for name in ("kind", "name", "made", "run", "place", "")
    )
    return (
        '<h2>All nodes</h2><div class="panel card"><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )
