"""`python -m engine.main_preference key=value ...`: DPO, its relatives and KTO from files."""

import sys
from functools import partial

from engine.cli.forms import PREFERENCE
from engine.cli.program import run_offline

_ABOUT = """\
Preference learning on your own pairs, or completions with a label: from a Hugging Face
folder to a better one.

  python -m engine.main_preference data.train_files=pairs.jsonl data.val_size=200 \\
      model.path=/models/Qwen2.5-0.5B-Instruct preference.loss=sigmoid \\
      preference.beta=0.1 preference.optim.lr=5e-7 run.default_local_dir=out"""


main = partial(run_offline, PREFERENCE, _ABOUT)

if __name__ == "__main__":
    sys.exit(main())
