"""Training state on another layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import save_family, training_batch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from engine.checkpoint import CheckpointStore
from engine.checkpoint.format import read_role_states
from engine.config import ActorConfig, CriticConfig, LoRAConfig
from engine.controller.worker_host import shard_rows
from engine.models import load_model
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_box, local_tensor
from engine.parallel.shard_maps import Box
from engine.runtime.optimizer import MASTER
from engine.runtime.train_state import load_weights
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.role import WorkerContext

ROWS, BEFORE, AFTER = 8, 1, 1


OPTIM = {"lr": 1e-2, "warmup_ratio": 0.3, "schedule": "cosine"}


def worker(
    folder: str,
    role: str,
    parallel: dict[str, Any],
    lora: int,
    dtype: str = "float32",
    **loss: float,
) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    values = {"optim": OPTIM, "parallel": parallel}
    config = ActorConfig.model_validate(values | {"use_kl_loss": False} | loss)
    layout = Layout.of(config.parallel)
    context = WorkerContext(role, rank, world, layout=layout)
    common: dict[str, Any] = {"model_path": folder, "total_steps": 8, "seed": 0, "dtype": dtype}
    if role == "critic":
        critic = CriticConfig.model_validate(values)
        return CriticWorker(context, config=critic, parallel=config.parallel, **common)
    return ActorWorker(
        context, config=config, temperature=1.0, lora=LoRAConfig(rank=lora), **common
    )


def train(one: Any, begin: int, count: int) -> list[dict[str, float]]:
    share = one.context.layout.data_shard(one.context.rank)
    batches = [training_batch(ROWS, seed=step) for step in range(begin, begin + count)]
    return [one.update(shard_rows(batch, share)[0]) for batch in batches]


def first_half(
    folder: str,
    draft: str,
    role: str,
    parallel: dict[str, Any],
    lora: int,
    dtype: str = "float32",
) -> None:
    one = worker(folder, role, parallel, lora, dtype)
    train(one, 0, BEFORE)
    one.save_state(draft)
    one.wait_saved()


def second_half(
    folder: str, saved: str, role: str, parallel: dict[str, Any], lora: int
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    one = worker(folder, role, parallel, lora)
    one.load_state(saved)
    metrics = train(one, BEFORE, AFTER)
    return metrics, {name: t.clone() for name, t in one.sharded.full_tensors()}


def whole(
    folder: str, role: str, lora: int, parallel: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    one = worker(folder, role, parallel, lora)
    metrics = train(one, 0, BEFORE + AFTER)[BEFORE:]
    return metrics, {name: t.clone() for name, t in one.sharded.full_tensors()}


def size(parallel: dict[str, Any]) -> int:
    return Layout(**parallel).world_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen2", tmp_path_factory.mktemp("elastic")))


def save(
    folder: str,
    root: Path,
    role: str,
    parallel: dict[str, Any],
    lora: int = 0,
    dtype: str = "float32",
) -> tuple[str, int]:
    """A checkpoint's folder, and the bytes of tensors in it."""
    store = CheckpointStore(root)
    draft = store.begin(BEFORE)
    draft.roles = {role: size(parallel)}
    run_ranks(size(parallel), first_half, folder, draft.folder, role, parallel, lora, dtype)
    return store.commit(draft).folder, draft.tensor_bytes


Case = tuple[str, dict[str, Any], list[dict[str, Any]], int]


CASES: list[Case] = [
    ("actor", {"fsdp": 4}, [{}, {"tp": 2}], 0),
    ("actor", {"fsdp": 2, "tp": 2}, [{"pp": 2}], 0),
    ("critic", {"fsdp": 2}, [{"tp": 2}], 0),
]


MORE: list[Case] = [
    ("actor", {"fsdp": 4}, [{"fsdp": 2}], 0),
    ("critic", {"fsdp": 4}, [{"tp": 2}], 0),
    ("actor", {"pp": 2, "tp": 2}, [{"fsdp": 2, "sp": 2}], 0),
    ("actor", {}, [{"dp": 2, "fsdp": 2}], 0),
    ("actor", {"fsdp": 2, "tp": 2}, [{"dp": 2}], 4),
]


@pytest.mark.parametrize(("role", "wrote", "reads", "lora"), and_slow(CASES, MORE))
def test_another_layout_goes_on_where_one_stopped(
    folder: str,
    tmp_path: Path,
    role: str,
    wrote: dict[str, Any],
    reads: list[dict[str, Any]],
    lora: int,
) -> None:
    metrics, weights = run_ranks(1, whole, folder, role, lora, {})[0]
    saved, written = save(folder, tmp_path, role, wrote, lora)
    results = [
        result
        for parallel in reads
        for result in run_ranks(size(parallel), second_half, folder, saved, role, parallel, lora)
    ]
    for found, tensors in results:
        for step, wanted in enumerate(metrics):
            for name, value in wanted.items():
                assert found[step][name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
        for name, tensor in weights.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=2e-4)
    trained = [t for n, t in weights.items() if not lora or ".lora_" in n]
    # Weights and both moments once, whatever number of ranks has a copy; counts and RNGs besides.
    least = 3 * sum(t.nbytes for t in trained)
    assert least <= written < least + 40_000 * size(wrote)


def test_the_same_layout_goes_on_bit_for_bit(folder: str, tmp_path: Path) -> None:
    parallel = {"fsdp": 2}
    saved, _ = save(folder, tmp_path, "actor", parallel)
    resumed = run_ranks(2, second_half, folder, saved, "actor", parallel, 0)
    whole_run = run_ranks(2, whole, folder, "actor", 0, parallel)
    for (ours, tensors), (theirs, others) in zip(resumed, whole_run, strict=True):
        assert ours == theirs
        assert all(torch.equal(t, others[name]) for name, t in tensors.items())


def masters_after_loading(
    folder: str, saved: str, parallel: dict[str, Any]
) -> dict[str, tuple[Box, Tensor, Tensor]]:
    """This rank's box, master and working weight of each parameter; then trains a step."""
    one = worker(folder, "actor", parallel, 0, "bfloat16")
    one.load_state(saved)
    moments = one.train_state.optimizer.state_dict()["moments"]
    found = {
        name: (local_box(p), moments[name][MASTER].clone(), local_tensor(p).clone())
        for name, p in one.sharded.module.named_parameters()
    }
    train(one, BEFORE, 1)
    return found


@pytest.mark.parametrize(
    ("wrote", "reads"), and_slow([({"fsdp": 2}, {})], [({}, {"fsdp": 2}), ({"tp": 2}, {"dp": 2})])
)
def test_masters_are_resharded_bit_for_bit(
    folder: str, tmp_path: Path, wrote: dict[str, Any], reads: dict[str, Any]
) -> None:
    saved, _ = save(folder, tmp_path, "actor", wrote, dtype="bfloat16")
    before = run_ranks(size(wrote), masters_after_loading, folder, saved, wrote)
    after = run_ranks(size(reads), masters_after_loading, folder, saved, reads)
    shapes = {name: tuple(p.shape) for name, p in load_model(folder).named_parameters()}
    ours, theirs = whole_masters(before, shapes), whole_masters(after, shapes)
    assert all(torch.equal(ours[name], theirs[name]) for name in shapes)
    below = [not torch.equal(t, t.bfloat16().float()) for t in ours.values()]
    assert all(below)  # each has bits that bfloat16 lacks


def whole_masters(
    ranks: list[dict[str, tuple[Box, Tensor, Tensor]]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for rank in ranks:
        for name, (box, master, working) in rank.items():
            assert torch.equal(working, master.to(torch.bfloat16))
            where = zip(box.offset, box.size, strict=True)
            found[name][tuple(slice(start, start + n) for start, n in where)] = master
    return found


def test_no_rank_writes_what_another_has(folder: str, tmp_path: Path) -> None:
    saved, _ = save(folder, tmp_path, "actor", {"dp": 2, "fsdp": 2})
    ranks = read_role_states(saved, "actor")
    counts = [len(rank.get("boxes")) for rank in ranks]
    assert counts[0] == counts[1] > 0
    assert counts[2:] == [0, 0]  # the second replica


def reduced(folder: str, parallel: dict[str, Any], lora: int, dtype: str) -> dict[str, float]:
    """The metrics of a second step, by a loss that hardly clips: rounding would decide what it
    clips, and a token is much of so small a batch."""
    loss = {"clip_ratio_low": 0.99, "clip_ratio_high": 1e3, "clip_ratio_c": 1e3}
    return train(worker(folder, "actor", parallel, lora, dtype, **loss), 0, 2)[1]


BFLOAT16: tuple[str, int] = ("bfloat16", 0)


@pytest.mark.parametrize(
    ("parallel", "dtype", "lora"),
    and_slow(
        [({"fsdp": 2}, "bfloat16", 4)],
        [({axis: 2}, *BFLOAT16) for axis in ("dp", "fsdp", "sp", "tp", "pp")]
        + [({"fsdp": 2}, "float16", 0)]
        + [
            ({"fsdp": 2, f"offload_{what}": True}, *BFLOAT16)
            for what in ("optimizer", "params", "policy")
        ],
    ),
)
def test_reduced_weights_train_on_ranks_as_on_one(
    folder: str, parallel: dict[str, Any], dtype: str, lora: int
) -> None:
    [wanted] = run_ranks(1, reduced, folder, {}, lora, dtype)
    for found in run_ranks(2, reduced, folder, parallel, lora, dtype):
        assert found["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=0.1)
        assert found["actor/ppo_kl"] == pytest.approx(wanted["actor/ppo_kl"], rel=0.1)


WROTE = {"fsdp": 2, "tp": 2}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen2", tmp_path_factory.mktemp("dcp")))


@pytest.fixture(scope="module")
def saved(start: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of four ranks, fsdp 2 times tp 2, after two steps."""
    return save(start, tmp_path_factory.mktemp("run"), "actor", WROTE)[0]


@pytest.fixture(scope="module")
def weights(start: str, saved: str) -> dict[str, Tensor]:
    """The whole model as our own loader reads it."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    load_weights(model, read_role_states(saved, "actor"))
    return dict(model.named_parameters())


def test_one_process_reads_weights_moments_and_counts(
    start: str, saved: str, weights: dict[str, Tensor]
) -> None:
    one = worker(start, "actor", {}, 0)
    one.load_state(saved)
    wanted = one.state_dict()
    got: dict[str, Any] = {
        "model": {name: torch.full_like(t, torch.nan) for name, t in weights.items()},
        "moments": {
            name: {key: torch.full_like(t, torch.nan) for key, t in moments.items()}
            for name, moments in wanted["moments"].items()
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group was set up
        dcp.load({"actor": got}, storage_reader=HuggingFaceStorageReader(saved))
    assert got["model"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(got["model"][name], tensor), name
        for key, moment in wanted["moments"][name].items():
            assert torch.equal(got["moments"][name][key], moment), (name, key)


def into_fsdp(start: str, saved: str) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = dict(model.named_parameters())  # a tied head is saved once
    assert all(isinstance(t, DTensor) for t in state.values())
    dcp.load({"actor": {"model": state}}, storage_reader=HuggingFaceStorageReader(saved))
    return {name: p.full_tensor().detach() for name, p in state.items()}


def test_fsdp2_ranks_of_another_number_read_their_shards(
    start: str, saved: str, weights: dict[str, Tensor]
) -> None:
    for found in run_ranks(3, into_fsdp, start, saved):
        assert found.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())


def test_each_ranks_own_tensors_have_names_of_their_own(saved: str) -> None:
    found = HuggingFaceStorageReader(saved).read_metadata().state_dict_metadata
    assert {f"actor.rank{rank}.rng.minibatches" for rank in range(4)} <= found.keys()
    whole = found["actor.model.model.embed_tokens.weight"]
    assert len(whole.chunks) == 4  # fsdp 2 times tp 2, each box once
