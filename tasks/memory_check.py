"""Whether a pipeline's models fit a profile's GPUs, as far as the kind of GPU is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.config import ParallelConfig, PipelineConfig
from tasks.profiles import Profile

if TYPE_CHECKING:
    from engine.planner import Cluster
    from engine.planner.hardware import Device


def check_memory(config: PipelineConfig, profile: Profile, *, trains: bool = True) -> None:
    """Raise PlacementError for an evaluation that can't fit, or what it `trains` before.

    A model from scratch, and a profile that names no known kind of GPU, are let through.
    """
    if not (profile.accelerator and config.model.path):
        return
    from engine.evaluation.layout import check_evaluation_memory
    from engine.models import text_config
    from engine.trainers.auto_placement import gpu_kinds

    machines = cluster(profile, gpu_kinds(config.rl))
    each = machines.machines[0].gpu_memory
    if not each:
        return
    if trains:
        _check_training(config, machines)
    check_evaluation_memory(config.evaluate, text_config(config.model.path), each, profile.gpus)


def _check_training(config: PipelineConfig, machines: Cluster) -> None:
    """Of the warm start and RL."""
    from engine.models import resolve_dtype, resolve_lora, text_config
    from engine.trainers.memory_check import check_rl_memory, check_sft_memory

    model, data, path = config.model, config.data, config.model.path
    lora, width = resolve_lora(path, model.lora), text_config(path).hidden_size

    def dtype(parallel: ParallelConfig) -> str:
        asked = parallel.compute_dtype
        return resolve_dtype(model.dtype, width, gpu=True, compute_dtype=asked)

    longest = (data.max_prompt_length or data.max_response_length) + data.max_response_length
    if not config.sft.skip:
        check_sft_memory(
            config.sft,
            machines,
            model_path=path,
            lora=lora,
            dtype=dtype(config.sft.parallel),
            max_response_length=data.max_response_length,
            max_model_len=longest,
        )
    check_rl_memory(
        config.rl,
        machines,
        model_path=path,
        lora=lora,
        dtype=dtype(config.rl.actor.parallel),
        max_response_length=data.max_response_length,
        max_model_len=longest,
    )


def cluster(profile: Profile, kinds: Mapping[str, Device] | None = None) -> Cluster:
    """The profile's machines, as many as there are at the start.

    `kinds`: GPUs that the table of hardware does not have.
    """
    from engine.planner import Cluster, Machine
    from engine.planner.hardware import GIB, gpu

    each = int(gpu(profile.accelerator, kinds).memory_gib * GIB)
    machines = (
        Machine(
            f"worker {number}",
            float(profile.cpus),
            profile.memory_gib * GIB,
            profile.gpus,
            each,
            profile.accelerator,
        )
        for number in range(profile.replicas.start)
    )
    return Cluster(tuple(machines), kinds or {})
