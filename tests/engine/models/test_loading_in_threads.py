"""Models made side by side in one process, as `placement=local` makes its rollout workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.models import load_model, load_policy_model

pytestmark = pytest.mark.usefixtures("one_thread")

THREADS = 4


def test_threads_that_load_leave_each_other_alone(tiny_folder: Path) -> None:
    wanted = {name: load_model(tiny_folder, name) for name in ("float32", "bfloat16")}
    together = threading.Barrier(THREADS)

    def load(index: int) -> list[tuple[str, PreTrainedModel]]:
        together.wait(60)
        names = ["float32", "bfloat16"] * 6
        return [(name, load_model(tiny_folder, name)) for name in names[index % 2 :]]

    with ThreadPoolExecutor(THREADS) as pool:
        for loaded in pool.map(load, range(THREADS)):
            for name, model in loaded:
                for ours, theirs in zip(
                    model.state_dict().values(), wanted[name].state_dict().values(), strict=True
                ):
                    assert ours.dtype == theirs.dtype
                    assert torch.equal(ours, theirs)
    assert torch.get_default_dtype() == torch.float32


def test_adapters_are_drawn_alone_and_the_generator_is_given_back(tiny_folder: Path) -> None:
    lora = LoRAConfig(rank=4)
    wanted = load_policy_model(tiny_folder, "float32", lora, 3).state_dict()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    together = threading.Barrier(THREADS)

    def load(index: int) -> dict[str, torch.Tensor]:
        together.wait(60)
        for _ in range(3):
            found = load_policy_model(tiny_folder, "float32", lora, 3).state_dict()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(load, range(THREADS)):
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert torch.equal(torch.get_rng_state(), before)
