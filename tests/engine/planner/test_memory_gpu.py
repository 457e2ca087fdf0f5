"""The memory estimate against what a device's allocator counts, phase by phase.

One rank is real. Of a layout of many it is one rank whose collectives move nothing
(torch's "fake" backend): what it allocates is what it would.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_engine import training_batch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.config import ActorConfig, LoRAConfig, SFTConfig
from engine.errors import DivergedError
from engine.models import open_model
from engine.parallel import process_groups
from engine.parallel.layout import Layout, ModelShape
from engine.planner.memory import Memory, estimate
from engine.planner.sizes import Candidate, Workload
from engine.runtime.policy_runtime import StartModel
from engine.runtime.sharded_model import ShardedModel
from engine.storage import weight_files
from engine.trainers.auto_placement import sft_memory, sft_workload
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext
from engine.workers.supervised import SFTWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, TOKENS = 8, 128
BUCKET = 1 << 20
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def one_thread_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", BUCKET)


@contextlib.contextmanager
def one_of(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the last rank of a layout, alone."""
    if layout.world_size == 1:
        yield
        return
    monkeypatch.setattr(process_groups, "_set_timeout", lambda group: None)
    rank, world = layout.world_size - 1, layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def estimated(layout: Layout, width: int) -> Memory:
    shape = ModelShape.of(Qwen2Config(**SHAPE))
    work = Workload(shape, ROWS, 1, width - 1, 1, 2.0, compute_bytes=2.0, decodes=False)
    return estimate(work, Candidate(layout, rollout_tp=layout.tp, tokens=TOKENS), gpu=True)


LAYOUTS = [Layout(), Layout(fsdp=8), Layout(tp=4), Layout(fsdp=4, tp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loading(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    with one_of(layout, monkeypatch):
        config = ActorConfig.model_validate({"parallel": layout.sizes}).parallel
        ranks = process_groups.Ranks.form(layout, "cuda")
        gc.collect()  # what another test leaves would count
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = ShardedModel(open_model(folder, "bfloat16"), ranks, config)
        kept = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        expected = estimated(layout, 16).weights
        assert kept == pytest.approx(expected, rel=0.1)
        assert peak <= kept + 2 * BUCKET
        del model


@pytest.mark.parametrize("layout", [Layout(), Layout(fsdp=8), Layout(tp=4)], ids=str)
def test_training(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    batch = training_batch(ROWS)
    values = {"parallel": layout.sizes, "max_tokens_per_micro_batch": TOKENS, "use_kl_loss": False}
    with one_of(layout, monkeypatch):
        gc.collect()  # what another test leaves would count
        before = torch.cuda.memory_allocated()
        worker = ActorWorker(
            WorkerContext("actor", layout.world_size - 1, layout.world_size, layout=layout),
            model_path=str(folder),
            config=ActorConfig.model_validate(values),
            temperature=1.0,
            total_steps=4,
            seed=0,
            dtype="bfloat16",
        )
        optimizer = worker.train_state.optimizer
        optimizer.zero_gradients()
        optimizer.step()  # makes the moments
        kept = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(DivergedError):  # nothing real comes from ranks that are not there
            worker.update(batch)
        peak = torch.cuda.max_memory_allocated() - before
        memory = estimated(layout, int(batch["attention_mask"].shape[1]))
        assert kept == pytest.approx(memory.weights + memory.moments, rel=0.05)
        assert 0.7 * peak <= memory.training <= 1.6 * peak, (peak, memory)
        close: Any = worker.close
        close()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4)], ids=str)
def test_the_warm_start(folder: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """The estimate with which a plan refuses a warm start is what one takes."""
    batch = training_batch(ROWS)
    width = int(batch["attention_mask"].shape[1])
    values = {"parallel": layout.sizes, "max_tokens_per_micro_batch": TOKENS, "packing": False}
    config = SFTConfig.model_validate(values | {"train_batch_size": ROWS})
    work = sft_workload(
        config,
        model_path=str(folder),
        lora=LoRAConfig(),
        dtype="bfloat16",
        max_response_length=1,
        max_model_len=width,
    )
    memory = sft_memory(work, config.parallel, TOKENS)
    with one_of(layout, monkeypatch):
        gc.collect()  # what another test leaves would count
        before = torch.cuda.memory_allocated()
        context = WorkerContext("sft", layout.world_size - 1, layout.world_size, layout=layout)
        start = StartModel(str(folder), "bfloat16")
        worker = SFTWorker(context, model=start, config=config, seed=0)
        worker.begin(4)
        worker.train_state.optimizer.zero_gradients()
        worker.train_state.optimizer.step()  # makes the moments
        kept = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(DivergedError):  # nothing real comes from ranks that are not there
            worker.update(batch)
        peak = torch.cuda.max_memory_allocated() - before
    assert kept == pytest.approx(memory.weights + memory.moments, rel=0.05)
    assert 0.7 * peak <= memory.training <= 1.6 * peak, (peak, memory)
