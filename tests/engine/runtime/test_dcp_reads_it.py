"""torch.distributed.checkpoint's own reader loads what our ranks saved, under other shardings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_ranks import run_ranks
from test_elastic_state import save, worker
from tiny_engine import save_family
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from engine.checkpoint.format import read_role_states
from engine.runtime.train_state import load_weights

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
