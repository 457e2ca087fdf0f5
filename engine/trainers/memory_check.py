"""Whether a run's models fit the GPUs that it would get: asked before anything starts.

Refused is only what is certain not to fit, however few tokens a micro-batch has: weights,
gradients, moments, and rollout's copy. The estimate is the planner's (`engine.planner.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.config import LoRAConfig, ParallelConfig, RLConfig, SFTConfig
from engine.errors import ConfigError, EngineError, PlacementError
from engine.parallel.layout import AXES, Layout
from engine.planner import Candidate, Cluster, Workload
from engine.planner.hardware import GIB
from engine.planner.memory import Memory, estimate, fits
from engine.trainers.auto_placement import plan_for
from engine.trainers.workload import workload

_RECOMPUTE, _OFFLOAD = {"activation_checkpointing": True}, {"offload_optimizer": True}


def check_rl_memory(
    config: RLConfig,
    cluster: Cluster,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the run keeps.

    The sentence has the layout that would fit. With `placement: auto` it is the planner's own.
    Models that it can't price are let through.
    """
    try:
        work = workload(
            config,
            model_path=model_path,
            lora=lora,
            dtype=dtype,
            max_response_length=max_response_length,
            max_model_len=max_model_len,
        )
    except ConfigError:
        return
    if config.trainer.placement == "auto":
        plan_for(config, work, cluster, lora)
        return
    parallel = config.actor.parallel
    candidate = Candidate(
        Layout.of(parallel),
        config.rollout.tensor_parallel_size,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
    )
    need, there = _least(estimate(work, candidate, gpu=True)), _gpu_memory(cluster)
    if need <= there:
        return
    unset = ParallelConfig(compute_dtype=parallel.compute_dtype)
    actor = config.actor.model_copy(update={"parallel": unset})
    trainer = config.trainer.model_copy(update={"placement": "auto", "pools": ()})
    free = config.model_copy(update={"actor": actor, "trainer": trainer})
    try:
        found = plan_for(free, work, cluster, lora).chosen.candidate
        instead = f"rl.actor.parallel {found.layout}"
        if found.memory_options != "-":
            instead += f" ({found.memory_options})"
        instead += f", rollout.tensor_parallel_size {found.rollout_tp} would"
    except EngineError:
        instead = f"no layout of {cluster} would: take more machines, or set model.lora.rank"
    raise PlacementError(
        f"rl can't fit: with rl.actor.parallel {candidate.layout} a GPU keeps {need / GIB:.0f} GiB "
        f"of weights, gradients, moments and rollout copy, and has {there / GIB:.0f}; {instead}"
    )


def check_sft_memory(
    config: SFTConfig,
    cluster: Cluster,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> None:
    """Raise PlacementError where a GPU of `cluster` can't hold what a rank of the warm start keeps.

    The sentence has the layout that would fit. Models that the planner can't price are let through.
    """
    try:
        work = sft_workload(
            config,
            model_path=model_path,
            lora=lora,
            dtype=dtype,
            max_response_length=max_response_length,
            max_model_len=max_model_len,
        )
    except ConfigError:
        return
    need, there = _trained(sft_memory(work, config.parallel)), _gpu_memory(cluster)
    if need <= there:
        return
    tried = _sharded(config.parallel, cluster.gpus)
    found = (one for one in tried if fits(sft_memory(work, one).peak, there))
    instead = next(map(_named, found), f"no fsdp layout of {cluster.gpus} GPUs")
    raise PlacementError(
        f"sft can't fit: with sft.parallel {Layout.of(config.parallel)} a GPU keeps "
        f"{need / GIB:.0f} GiB of weights, gradients and moments, and has {there / GIB:.0f}; "
        f"{instead} would; or set model.lora.rank to train adapters, or sft.skip to begin RL with "
        "the model as it is"
    )


def sft_workload(
    config: SFTConfig,
    *,
    model_path: str,
    lora: LoRAConfig,
    dtype: str,
    max_response_length: int,
    max_model_len: int,
) -> Workload:
    """One step of the warm start as sizes; raises ConfigError as `workload` does."""
    work = workload(
        RLConfig.model_validate({"actor": {"parallel": config.parallel}}),
        model_path=model_path,
        lora=lora,
        dtype=dtype,
        max_response_length=max_response_length,
        max_model_len=max_model_len,
    )
    rows = config.train_batch_size
    return replace(work, prompts=rows, completions=1, decodes=False, reference=False)


def sft_memory(work: Workload, parallel: ParallelConfig, tokens: int = 1) -> Memory:
    """What a rank needs for micro-batches of so many tokens; nothing is kept for rollout."""
    candidate = Candidate(
        Layout.of(parallel),
        tokens=tokens,
        offload_params=parallel.offload_params,
        offload_optimizer=parallel.offload_optimizer,
        activation_checkpointing=parallel.activation_checkpointing,
    )
    return replace(estimate(work, candidate, gpu=True), rollout=0.0)


def _sharded(parallel: ParallelConfig, gpus: int) -> Iterator[ParallelConfig]:
    """FSDP layouts of so many ranks: first what costs least time, the fewest shards of these."""
    plain = dict.fromkeys(AXES, 1)
    for more in ({}, _RECOMPUTE, _RECOMPUTE | _OFFLOAD):
        for n in (n for n in range(1, gpus + 1) if gpus % n == 0):
            yield parallel.model_copy(update=plain | {"dp": gpus // n, "fsdp": n} | more)


def _named(parallel: ParallelConfig) -> str:
    """E.g. "sft.parallel dp=2 fsdp=8 activation_checkpointing=true"."""
    flags = (name for name in (*_RECOMPUTE, *_OFFLOAD) if getattr(parallel, name))
    return " ".join(["sft.parallel", str(Layout.of(parallel)), *(f"{name}=true" for name in flags)])


def _trained(memory: Memory) -> float:
    """Bytes of a model in training that no size of micro-batch makes fewer."""
    return memory.weights + memory.gradients + memory.moments


def _least(memory: Memory) -> float:
    """Bytes that no size of micro-batch or cache makes fewer."""
    return _trained(memory) + memory.rollout


def _gpu_memory(cluster: Cluster) -> int:
    """Bytes of the smallest GPU."""
    return min(machine.gpu_memory for machine in cluster.machines if machine.gpus)
