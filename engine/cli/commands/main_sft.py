"""`python -m engine.main_sft key=value ...`: supervised fine-tuning on prompt/response files."""

import sys
from functools import partial

from engine.cli.forms import SFT
from engine.cli.program import run_offline

_ABOUT = """\
Supervised fine-tuning on your own rows of a prompt and a response (or `messages`): from a
Hugging Face folder to a better one, which `python -m engine.main_ppo` can start from.

  python -m engine.main_sft data.train_files=train.parquet data.val_files=test.parquet \\
      data.prompt_key=question data.response_key=answer model.path=/models/Qwen2.5-0.5B \\
      sft.optim.lr=1e-5 trainer.total_epochs=1 trainer.default_local_dir=out

Keys are verl's where verl has the same thing, and each setting has this project's own path as
well: optim.lr is sft.optim.lr."""


main = partial(run_offline, SFT, _ABOUT)

if __name__ == "__main__":
    sys.exit(main())
