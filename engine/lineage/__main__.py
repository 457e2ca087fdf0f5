"""`python -m engine.lineage show|diff|verify|keygen`: where artifacts come from, who says so."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from engine.console import command_line, say
from engine.lineage.audit import Audit, audit
from engine.lineage.compare import ArtifactComparison, MetricChange, compare, cut_digests, lines
from engine.lineage.graph import ArtifactNode, Edge, Graph
from engine.lineage.lookup import Review, review
from engine.lineage.page import render_page
from engine.redaction import presentable
from engine.storage.filesystem import write_text
from engine.storage.signatures import KEYS_VARIABLE, SIGNING_VARIABLE, new_key, trusted_keys


def trees(review: Review) -> list[Tree]:
    """Return, for each node asked about, a tree of its ancestors and one of its descendants."""
    return [
        _tree(review.graph, node, up)
        for node in review.starts
        for up in (True, False)
        if up or review.graph.children(node.key)
    ]


def _tree(graph: Graph, root: ArtifactNode, up: bool) -> Tree:
    """Walk parents, or children; a node's subtree is shown where it first occurs."""
    edges: dict[str, list[Edge]] = {}
    for edge in graph.edges.values():
        edges.setdefault(edge.child if up else edge.parent, []).append(edge)
    tree = Tree(label(root) if up else f"[bold]what came of {_shown(root.name)}[/bold]")
    shown, todo = {root.key}, [(tree, root.key)]
    while todo:
        branch, key = todo.pop()
        below = []
        for edge in edges.get(key, []):
            node = graph.nodes[edge.parent if up else edge.child]
            repeated = node.key in shown and bool(edges.get(node.key))
            branch_below = branch.add(label(node, edge.name if up else f"as {edge.name}", repeated))
            shown.add(node.key)
            if not repeated:
                below.append((branch_below, node.key))
        todo += reversed(below)
    return tree


def label(node: ArtifactNode, part: str = "", repeated: bool = False) -> str:
    """Return one or two lines: part, kind and digest; then what made it and how well it did."""
    manifest, uri = node.manifest, f"[dim]{_shown(node.uri)}[/dim]"
    kind = node.label if node.label and manifest is None and node.kind != "source" else node.kind
    head = f"[bold]{_shown(kind)}[/bold] [cyan]{_shown(node.digest[:12])}[/cyan]"
    if part and part != node.kind:
        head = f"{_shown(part)}: {head}"
    if node.missing:
        return f"{head} [red]missing[/red] {uri}"
    if repeated:
        return f"{head} [dim]shown elsewhere[/dim]"
    if manifest is None:
        aliases = node.facts.get("aliases", "")
        return head + (f" [green]@{_shown(aliases)}[/green]" if aliases else "") + f" {uri}"
    facts = [
        f"{manifest.created_at:%Y-%m-%d %H:%M}",
        f"code {cut_digests(manifest.code_version)}",
        f"config {manifest.config_digest[:12]}",
        *([f"MLflow run {manifest.mlflow_run[:12]}"] if manifest.mlflow_run else []),
        *([f"signed by {manifest.signed.key[:12]}"] if manifest.signed else []),
        *(f"{name}={value:.6g}" for name, value in list(manifest.metrics.items())[:4]),
    ]
    return f"{head} {uri}\n{_shown(' · '.join(facts))}"


def _shown(text: str) -> str:
    """Return text of a manifest that is neither markup nor a terminal's control sequence."""
    return escape(presentable(text))


def as_json(
    review: Review, audit: Audit | None = None, comparison: ArtifactComparison | None = None
) -> dict[str, object]:
    """Return all as JSON values; each artifact with its whole manifest less the file list."""
    names = ("key", "kind", "digest", "label", "uri", "missing", "facts")
    nodes = [
        {
            **{name: getattr(node, name) for name in names},
            "manifest_digest": node.manifest.own_digest if node.manifest else "",
            "manifest": node.manifest and node.manifest.model_dump(mode="json", exclude={"files"}),
        }
        for node in review.graph.nodes.values()
    ]
    values: dict[str, object] = {
        "focus": list(review.graph.focus),
        "nodes": nodes,
        "edges": [asdict(edge) for edge in review.graph.edges.values()],
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


def comparison_json(comparison: ArtifactComparison) -> dict[str, object]:
    """Return the differences as JSON values, sides by their keys in the graph."""

    def plain(value: object) -> object:
        if isinstance(value, ArtifactNode):
            return value.key
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if not is_dataclass(value):
            return value
        items = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return items | ({"change": value.delta} if isinstance(value, MetricChange) else {})

    names = ("before", "after", "same_content", "code", "config", "parents", "files", "metrics")
    return {name: plain(getattr(comparison, name)) for name in (*names, "data")}


COMMANDS: tuple[tuple[str, int | str, str, str], ...] = (
    (
        *("show", 1, "what made it, and what came of it"),
        "Print what something was made from, back to the source data, and what came of it.",
    ),
    (
        *("diff", 2, "what differs between two"),
        "Print what differs between two: configuration, data, code, parents, files and metrics. "
        "Differences are no fault: the exit status is 0.",
    ),
    (
        *("verify", "*", "re-hash and find tampering and missing parents"),
        "Re-hash something and all that it was made from; without REF, all that the stores hold. "
        "Finds changed, added and removed files, edited manifests, and what is missing.",
    ),
)
KEYGEN = "keygen"
REFERENCE = (
    "an artifact's folder or s3:// address, a checkpoint (…/step_500), a source file, the first "
    "digits of a digest, models:/NAME@ALIAS or models:/NAME/VERSION"
)
STATUS = "exit status: 0 fine; 1 something is missing, unreadable or not as recorded; 2 wrong usage"


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    known = [*(name for name, *_ in COMMANDS), KEYGEN]
    if words and words[0] not in known and not words[0].startswith("-"):
        words.insert(0, "show")  # `python -m engine.lineage ARTIFACT` shows it
    options = _parser().parse_args(words)
    return _keygen(options.file) if options.command == KEYGEN else _run(options)


def _keygen(file: str) -> int:
    public = new_key(Path(file))
    say(f"export {SIGNING_VARIABLE}={shlex.quote(str(Path(file).absolute()))}  # secret: who signs")
    say(f"export {KEYS_VARIABLE}={public}  # who checks; or lineage.public_keys")
    return 0


def _run(options: argparse.Namespace) -> int:
    trusted = trusted_keys() if options.require_signatures else None
    graph_review = review(
        options.reference,
        options.store,
        registry=not options.no_registry,
        descendants=options.command == "show" or getattr(options, "descendants", False),
    )
    comparison = None
    if options.command == "diff":
        comparison = compare(graph_review.graph, graph_review.starts[0], graph_review.starts[-1])
    verifies = trusted is not None or options.command == "verify" or options.verify
    checked = audit(graph_review, trusted) if verifies else None
    if options.html:
        page = render_page(graph_review, checked, comparison)
        write_text(Path(options.html).expanduser(), page, "choose another file")
    if options.json:
        say(json.dumps(as_json(graph_review, checked, comparison), indent=2))
    else:
        # rich takes a pipe for 80 columns wide, and would break the lines that a grep matches.
        console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
        for line in lines(comparison) if comparison is not None else ():
            console.print(presentable(line), markup=False, soft_wrap=True)
        for tree in trees(graph_review) if options.command == "show" else ():
            console.print(tree)
    # Faults, and what could not be checked, go to stderr.
    for note in graph_review.notes if checked is None else (note.text for note in checked.notes):
        say(f"note: {note}", error=True)
    faults = checked.faults if checked is not None else ()
    for fault in faults:
        say(f"error: {fault.text}", error=True)
    if checked is not None and not faults:
        say(f"verified: {checked.checked} artifacts and sources are as recorded", error=True)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.lineage",
        description="Where artifacts come from, what was made from them, and whether they changed.",
        epilog=STATUS,
    )
    names = "|".join([*(name for name, *_ in COMMANDS), KEYGEN])
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    for name, nargs, summary, description in COMMANDS:
        command = commands.add_parser(name, help=summary, description=description, epilog=STATUS)
        command.add_argument("reference", metavar="REF", nargs=nargs, help=REFERENCE)
        extra = ("--descendants", "also re-hash what was made from it")
        if name != "verify":
            extra = ("--verify", "re-hash all that is shown")
        signed = f"check, and find what none of the keys in ${KEYS_VARIABLE} signed"
        registry = ("--no-registry", "don't ask MLflow for model versions")
        flags = (extra, ("--require-signatures", signed), registry, ("--json", "print JSON"))
        for flag, text in flags:
            command.add_argument(flag, action="store_true", help=text)
        command.add_argument(
            "--store", metavar="ROOT", action="append", default=[],
            help="folder or s3:// prefix to search for artifacts; may be repeated (default: the "
            "store that REF lies in, and $HYBRIDFLYTE_HOME or ./outputs)",
        )  # fmt: skip
        command.add_argument("--html", metavar="FILE", help="write one page that needs no network")
    keygen = commands.add_parser(
        KEYGEN, help="make a pair of keys for signatures",
        description="Write a new private key (Ed25519, PEM) to FILE, and print the public key.",
    )  # fmt: skip
    keygen.add_argument("file", metavar="FILE", help="file of the private key; must not exist")
    return parser


if __name__ == "__main__":
    sys.exit(main())
