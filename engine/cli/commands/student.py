"""`python -m engine.student TEACHER --layers 0,1 --out FOLDER`: where a smaller student starts."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.console import command_line, quiet, say
from engine.errors import StorageError
from engine.storage.filesystem import writing


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.student",
        description="Write a model of some of a model's decoder layers, with its embeddings, last "
        "norm and tokenizer, as a Hugging Face folder: a student that starts near its teacher "
        "(algorithm.dataflow=distillation).",
        epilog="exit status: 0 the folder is there; 1 not, and nothing is left; 2 wrong usage",
    )
    add = parser.add_argument
    add("teacher", metavar="TEACHER", help="folder or hub id of a causal language model")
    about = "which decoder layers are kept, counted from 0, in ascending order"
    add("--layers", required=True, type=_numbers, metavar="0,2,…", help=about)
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder to write; must not exist")
    add("--dry-run", action="store_true", help="build it, say its size, and write nothing")
    options = parser.parse_args(arguments)
    quiet()
    from transformers.utils.logging import disable_progress_bar  # seconds; --help needs none

    disable_progress_bar()
    out = options.out.expanduser()
    counts = write_student(options.teacher, options.layers, out, dry_run=options.dry_run)
    dry = "dry run, nothing is written; " if options.dry_run else ""
    say(f"{dry}{out}: {counts[0]:,} parameters of the teacher's {counts[1]:,}")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def write_student(
    teacher: str, layers: Sequence[int], out: Path, *, dry_run: bool = False
) -> tuple[int, int]:
    """Write the student whole or not at all; return its number of parameters and the teacher's."""
    from engine.data.tokenizer import load_tokenizer
    from engine.models import load_model, save_model, saved_dtype
    from engine.models.small_models import keep_layers

    if out.exists():
        raise StorageError(f"--out {out} is already there; choose another folder")
    model = load_model(teacher, saved_dtype(teacher))
    student = keep_layers(model, layers)
    if dry_run:
        return student.num_parameters(), model.num_parameters()
    with writing(out, "free space, or give another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as draft:
            save_model(student, load_tokenizer(teacher), Path(draft) / "student").rename(out)
    return student.num_parameters(), model.num_parameters()


if __name__ == "__main__":
    sys.exit(main())
