"""What the start of a process loads, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

LOAD = """
import engine, sys
assert "torch" not in sys.modules and "transformers" not in sys.modules
import engine.workers.actor
print(*[name for name in ("sklearn", "scipy.optimize", "vllm", "mlflow") if name in sys.modules])
from transformers import GenerationMixin
from transformers.generation.candidate_generator import AssistedCandidateGenerator
"""


def test_a_worker_loads_no_library_that_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
