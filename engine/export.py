"""`python -m engine.export CHECKPOINT --out FOLDER`: a checkpoint's policy as a model folder.

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
from engine.errors import EngineError

STATUS = "exit status: 0 written; 1 not, and nothing is left; 2 wrong usage"
FAILED = 1
_CLEANUP_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = _parser().parse_args(arguments)
    quiet()
    try:
        if options.beside:
            threading.Thread(target=_exit_with_parent, daemon=True).start()
        from engine.trainers.export import export_policy  # torch takes seconds; --help needs none

        source = export_policy(options.checkpoint, options.out, options.model)
    except EngineError as error:
        say(f"error: {error}", error=True)
        return FAILED
    except KeyboardInterrupt:
        say("interrupted; nothing is left", error=True)
        return INTERRUPTED
    say(f"{options.out}: the policy of {source}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.export",
        description="Write the policy in a checkpoint of an RL run, with its tokenizer, as a "
        "Hugging Face folder (config.json, safetensors). Adapters are merged, and lie in its "
        "folder adapter/ alone. Reads and writes local folders and s3://.",
        epilog=STATUS,
    )
    add = parser.add_argument
    add("checkpoint", help="step_<n> of a run, or the run's folder for its newest good one")
    add("--out", required=True, metavar="FOLDER", help="where to; must not exist")
    add(
        "--model",
        metavar="START",
        help="the model that training started from, folder or hub id (default: as saved)",
    )
    add("--beside", action="store_true", help="end when standard input does: as a run calls it")
    return parser


def _exit_with_parent() -> None:
    os.read(0, 1)
    _thread.interrupt_main()
    time.sleep(_CLEANUP_S)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
