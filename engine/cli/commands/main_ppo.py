"""`python -m engine.main_ppo key=value ...`: reinforcement learning from the command line."""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from engine.cli.forms import PPO, check_names
from engine.cli.program import run_program
from engine.cli.settings import RunConfig

_USAGE = """\
python -m engine.main_ppo [FILE.yaml] [--verl-defaults] [--print-config] [--dry-run] [key=value ...]

Reinforcement learning on your own prompts: from a Hugging Face folder to a better one.

  python -m engine.main_ppo data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=/models/Qwen2.5-0.5B actor_rollout_ref.actor.optim.lr=1e-6 \\
      algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.total_epochs=1

  FILE.yaml        YAML with the same keys, as sections or dotted; key=value overrides it. The
                   same as --config FILE, or Hydra's --config-path and --config-name
  --verl-defaults  settings that are not given are as in verl's configuration, not as listed
                   here; python -m engine.trainer.main_ppo does the same
  --print-config   print the configuration as --config reads it, and exit
  --dry-run        check settings and data; print the configuration, batches, placement, and an
                   estimate of memory and time (for another GPU: --gpu H100), and exit
  --help [WORD]    print this, or the keys that have WORD in name or meaning, and exit

Keys are verl's where verl has the same thing. Each setting also has this project's own path (as in
engine/config/), with or without `rl.` in front: rl.actor.optim.lr, actor.optim.lr.
Values are YAML: true, 1e-6, [a,b], null (the default). The defaults are this project's, made for
small models, and not verl's: give a pretrained model its own learning rate.
Exit status: 0; 1 for a run that failed; 2 for wrong input; 130 for Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    verl_defaults, gpu = {"action": "store_true"}, {"default": ""}
    return run_program(PPO, _USAGE, arguments, _run, verl_defaults=verl_defaults, gpu=gpu)


def _run(config: RunConfig, options: Namespace) -> None:
    if config.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for any
    check_names(config)
    # torch and ray take seconds; a wrong name needs neither
    from engine.cli.ppo_program import dry_run, run

    if options.dry_run:
        for line in dry_run(config, options.gpu):
            print(line)
    else:
        run(config)


if __name__ == "__main__":
    sys.exit(main())
