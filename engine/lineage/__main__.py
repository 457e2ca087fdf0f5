"""`python -m engine.lineage show|diff|verify`: where artifacts come from, and whether they changed.

Exit status: 0, fine; 1, something is missing, unreadable or not as recorded; 2, wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from engine.console import exit_130_on_ctrl_c, say
from engine.errors import EngineError
from engine.lineage.audit import Audit, audit
from engine.lineage.compare import ArtifactComparison, compare
from engine.lineage.differences import lines
from engine.lineage.page import render_page, write_page
from engine.lineage.review import Review, review
from engine.lineage.terminal import as_json, trees
from engine.redaction import presentable

COMMANDS = ("show", "diff", "verify")
REFERENCE = (
    "an artifact's folder or s3:// address, a checkpoint (…/step_500), a source file, the first "
    "digits of a digest, models:/NAME@ALIAS or models:/NAME/VERSION"
)
STATUS = "exit status: 0 fine; 1 something is missing, unreadable or not as recorded; 2 wrong usage"


@exit_130_on_ctrl_c
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in COMMANDS and not given[0].startswith("-"):
        given.insert(0, "show")  # `python -m engine.lineage ARTIFACT` shows it
    options = _parser().parse_args(given)
    try:
        return _run(options)
    except EngineError as error:
        say(f"error: {error}", error=True)
        return 1
    except BrokenPipeError:  # `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    found = review(
        options.reference,
        options.store,
        registry=not options.no_registry,
        descendants=options.command == "show" or getattr(options, "descendants", False),
    )
    comparison = None
    if options.command == "diff":
        comparison = compare(found.graph, found.starts[0], found.starts[-1])
    checked = audit(found) if options.command == "verify" or options.verify else None
    if options.html:
        write_page(options.html, render_page(found, checked, comparison))
    if options.json:
        say(json.dumps(as_json(found, checked, comparison), indent=2))
    else:
        _print(options.command, found, comparison)
    return _conclude(found, checked)


def _print(command: str, found: Review, comparison: ArtifactComparison | None) -> None:
    # A pipe has no width of its own; 80 columns would break lines that a grep wants whole.
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    if comparison is not None:
        for line in lines(comparison):
            console.print(presentable(line), markup=False, soft_wrap=True)
    elif command == "show":
        for tree in trees(found):
            console.print(tree)


def _conclude(found: Review, checked: Audit | None) -> int:
    """Say on stderr what was found wrong and what was not looked at."""
    for note in checked.notes if checked else ():
        say(f"note: {note.text}", error=True)
    if checked is None:
        for text in found.notes:
            say(f"note: {text}", error=True)
        return 0
    for fault in checked.faults:
        say(f"error: {fault.text}", error=True)
    if checked.faults:
        return 1
    say(f"verified: {checked.checked} artifacts and sources are as recorded", error=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.lineage",
        description="Where artifacts come from, what came of them, and whether they changed.",
        epilog=STATUS,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|diff|verify")
    show = commands.add_parser(
        "show", help="what made it, and what came of it", epilog=STATUS,
        description="Print what something was made from, back to the source data, and what came "
        "of it.",
    )  # fmt: skip
    show.add_argument("reference", metavar="REF", nargs=1, help=REFERENCE)
    diff = commands.add_parser(
        "diff", help="what differs between two", epilog=STATUS,
        description="Print what differs between two: configuration, data, code, parents, files "
        "and metrics. Differences are no fault: the exit status is 0.",
    )  # fmt: skip
    diff.add_argument("reference", metavar="REF", nargs=2, help=REFERENCE)
    verify = commands.add_parser(
        "verify", help="re-hash and find tampering and missing parents", epilog=STATUS,
        description="Re-hash something and all that it was made from; without REF, all that the "
        "stores hold. Finds changed, added and removed files, edited manifests, and what is "
        "missing.",
    )  # fmt: skip
    verify.add_argument("reference", metavar="REF", nargs="*", help=REFERENCE)
    verify.add_argument(
        "--descendants", action="store_true", help="re-hash what came of it as well"
    )
    for command in (show, diff):
        command.add_argument("--verify", action="store_true", help="re-hash all that is shown")
    for command in (show, diff, verify):
        command.add_argument(
            "--store", metavar="ROOT", action="append", default=[],
            help="folder or s3:// prefix to search for artifacts; may be repeated (default: the "
            "store that REF lies in, and $HYBRIDFLYTE_HOME or ./outputs)",
        )  # fmt: skip
        command.add_argument(
            "--no-registry", action="store_true", help="don't ask MLflow for model versions"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--html", metavar="FILE", help="write one page that needs no network")
    return parser


if __name__ == "__main__":
    sys.exit(main())
