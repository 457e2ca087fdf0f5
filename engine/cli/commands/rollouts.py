"""Show the samples of a run: `python -m engine.rollouts FOLDER`, as `engine.samples` does."""

import sys

from engine.samples.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
