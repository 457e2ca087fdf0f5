"""`python -m engine.lineage ARTIFACT`: print the tree from an artifact back to its source data."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from engine.errors import EngineError, LineageError
from engine.lineage.tree import Node, ancestry, check

SHOWN_METRICS = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status: 0, or 1 with one sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        root = ancestry(_resolve(options.artifact))
        faults = check(root) if options.verify else []
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(as_json(root), indent=2))
    else:
        # A pipe has no width of its own; 80 columns would break lines that a grep wants whole.
        Console(width=None if sys.stdout.isatty() else 1000, highlight=False).print(render(root))
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if options.verify and not faults:
        count = sum(not node.repeated for node in root.walk())
        print(f"verified: {count} artifacts and sources are as recorded", file=sys.stderr)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.lineage",
        description="Print what an artifact was made from, back to the source data.",
    )
    parser.add_argument(
        "artifact",
        metavar="ARTIFACT",
        help="an artifact folder, an s3:// address, models:/NAME@ALIAS or models:/NAME/VERSION",
    )
    parser.add_argument("--verify", action="store_true", help="re-hash every artifact of the tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _resolve(artifact: str) -> str:
    """Turn a registry reference into the artifact's address by the version's `artifact_uri` tag."""
    if not artifact.startswith("models:/"):
        return artifact.removeprefix("file://")
    from engine.tracking import Tracker

    version = Tracker().model_version(artifact)
    uri = version.tags.get("artifact_uri", "")
    if not uri:
        raise LineageError(
            f"{artifact} (version {version.version}) has no tag artifact_uri; register models "
            "through engine.tracking, or give the artifact's folder"
        )
    return uri


def render(root: Node) -> Tree:
    """Return a rich tree, one artifact a branch."""
    tree = Tree(_label(root))
    for parent in root.parents:
        _grow(tree, parent)
    return tree


def _grow(tree: Tree, node: Node) -> None:
    branch = tree.add(_label(node))
    for parent in node.parents:
        _grow(branch, parent)


def _label(node: Node) -> str:
    """Return one or two lines: part, kind and digest; then what made it and how well it did."""
    head = f"[bold]{escape(node.kind)}[/bold] [cyan]{node.digest[:12]}[/cyan]"
    if node.name and node.name != node.kind:
        head = f"{escape(node.name)}: {head}"
    if node.missing:
        return f"{head} [red]missing[/red] [dim]{escape(node.uri)}[/dim]"
    if node.repeated:
        return f"{head} [dim]shown above[/dim]"
    if node.manifest is None:
        return f"{head} [dim]{escape(node.uri)}[/dim]"
    manifest = node.manifest
    facts = [
        f"{manifest.created_at:%Y-%m-%d %H:%M}",
        f"code {_short_version(manifest.code_version)}",
        f"config {manifest.config_digest[:12]}",
    ]
    if manifest.mlflow_run:
        facts.append(f"run {manifest.mlflow_run[:12]}")
    facts += [f"{k}={v:.4g}" for k, v in list(manifest.metrics.items())[:SHOWN_METRICS]]
    return f"{head} [dim]{escape(node.uri)}[/dim]\n{escape(' · '.join(facts))}"


def _short_version(version: str) -> str:
    """Shorten a git commit, keep its -dirty mark, and leave any other version as it is."""
    commit, dash, mark = version.partition("-")
    is_commit = len(commit) == 40 and all(c in "0123456789abcdef" for c in commit)
    return f"{commit[:10]}{dash}{mark}" if is_commit else version


def as_json(node: Node) -> dict[str, Any]:
    """Return the tree as JSON values; each artifact with its whole manifest less the file list."""
    manifest = node.manifest.model_dump(mode="json", exclude={"files"}) if node.manifest else None
    return {
        "name": node.name,
        "kind": node.kind,
        "digest": node.digest,
        "uri": node.uri,
        "missing": node.missing,
        "manifest": manifest,
        "parents": [as_json(parent) for parent in node.parents],
    }


if __name__ == "__main__":
    sys.exit(main())
