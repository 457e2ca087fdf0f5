"""`python -m engine.export`: a checkpoint's policy as a model folder, or a model with its card."""

import _thread
import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence

from engine.console import INTERRUPTED, command_line, quiet, say
from engine.errors import ConfigError

HUB = "hf://"
_CLEANUP_S = 5.0


@command_line(left="nothing is left")
def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    quiet()
    if options.beside:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    if options.to:
        say(_release(options))
        return 0
    from engine.trainers.huggingface_export import check_export, export_policy  # torch

    export = check_export if options.dry_run else export_policy
    source = export(options.source, options.out, options.model)
    dry = "dry run, nothing is written; " if options.dry_run else ""
    say(f"{dry}{options.out}: the policy of {source}")
    return 0


def _release(options: argparse.Namespace) -> str:
    """Write a model with its card to a folder or the hub; return where it is now."""
    from engine.release import model_folder
    from engine.release.model import Licence, base_licence, find_base, read_model

    to_hub = options.to.startswith(HUB)
    repository = model_folder.Repository.parse(options.to) if to_hub else None
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
            "no card says it; name the one that this model is given away under with --license ID"
        )
    if unknown:
        say("note: no card says the base's licence; the card says so (--license)", error=True)
    if options.dry_run:
        sizes = [entry.size for entry in model_folder.released_files(model).values()]
        return (
            f"dry run, nothing is written; {options.to}: {model.name}, content "
            f"{model.manifest.digest}, {len(sizes) + 2} files, {sum(sizes) / 2**30:.2f} GiB"
        )
    if repository is None:
        name = os.path.basename(os.path.abspath(options.to))
        card = model_folder.model_card(model, base, licence, name)
        address: object = model_folder.write_folder(model, card, options.to)
    else:
        card = model_folder.model_card(model, base, licence, repository.id)
        files = {model_folder.CARD: card, model_folder.LINEAGE: model_folder.lineage_json(model)}
        address = model_folder.push(model, files, repository, options.private)
    return f"{address}: {model.name}, content {model.manifest.digest}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; end with the usage where one belongs to the other kind of export."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.export",
        description="With --out: the policy in a checkpoint of an RL run, with its tokenizer, as a "
        "Hugging Face folder (config.json, safetensors). Adapters are merged, and "
        "adapter/ has them alone. Reads and writes local folders and s3://. With --to: a model "
        "that a stage published, or a registered one, with a model card, after a check of its "
        "lineage.",
        epilog="exit status: 0 written; 1 not, and nothing is left; 2 wrong usage",
    )
    add = parser.add_argument
    source = """with --out: step_<n> of a run, or the run's folder for its newest good one; with
        --to: an artifact's folder, models:/NAME@ALIAS or models:/NAME/VERSION"""
    add("source", metavar="CHECKPOINT|MODEL", help=source)
    where = parser.add_mutually_exclusive_group(required=True)
    out = "where to write a checkpoint's policy; must not exist"
    where.add_argument("--out", metavar="FOLDER", help=out)
    to = """where to write a model with its card: a folder that must not exist, or a repository of
        the hub ($HF_ENDPOINT, $HF_TOKEN), with @BRANCH for another branch than main"""
    where.add_argument("--to", default="", metavar="FOLDER|hf://OWNER/NAME", help=to)
    start = "the model that training started from, folder or hub id (default: as saved)"
    add("--model", metavar="START", help=start)
    add("--beside", action="store_true", help="end when standard input ends; for runs")
    add("--license", metavar="ID", help="the model's licence (default: that of the base's card)")
    add("--dry-run", action="store_true", help="check all, say what would be written, and exit")
    add("--private", action="store_true", help="make a new repository private")
    store = """folder or s3:// prefix to search for what the model was made from; may be repeated
        (default: its own store, and $HYBRIDFLYTE_HOME or ./outputs)"""
    add("--store", metavar="ROOT", action="append", default=[], help=store)
    options = parser.parse_args(arguments)
    others = ("model", "beside") if options.to else ("license", "private", "store")
    for name in others:
        if getattr(options, name):
            parser.error(f"--{name} goes with {'--out' if options.to else '--to'}")
    if options.private and not options.to.startswith(HUB):
        parser.error(f"--private goes with --to {HUB}OWNER/NAME")
    return options


def _exit_with_parent() -> None:
    os.read(0, 1)
    _thread.interrupt_main()
    time.sleep(_CLEANUP_S)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
