"""Kernels for GPUs give what torch's operations give; here Triton interprets them on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).with_name("interpreted_kernels.py")

pytest.importorskip("triton")


def interpret(*names: str) -> None:
    """Run cases in a process of their own: Triton reads the variable when it is imported."""
    places = [str(ROOT), str(ROOT / "tests/engine"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(CASES), *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_the_heads_statistics_and_gradients_are_those_of_logits() -> None:
    interpret("statistics", "head")


def test_a_decode_steps_kernels_are_its_torch_operations() -> None:
    interpret("add_norm", "rotate_and_store", "silu_product", "decoder")


def test_sampling_by_masses_of_blocks_draws_what_sampling_by_probabilities_draws() -> None:
    interpret("sampling")


def test_ligers_forwards_are_transformers() -> None:
    pytest.importorskip("liger_kernel")
    interpret("liger")
