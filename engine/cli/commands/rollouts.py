"""`python -m engine.rollouts FOLDER`: the samples of a run as a page, as `engine.samples` shows it."""

import sys

from engine.samples.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
