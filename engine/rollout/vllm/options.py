"""The settings of a vLLM engine, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from engine.config import RolloutConfig
from engine.errors import ConfigError
from engine.rollout import trainer_weights
from engine.rollout.protocol import EngineCapabilities
from engine.rollout.requests import resolve_max_model_len
from engine.rollout.vllm.engine_arguments import CPU_KV_CACHE_MB, Tuning

Mode = Literal["in_process", "workers", "ranks"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TUNING = tuple(Tuning.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """One engine's settings, with nothing left open."""

    mode: Mode  # where the model runs: in this process, in vLLM's own, or over the trainer's ranks
    on_gpu: bool  # whether vLLM runs on GPUs
    max_num_seqs: int  # completions decoded at once, e.g. 512
    max_model_len: int  # longest prompt plus completion, in tokens, e.g. 1024
    kv_cache_memory_mb: int | None  # of the whole engine, e.g. 256; None: what vLLM's share leaves
    seed: int
    dtype: str  # of vLLM's weights, e.g. "bfloat16"
    tensor_parallel_size: int
    rank_groups: tuple[tuple[int, ...], ...]  # of mode "ranks", e.g. ((0, 2), (1, 3)); else ()
    adapter_rank: int  # of LoRA adapters that vLLM applies itself; 0: none
    bucket_mb: int  # weights on their way to worker processes at once, e.g. 64
    share: bool  # whether vLLM's parameters may be the trainer's, and so must outlast its sleep
    tuning: Tuning


def capabilities(config: RolloutConfig) -> EngineCapabilities:
    """What vLLM can do with these settings, in this process."""
    level = config.vllm.sleep
    return EngineCapabilities(
        streams=True,
        cuts=True,
        adapters=True,
        exclusive=True,
        loads_shards=True,
        own_processes=not config.vllm.in_process,
        memory_share=config.vllm.gpu_memory_utilization if config.kv_cache_memory_mb is None else 0,
        stays_awake=level == 0,
        sleep_level=(2 if on_gpu() else 0) if level is None else level,
        settings=frozenset({"max_num_seqs", "kv_cache_memory_mb", "vllm"}),
    )


def on_gpu() -> bool:
    """Whether vLLM would run on a GPU here."""
    return torch.accelerator.is_available()


def engine_options(config: RolloutConfig) -> dict[str, object]:
    """The engine's arguments from `rollout.vllm`."""
    own = {name: value for name, value in dict(config.vllm).items() if name != "sleep"}
    own["dtype"] = own["dtype"] or None
    return own | {"tensor_parallel_size": config.tensor_parallel_size}


def check(config: RolloutConfig) -> None:
    """Raise ConfigError for settings that can't be, whatever the model and the machine."""
    own = config.vllm
    tuning = Tuning(**{name: value for name, value in dict(own).items() if name in _TUNING})
    tuning.check(
        in_process=own.in_process, kv_cache_memory_mb=config.kv_cache_memory_mb, lora=own.lora
    )


def resolve(
    model: nn.Module,
    *,
    max_num_seqs: int,
    max_model_len: int | None,
    kv_cache_memory_mb: int | None,
    seed: int,
    dtype: str | None,
    tensor_parallel_size: int,
    in_process: bool,
    rank_groups: Sequence[Sequence[int]] | None,
    lora: str,
    bucket_mb: int,
    tuning: Tuning,
) -> VllmOptions:
    """Check the settings against `model` and each other; raise ConfigError for what can't be."""
    config: Any = model.config
    sizes = {
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_mb": kv_cache_memory_mb,
        "bucket_mb": bucket_mb,
    }
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is too small for any work; use 1 or more")
    if lora not in ("merged", "adapter"):
        raise ConfigError(f"lora={lora!r} is unknown; choose merged or adapter")
    tuning.check(in_process=in_process, kv_cache_memory_mb=kv_cache_memory_mb, lora=lora)
    groups = tuple(tuple(group) for group in rank_groups or ())
    mode: Mode = "ranks" if groups else "in_process"
    if not groups and (tensor_parallel_size > 1 or not in_process):
        mode = "workers"
    _check_parallel(config, tensor_parallel_size, groups)
    known_dtype, gpu = _dtype(model, dtype), on_gpu()
    length = resolve_max_model_len(max_model_len, getattr(config, "max_position_embeddings", None))
    tuning.check_here(
        on_gpu=gpu, dtype=known_dtype, max_model_len=length, max_num_seqs=max_num_seqs
    )
    shareable = mode == "in_process" and not tuning.quantization
    return VllmOptions(
        mode=mode,
        on_gpu=gpu,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        kv_cache_memory_mb=kv_cache_memory_mb or (None if gpu else CPU_KV_CACHE_MB),
        seed=seed,
        dtype=known_dtype,
        tensor_parallel_size=tensor_parallel_size,
        rank_groups=groups,
        adapter_rank=trainer_weights.adapter_rank(model) if lora == "adapter" else 0,
        bucket_mb=bucket_mb,
        share=shareable and trainer_weights.can_be_shared(model, DTYPES[known_dtype]),
        tuning=tuning,
    )


def _dtype(model: nn.Module, asked: str | None) -> str:
    if asked is None:
        return str(trainer_weights.model_dtype(model)).removeprefix("torch.")
    if asked not in DTYPES:
        raise ConfigError(f"dtype={asked!r} is unknown; choose one of {', '.join(DTYPES)}")
    return asked


def _check_parallel(config: object, size: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """vLLM repeats key and value heads, so `size` need not divide them."""
    if size < 1:
        raise ConfigError(f"tensor_parallel_size={size} is no number of workers; use 1 or more")
    heads = getattr(config, "num_attention_heads", size)
    if heads % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model's num_attention_heads={heads}; "
            "choose a divisor of it"
        )
    wrong = any(len(group) != size for group in groups)
    ranks = sorted(rank for group in groups for rank in group)
    if wrong or ranks != list(range(len(ranks))):
        raise ConfigError(
            f"rank_groups={[list(group) for group in groups]} must have each rank from 0 once, in "
            f"groups of tensor_parallel_size={size}"
        )
