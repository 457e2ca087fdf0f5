"""What the start of a process loads, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = """
import engine, sys
import workflows.launch_plans  # what each command of pyflyte loads
print(*{"torch", "transformers", "mlflow", "kubernetes"} & sys.modules.keys())
"""

# What is loaded grows: each line may have loaded nothing that it names.
WORKER = """
import sys
from engine.console import quiet
quiet()
from engine.data.tokenizer import load_tokenizer, train_tokenizer
import engine.data.collate, engine.workers.reward_worker
from engine.controller.launch import ray_session
train_tokenizer(["3+4=7"], 512).save_pretrained(sys.argv[1])
assert load_tokenizer(sys.argv[1]).decode(load_tokenizer(sys.argv[1])("3+4").input_ids) == "3+4"
with ray_session("local"):
    pass
unused = {"torch._dynamo", "transformers.modeling_utils", "sympy", "pandas", "pyarrow", "ray"}
print(*unused & sys.modules.keys())
import engine.trainers.offline  # a warm start from rows in memory reads no files
print(*{"pandas", "pyarrow", "ray", "mlflow"} & sys.modules.keys())
import engine
assert "HybridActor" in dir(engine)
from engine import *
assert HybridActor.__module__ == "engine.runtime.hybrid_actor"
try:
    engine.Nothing
except AttributeError as error:
    assert "'engine' has no attribute 'Nothing'" in str(error)
else:
    raise AssertionError("a name that isn't there")
import engine.workers.actor, engine.workers.rollout_worker
import engine.rollout.vllm, engine.rollout.native
unused = ("sklearn", "scipy.optimize", "boto3", "vllm", "mlflow")
print(*[name for name in unused if name in sys.modules])
from transformers import GenerationMixin
from transformers.generation.candidate_generator import AssistedCandidateGenerator
import mlflow, ray, transformers  # silent, all of them
"""


def printed(code: str, *arguments: str) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


# What a rerun runs although its stages are cached: the promotion, and the report.
RERUN = """
import sys
from engine.console import quiet
quiet()
from engine.stages import evaluation, promotion
print(*{"torch", "transformers", "ray"} & sys.modules.keys())
"""


def test_importing_engine_is_light() -> None:
    assert printed(COMMAND) == ""


def test_an_unchanged_rerun_loads_no_torch() -> None:
    assert printed(RERUN) == ""


def test_a_process_loads_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    """One that scores, then one that trains on rows, then one with a model; and it is quiet."""
    assert printed(WORKER, str(tmp_path)) == ""
