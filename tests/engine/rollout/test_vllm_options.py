"""Settings of a vLLM engine that can't be: each one clear error before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from rollout_models import build

from engine.errors import ConfigError, RolloutError
from engine.rollout.vllm.engine import VllmEngine
from engine.rollout.vllm.engine_launch import _lora_rank_size
from engine.rollout.vllm.options import resolve

DEFAULTS: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_mb": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 is too small"),
        ({"bucket_mb": 0}, "bucket_mb=0: Input should be greater than or equal to 1"),
        ({"kv_cache_memory_mb": 0}, "kv_cache_memory_mb=0 is too small"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's context of 128"),
        ({"dtype": "int8"}, "dtype='int8': Input should be '', 'float32', 'bfloat16' or 'float16'"),
        ({"lora": "own"}, "lora='own': Input should be 'merged' or 'adapter'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is no number of workers"),
        ({"tensor_parallel_size": 3}, "3 does not divide the model's num_attention_heads=4"),
        (
            {"tensor_parallel_size": 2, "rank_groups": [[0], [1]]},
            r"rank_groups=\[\[0\], \[1\]\] must have each rank from 0 once, in groups of tens.*=2",
        ),
        ({"rank_groups": [[0], [2]]}, "must have each rank from 0 once"),
        ({"rank_groups": [[0], [0]]}, "must have each rank from 0 once"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(build("qwen2"), **(DEFAULTS | changes))


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "in_process"),
        ({"in_process": False}, "workers"),
        ({"tensor_parallel_size": 2}, "workers"),
        ({"rank_groups": [[0], [1]]}, "ranks"),
        ({"tensor_parallel_size": 2, "rank_groups": [[0, 2], [3, 1]]}, "ranks"),
    ],
)
def test_where_the_model_runs(changes: dict[str, Any], mode: str) -> None:
    options = resolve(build("qwen2"), **(DEFAULTS | changes))
    assert options.mode == mode
    assert (options.dtype, options.max_model_len, options.adapter_rank) == ("float32", 128, 0)


def test_ranks_without_a_process_group_are_refused() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with pytest.raises(ConfigError, match=r"the default process group has [01]; create it first"):
        VllmEngine(build("qwen2"), rank_groups=[[0], [1]], tensor_parallel_size=1)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_adapter_ranks_are_rounded_up_to_vllms_sizes(rank: int, size: int) -> None:
    assert _lora_rank_size(rank) == size


def test_an_adapter_that_is_too_large_is_merged_instead() -> None:
    with pytest.raises(RolloutError, match=r"up to rank 512, not 513; set lora=merged"):
        _lora_rank_size(513)
