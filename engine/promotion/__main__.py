"""`python -m engine.promotion rollback|history`: the champions of a model."""

import argparse
import getpass
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from engine.console import command_line, say
from engine.lineage.lookup import open_registry
from engine.promotion.champions import WAIT_SECONDS, Champions, LockTimeouts

STATUS = "exit status: 0 done; 1 refused or no answer, and nothing was moved; 2 wrong usage"


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "rollback" and options.force and not options.to:
        parser.error("--force needs --to VERSION")
    timeouts = LockTimeouts(wait=getattr(options, "wait", WAIT_SECONDS))
    # Looking at a history must not create a store.
    champions = Champions(open_registry(), options.model, options.alias, timeouts)
    if options.command == "history":
        moves = champions.history()
    else:
        names = ("to", "expected", "request", "force", "approved_by", "dry_run")
        settings = {name: getattr(options, name) for name in names}
        user, verify = getpass.getuser(), not options.no_verify
        moves = [champions.rollback(options.reason, by=user, verify=verify, **settings)]
    if options.json:
        say(json.dumps([asdict(move) for move in moves], indent=2))
    else:
        for move in moves:
            say(move.sentence())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.promotion",
        description="The champions of a model in MLflow's registry ($MLFLOW_TRACKING_URI).",
        epilog=STATUS,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="rollback|history")
    rollback = commands.add_parser(
        "rollback", help="restore the previous champion", epilog=STATUS,
        description="Put the alias back on the previous champion, or on the one that --to names, "
        "and record why.",
    )  # fmt: skip
    history = commands.add_parser(
        "history", help="print who was champion when, and why", epilog=STATUS,
        description="Print all moves of the alias, oldest first.",
    )  # fmt: skip
    for command in (rollback, history):
        command.add_argument("--model", required=True, metavar="NAME", help="registered model")
        command.add_argument("--alias", default="champion", help="default: champion")
        command.add_argument("--json", action="store_true", help="print JSON")
    rollback.add_argument("--reason", required=True, metavar="TEXT", help="why; it is recorded")
    same = "refuse unless this version is champion, so that a repeated call changes nothing"
    approver = "who agrees, if promote.approval is required and the version has no approval"
    for flag, name, metavar, text in (
        ("--to", "to", "VERSION", "default: the previous champion"),
        ("--from", "expected", "VERSION", same),
        ("--request", "request", "ID", "a second call with this id changes nothing"),
        ("--approved-by", "approved_by", "NAME", approver),
    ):
        rollback.add_argument(flag, dest=name, default="", metavar=metavar, help=text)
    wait = f"longest wait for another process's lock (default: {WAIT_SECONDS:g})"
    rollback.add_argument("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS", help=wait)
    force = "take --to even if it never was champion; recorded as forced, not as a rollback"
    rollback.add_argument("--force", action="store_true", help=force)
    dry_run = "check all, print the move that would be made, and move nothing"
    rollback.add_argument("--dry-run", action="store_true", help=dry_run)
    no_verify = "don't re-hash MLflow's copy of the restored model"
    rollback.add_argument("--no-verify", action="store_true", help=no_verify)
    return parser


if __name__ == "__main__":
    sys.exit(main())
