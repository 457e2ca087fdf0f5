"""What the start of a process loads, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

LOAD = """
import engine, sys
import workflows.launch_plans  # what each command of pyflyte loads
assert not {"torch", "transformers", "mlflow", "kubernetes"} & sys.modules.keys()
assert "HybridActor" in dir(engine)
from engine import *
assert HybridActor.__module__ == "engine.runtime.hybrid_actor"
try:
    engine.Nothing
except AttributeError as error:
    assert "'engine' has no attribute 'Nothing'" in str(error)
else:
    raise AssertionError("a name that isn't there")
import engine.workers.actor, engine.workers.rollout, engine.rollout.vllm, engine.rollout.native
unused = ("sklearn", "scipy.optimize", "boto3", "vllm", "mlflow")
print(*[name for name in unused if name in sys.modules])
from transformers import GenerationMixin
from transformers.generation.candidate_generator import AssistedCandidateGenerator
"""


def test_importing_engine_is_light_and_a_worker_loads_no_library_that_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
