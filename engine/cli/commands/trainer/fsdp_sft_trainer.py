"""`python -m engine.trainer.fsdp_sft_trainer`: `engine.main_sft` under verl's name."""

import sys

from engine.cli.commands.main_sft import main

if __name__ == "__main__":
    sys.exit(main())
