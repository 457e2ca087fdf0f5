"""`python -m engine.trainer.main_ppo`: `engine.main_ppo` with verl's defaults."""

import sys
from collections.abc import Sequence

from engine.cli.commands import main_ppo


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    return main_ppo.main(["--verl-defaults", *words])


if __name__ == "__main__":
    sys.exit(main())
