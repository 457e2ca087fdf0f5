"""HybridFlyte's post-training engine: dataflows over roles, on one process or many.

Importing it loads nothing heavy; the one thing it does is to keep torch's threads from spinning.
"""

import os

# Threads of OpenMP wait for each other by spinning for a long time. On a machine with other work
# that turns milliseconds into seconds; with a short spin they sleep soon, and lose nothing when
# the machine is idle. It counts only when set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
