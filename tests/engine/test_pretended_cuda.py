"""The code for CUDA devices, on one that is pretended: `tests/pretended_cuda`.

What can't be seen there: speed, kernels' rounding, NCCL, vLLM on a device, several devices.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/engine/runtime/test_gpu.py",
    "tests/engine/rollout/test_native_gpu.py",
    "tests/engine/models/test_packing.py",
    "tests/engine/planner/test_memory_gpu.py",
    "tests/engine/weight_transfer/test_delta.py",
    "tests/engine/evaluation/test_evaluate_gpu.py",
    "tests/engine/rewards/test_reward_model_gpu.py",
    "tests/engine/serve/test_native_server_gpu.py",
]
# NCCL, two clocks, and storage that FSDP resizes.
NEEDS_A_DEVICE = (
    "not shard_decodes and not graphs_pay and not is_fast and not (test_training and fsdp)"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretended")
    made = run([sys.executable, "-m", "pretended_cuda", str(folder)], {})
    return Path(made.splitlines()[-1])


def run(command: list[str], variables: dict[str, str]) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"} | variables
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def on_the_device(library: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "pretended_cuda", "-p", "no:cacheprovider"]
    return run([*command, *arguments], {"PRETENDED_CUDA": str(library)})


STRICT = """
import pretended_cuda, torch
import pytest

assert torch.cuda.is_available()
x = torch.arange(6.0, device="cuda")
assert x.device == torch.device("cuda", 0) and x.sum().item() == 15
before = torch.cuda.memory_allocated()
y = x.repeat(1000)
assert torch.cuda.memory_allocated() - before == y.nbytes
with pytest.raises(RuntimeError, match="on the same device"):
    x + torch.ones(6)
with pytest.raises(TypeError, match="can't convert cuda"):
    x.numpy()
with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
    torch.rand(2, device="cuda", generator=torch.Generator())
for waits in (lambda: x.sum().item(), lambda: x[x > 2], lambda: x.add_(torch.ones(6).cuda())):
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        waits()
graph, times = torch.cuda.CUDAGraph(), 2
with torch.cuda.graph(graph):
    found = (times * x)[1:].cumsum(0)
x.fill_(1.0)
times = 3
graph.replay()
assert found.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0], "new values at old addresses, and no Python"
"""


def test_it_refuses_what_a_device_refuses(library: Path) -> None:
    run([sys.executable, "-c", STRICT], {"PRETENDED_CUDA": str(library)})


def test_the_tests_for_a_device_pass_on_it(library: Path) -> None:
    """bfloat16, graphs, packed attention, one storage, memory that comes back, delta sync."""
    said = on_the_device(library, "-m", "gpu", "-k", NEEDS_A_DEVICE, *TESTS)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= 20
    assert "failed" not in said


def test_trainers_and_checkpoints_work_on_it(library: Path) -> None:
    """Programs that never name a device: they take the one that is there."""
    on_the_device(
        library,
        "tests/engine/trainers/test_every_algorithm.py",
        "tests/engine/workers/test_worker_state.py",
        "tests/engine/runtime/test_generate.py",
        "tests/engine/runtime/test_one_storage.py",
    )
