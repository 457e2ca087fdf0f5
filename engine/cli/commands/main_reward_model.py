"""`python -m engine.main_reward_model key=value ...`: a reward model from pairs of files."""

import sys
from functools import partial

from engine.cli.forms import REWARD_MODEL
from engine.cli.program import run_offline

_ABOUT = """\
A reward model from your own pairs: a sequence-classification folder, which RL loads with
reward.name=reward_model reward.options.model=FOLDER.

  python -m engine.main_reward_model data.train_files=pairs.jsonl data.val_size=200 \\
      model.path=/models/Qwen2.5-0.5B-Instruct reward_model.optim.lr=1e-5 \\
      run.default_local_dir=out"""


main = partial(run_offline, REWARD_MODEL, _ABOUT)

if __name__ == "__main__":
    sys.exit(main())
