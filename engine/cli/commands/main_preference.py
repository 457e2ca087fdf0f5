"""`python -m engine.main_preference key=value ...`: DPO, its relatives and KTO from files.

Arguments and the run are in `engine.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.cli.offline_program import OfflineProgram
from engine.cli.offline_settings import PreferenceRunConfig
from engine.cli.program import run_program

_PROGRAM = OfflineProgram(
    "engine.main_preference",
    "Preference learning on your own pairs, or completions with a label: from a Hugging Face\n"
    "folder to a better one.",
    "  python -m engine.main_preference data.train_files=pairs.jsonl data.val_size=200 \\\n"
    "      model.path=/models/Qwen2.5-0.5B-Instruct preference.loss=sigmoid \\\n"
    "      preference.beta=0.1 preference.optim.lr=5e-7 run.default_local_dir=out",
    PreferenceRunConfig,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    return run_program(_PROGRAM.run, arguments)


if __name__ == "__main__":
    sys.exit(main())
