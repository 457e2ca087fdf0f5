"""`python -m engine.export`: a checkpoint's policy as a model folder, or a model with its card.

Exit status: 0, written; 1, not, with one sentence that says why; 2, wrong usage.
"""

from __future__ import annotations

import _thread
import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence

from engine.console import INTERRUPTED, quiet, say
from engine.errors import ConfigError, EngineError

STATUS = "exit status: 0 written; 1 not, and nothing is left; 2 wrong usage"
FAILED = 1
HUB = "hf://"
_CLEANUP_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check_usage(parser, options)
    quiet()
    try:
        if options.beside:
            threading.Thread(target=_exit_with_parent, daemon=True).start()
        say(_release(options) if options.to else _export_checkpoint(options))
    except EngineError as error:
        say(f"error: {error}", error=True)
        return FAILED
    except KeyboardInterrupt:
        say("interrupted; nothing is left", error=True)
        return INTERRUPTED
    return 0


def _export_checkpoint(options: argparse.Namespace) -> str:
    from engine.trainers.huggingface_export import (
        export_policy,  # torch takes seconds; --help needs none
    )

    source = export_policy(options.source, options.out, options.model)
    return f"{options.out}: the policy of {source}"


def _release(options: argparse.Namespace) -> str:
    """Write a model with its card to a folder or the hub; return where it is now."""
    from engine.release.model import Licence, base_licence, find_base, read_model
    from engine.release.model_folder import (
        CARD,
        LINEAGE,
        Repository,
        lineage_json,
        model_card,
        push,
        write_folder,
    )

    to_hub = options.to.startswith(HUB)
    repository = Repository.parse(options.to) if to_hub else None
    if "://" in options.to and not to_hub:
        raise ConfigError(f"--to {options.to!r}: give a local folder, or {HUB}OWNER/NAME")
    model = read_model(options.source, options.store)
    for note in model.notes:
        say(f"note: {note}", error=True)
    base = find_base(model.line)
    chosen = Licence(options.license) if options.license else None
    licence = chosen or (base_licence(base) if base is not None else None)
    unknown = licence is None and (base is None or bool(base.path))
    if unknown and to_hub:
        raise ConfigError(
            f"the licence of {base.sentence() if base else 'what it was trained from'} is unknown: "
            "no card says it; name the one that this model is given away under with --license "
            "(e.g. apache-2.0)"
        )
    if unknown:
        say("note: no card says the base's licence; the card says so (--license)", error=True)
    if repository is None:
        name = os.path.basename(os.path.abspath(options.to))
        folder = write_folder(model, model_card(model, base, licence, name), options.to)
        return f"{folder}: {model.name}, content {model.manifest.digest}"
    card = model_card(model, base, licence, repository.id)
    commit = push(model, {CARD: card, LINEAGE: lineage_json(model)}, repository, options.private)
    return f"{commit}: {model.name}, content {model.manifest.digest}"


def _check_usage(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with the usage where an option belongs to the other kind of export."""
    out_options = {"--model": options.model, "--beside": options.beside}
    to_options = {
        "--license": options.license,
        "--private": options.private,
        "--store": options.store,
    }
    wrong, other = (out_options, "--out") if options.to else (to_options, "--to")
    for name, value in wrong.items():
        if value:
            parser.error(f"{name} goes with {other}")
    if options.private and not options.to.startswith(HUB):
        parser.error(f"--private goes with --to {HUB}OWNER/NAME")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.export",
        description="With --out: the policy in a checkpoint of an RL run, with its tokenizer, as a "
        "Hugging Face folder (config.json, safetensors). Adapters are merged, and lie in its "
        "folder adapter/ alone. Reads and writes local folders and s3://. With --to: a model that "
        "a stage published, or that is registered, with a model card, after its lineage was "
        "checked.",
        epilog=STATUS,
    )
    add = parser.add_argument
    add(
        "source",
        metavar="CHECKPOINT|MODEL",
        help="with --out: step_<n> of a run, or the run's folder for its newest good one; with "
        "--to: an artifact's folder, models:/NAME@ALIAS or models:/NAME/VERSION",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", metavar="FOLDER", help="a checkpoint's policy goes there; must not exist"
    )
    where.add_argument(
        "--to",
        default="",
        metavar="FOLDER|hf://OWNER/NAME",
        help="a model with its card goes there: a folder that must not exist, or a repository of "
        "the hub ($HF_ENDPOINT, $HF_TOKEN), @BRANCH for another branch than main",
    )
    add(
        "--model",
        metavar="START",
        help="the model that training started from, folder or hub id (default: as saved)",
    )
    add("--beside", action="store_true", help="end when standard input does: as a run calls it")
    add("--license", metavar="ID", help="the model's licence (default: that of the base's card)")
    add("--private", action="store_true", help="make a new repository private")
    add(
        "--store",
        metavar="ROOT",
        action="append",
        default=[],
        help="folder or s3:// prefix to search for what the model was made from; may be repeated "
        "(default: its own store, and $HYBRIDFLYTE_HOME or ./outputs)",
    )
    return parser


def _exit_with_parent() -> None:
    os.read(0, 1)
    _thread.interrupt_main()
    time.sleep(_CLEANUP_S)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
