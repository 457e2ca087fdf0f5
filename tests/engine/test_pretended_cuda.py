"""The code for CUDA devices, on one that is pretended: `tests/pretended_cuda`.

What can't be seen there: speed, kernels' rounding, NCCL, vLLM on a device, several devices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/engine/runtime/test_gpu.py",
    "tests/engine/rollout/test_native_gpu.py",
    "tests/engine/rollout/test_vllm_options_gpu.py",
    "tests/engine/models/test_packing.py",
    "tests/engine/planner/test_memory_gpu.py",
    "tests/engine/test_weight_transfer.py",
    "tests/engine/evaluation/test_evaluate_gpu.py",
    "tests/engine/rewards/test_reward_model_gpu.py",
    "tests/engine/serve/test_native_server_gpu.py",
    "tests/engine/trainers/test_devices_gpu.py",
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
        "tests/engine/runtime/test_hybrid_actor.py",
        "tests/engine/runtime/test_hybrid_actor.py",
    )


GPU_PROOF = {
    "engines": "native",
    "tests": "tests/engine/runtime/test_gpu.py,tests/engine/rollout/test_vllm_options_gpu.py",
    "pieces": "ceilings,update,decode,switch,sharded,qlora,memory,nccl,health,tests",
    "patience": 5,
    "limit-s": 850,
}


def test_gpu_proof_reports_what_it_measures_and_why_the_rest_failed(
    library: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import pretended_cuda\n")  # in every process
    options = ["--tiny", *(f"--{name}={value}" for name, value in GPU_PROOF.items())]
    variables = {
        "PRETENDED_CUDA": str(library),
        "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT}",
        "PYTEST_ADDOPTS": f"-k '{NEEDS_A_DEVICE}'",
    }
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_proof.py", f"--out={tmp_path}", *options],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report["machine"]["device"] == "pretended"
    pieces = {piece["name"]: piece for piece in report["pieces"]}
    failed = {name for name, piece in pieces.items() if piece["cause"]}
    assert failed == {"qlora", "nccl", "health"}, said
    assert "CPU-only version of bitsandbytes" in pieces["qlora"]["cause"]
    assert "PyTorch is a cpu build, cuda is expected" in pieces["health"]["cause"]
    assert "this PyTorch has no NCCL" in pieces["nccl"]["cause"]
    found = {figure["what"]: figure["value"] for p in pieces.values() for figure in p["figures"]}
    assert found["1M native, new memory"] == 0
    assert found["1M native, switch to reload"] > 1
    assert found["1M native-graphs, 2 × 4"] > 0
    assert found["1M update, short rows"] > 0
    assert found["1M as rank 0 of fsdp 8, peak memory"] > 0
    assert found["tests marked gpu, passed"] >= 8
    assert {what for what in found if what.endswith("planned over peak")} == {
        f"1M {phase}, planned over peak" for phase in ("loading", "training", "rollout")
    }
    table = (tmp_path / "gpu-report.md").read_text()
    assert table.startswith("### pretended\n")
    assert "| switch | 1M native, new memory | 0 bytes | 0 bytes | ok |" in table
    assert "| nccl | this PyTorch has no NCCL" in table


ROUND_TRIP = """
import nccl_round_trip

if __name__ == "__main__":
    found = nccl_round_trip.run(2, "gloo", "cpu", 1)
    assert len(found) == 6 and min(found.values()) > 0, found
"""


def test_the_round_trip_of_gpu_proof_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(ROUND_TRIP)
    variables = {"PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}"}
    run([sys.executable, str(tmp_path / "main.py")], variables)


def test_gpu_proof_without_a_gpu_is_one_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_proof.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU: PyTorch sees no CUDA or ROCm device")
    assert len(done.stderr.strip().splitlines()) == 1
