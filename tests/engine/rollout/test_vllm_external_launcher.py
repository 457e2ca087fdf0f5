"""vLLM over the trainer's own gloo ranks: an exchange writes straight into its parameters."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from rollout_models import CONTEXT, build, make_prompts, reference_log_probs
from torch import nn

from engine.config import ParallelConfig
from engine.errors import ConfigError, RolloutError
from engine.parallel.exchange import Exchange
from engine.parallel.layout import Layout, ModelShape, rollout_layout
from engine.parallel.module_shards import gather_shard_map, local_tensors
from engine.parallel.process_groups import Ranks
from engine.parallel.reshard import plan_reshard
from engine.parallel.shard_maps import ShardMap, rollout_shard_map
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.vllm import VllmEngine
from engine.runtime.sharded_model import ShardedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
START_S = 240.0  # importing vLLM on a busy machine takes most of it
PROMPTS = make_prompts(3, seed=2)
PARAMS = SamplingParams(n=2, max_new_tokens=10, seed=3)
OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": CONTEXT, "kv_cache_memory_mb": 32}


@torch.no_grad()
def change(model: nn.Module) -> None:
    """What stands for an optimizer step: the same on a whole model and on shares of it."""
    for tensor in local_tensors(model).values():
        tensor.mul_(1.02)


def errors(model: nn.Module, completions: list[Completion]) -> float:
    """The largest distance of a log-prob from transformers'."""
    return max(
        float(
            (reference_log_probs(model, PROMPTS[c.prompt_index], c.token_ids))
            .sub(torch.tensor(c.log_probs))
            .abs()
            .max()
        )
        for c in completions
    )


def swapped(shard_map: ShardMap) -> ShardMap:
    """The same shard_map with the ranks 0 and 1 exchanged."""
    parameters = {
        name: replace(
            one, shards=tuple(replace(h, ranks=tuple(1 - r for r in h.ranks)) for h in one.shards)
        )
        for name, one in shard_map.parameters.items()
    }
    return replace(shard_map, parameters=parameters)


def serve(family: str, parallel: dict[str, int], tp: int, reverse: bool = False) -> dict[str, Any]:
    """Bring a sharded policy's slices into vLLM's parameters twice, and decode each time."""
    rank, whole = dist.get_rank(), build(family)
    layout = Layout(**parallel)
    sharded = ShardedModel(
        build(family), Ranks.form(layout, "cpu"), ParallelConfig.model_validate(parallel)
    )
    to = rollout_layout(layout, tp=tp)
    groups = [group[::-1] for group in to.tp_groups()] if reverse else to.tp_groups()
    with torch.device("meta"):
        shape = build(family)
    engine = VllmEngine(
        shape, tensor_parallel_size=tp, rank_groups=groups, load=False, dtype="float32", **OPTIONS
    )
    result: dict[str, Any] = {"errors": [], "received": [], "refused": []}
    try:
        _refused(engine, result)
        source = gather_shard_map(sharded.module, rename=sharded.full_name)
        wanted = rollout_shard_map(
            source.shapes, to, ModelShape.of(whole.config), engine.dtype, fused=True
        )
        if reverse:
            wanted = swapped(wanted)
        resharding = plan_reshard(source, wanted)
        source = local_tensors(sharded.module, rename=sharded.full_name)
        exchange = Exchange(resharding.for_rank(rank), source, engine.parameters())
        pointers = [tensor.data_ptr() for tensor in engine.parameters().values()]
        for version in (1, 2):
            change(sharded.module)
            change(whole)
            engine.begin_update(version)
            _refused(engine, result)
            result["received"].append(exchange.run().received)
            engine.finish_update(version)
            done = engine.generate(PROMPTS, PARAMS)
            result["errors"].append(errors(whole, done))
            assert {c.policy_version for c in done} == {version}
        result["tokens"] = [c.token_ids for c in done]
        result["planned"] = int(resharding.received[rank])
        assert pointers == [tensor.data_ptr() for tensor in engine.parameters().values()]
    finally:
        engine.close()
    assert dist.is_initialized(), "the trainer's process group outlives vLLM"
    dist.barrier()
    return result


def _refused(engine: VllmEngine, result: dict[str, Any]) -> None:
    try:
        engine.generate(PROMPTS, PARAMS)
    except RolloutError as error:
        result["refused"].append(str(error))


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(result["errors"]) < 1e-4
        assert result["received"] == [result["planned"]] * 2
        assert "no weights yet" in result["refused"][0]
        assert "update to policy version 1 did not finish" in result["refused"][1]
        assert len(result["refused"]) == 3
        assert result["tokens"] == results[0]["tokens"]


@pytest.mark.parametrize(
    ("family", "parallel", "tp"), [("qwen2", {"fsdp": 2}, 2), ("llama", {"tp": 2}, 1)]
)
def test_an_exchange_writes_into_vllms_own_parameters(
    family: str, parallel: dict[str, int], tp: int
) -> None:
    results = run_ranks(2, serve, family, parallel, tp, timeout_s=START_S)
    check(results)
    assert all(result["planned"] > 0 for result in results)


def test_a_group_may_have_its_ranks_in_any_order() -> None:
    results = run_ranks(2, serve, "qwen3", {"tp": 2}, 2, True, timeout_s=START_S)
    check(results)


def gather(tp: int) -> list[float]:
    """Serve an FSDP2 model as it is: each parameter is gathered when its turn comes."""
    whole, layout = build("qwen2"), Layout(fsdp=2)
    sharded = ShardedModel(build("qwen2"), Ranks.form(layout, "cpu"), ParallelConfig(fsdp=2))
    groups = [[0, 1]] if tp == 2 else [[0], [1]]
    engine = VllmEngine(sharded.module, tensor_parallel_size=tp, rank_groups=groups, **OPTIONS)
    try:
        found = [errors(whole, engine.generate(PROMPTS, PARAMS))]
        change(sharded.module)
        change(whole)
        engine.update_weights(sharded.module, 1)
        found.append(errors(whole, engine.generate(PROMPTS, PARAMS)))
        change(sharded.module)
        change(whole)
        engine.update_from(sharded.full_tensors(), 2)
        found.append(errors(whole, engine.generate(PROMPTS, PARAMS)))
    finally:
        engine.close()
    return found


def test_sharded_models_are_gathered_tensor_by_tensor() -> None:
    for found in run_ranks(2, gather, 2, timeout_s=START_S):
        assert max(found) < 1e-4


def in_process() -> list[float]:
    """Each rank of a data-parallel policy has an engine of its own on its own storage."""
    model = build("qwen2")
    engine = VllmEngine(model, **OPTIONS)
    try:
        assert engine.shares_storage
        found = [errors(model, engine.generate(PROMPTS, PARAMS))]
        change(model)
        engine.update_weights(model, 1)
        found.append(errors(model, engine.generate(PROMPTS, PARAMS)))
    finally:
        engine.close()
    dist.barrier()
    return found


def test_data_parallel_ranks_share_storage_each_on_its_own() -> None:
    for found in run_ranks(2, in_process, timeout_s=START_S):
        assert max(found) < 1e-4


def wrong_groups() -> str:
    try:
        VllmEngine(build("qwen2"), tensor_parallel_size=1, rank_groups=[[0], [1], [2]], **OPTIONS)
    except ConfigError as error:
        return str(error)
    return ""


def test_groups_that_are_not_the_process_groups_ranks_are_refused() -> None:
    said = run_ranks(2, wrong_groups, timeout_s=START_S)[0]
    assert "are 3 ranks, the default process group has 2" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("parallel", "tp"), [({"fsdp": 2, "tp": 2}, 4), ({"pp": 2, "tp": 2}, 2), ({"fsdp": 4}, 2)]
)
def test_four_ranks(parallel: dict[str, int], tp: int) -> None:
    """With tp=4 key heads are on several ranks, and a group is not in the order of its ranks."""
    check(run_ranks(4, serve, "qwen2" if tp == 2 else "llama", parallel, tp, timeout_s=560.0))
