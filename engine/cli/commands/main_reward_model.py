"""`python -m engine.main_reward_model key=value ...`: a reward model from pairs of files.

Arguments and the run are in `engine.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.cli.offline_program import OfflineProgram
from engine.cli.offline_settings import RewardModelRunConfig
from engine.cli.program import run_program

_PROGRAM = OfflineProgram(
    "engine.main_reward_model",
    "A reward model from your own pairs: a sequence-classification folder, which RL loads with\n"
    "reward.name=reward_model reward.options.model=FOLDER.",
    "  python -m engine.main_reward_model data.train_files=pairs.jsonl data.val_size=200 \\\n"
    "      model.path=/models/Qwen2.5-0.5B-Instruct reward_model.optim.lr=1e-5 \\\n"
    "      run.default_local_dir=out",
    RewardModelRunConfig,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    return run_program(_PROGRAM.run, arguments)


if __name__ == "__main__":
    sys.exit(main())
