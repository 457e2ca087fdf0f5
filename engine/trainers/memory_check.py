"""Whether a run's models fit the GPUs that it would get: asked before anything starts.

Refused is only what is certain not to fit, however few tokens a micro-batch has: weights,
gradients, moments, and rollout's copy. The estimate is the planner's (`engine.planner.memory`).
"""

from __future__ import annotations

from dataclasses import replace

from engine.config import LoRAConfig, ParallelConfig, RLConfig
from engine.errors import ConfigError, EngineError, PlacementError
from engine.parallel.layout import Layout
from engine.planner import Candidate, Cluster, Workload
from engine.planner.hardware import GIB
from engine.planner.memory import Memory, estimate
from engine.trainers.auto_placement import plan_for
from engine.trainers.workload import workload


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


def check_sft_memory(model_path: str, lora: LoRAConfig, dtype: str, gpu_memory: int) -> None:
    """Raise PlacementError where one GPU can't hold the warm start, which runs on one."""
    try:
        work = workload(
            RLConfig(),
            model_path=model_path,
            lora=lora,
            dtype=dtype,
            max_response_length=1,
            max_model_len=2,
        )
    except ConfigError:
        return
    need = _least(estimate(_without_rollout(work), Candidate(Layout()), gpu=True))
    if need > gpu_memory:
        raise PlacementError(
            f"sft can't fit: the warm start of {model_path} keeps {need / GIB:.0f} GiB of weights, "
            f"gradients and moments on one GPU of {gpu_memory / GIB:.0f}; set model.lora.rank to "
            "train adapters, or sft.skip to begin RL with the model as it is"
        )


def _least(memory: Memory) -> float:
    """Bytes that no size of micro-batch or cache makes fewer."""
    kept = memory.weights + memory.moments + memory.rollout
    return kept + memory.gradients


def _without_rollout(work: Workload) -> Workload:
    return replace(work, decodes=False, reference=False)


def _gpu_memory(cluster: Cluster) -> int:
    """Bytes of the smallest GPU."""
    return min(machine.gpu_memory for machine in cluster.machines if machine.gpus)
