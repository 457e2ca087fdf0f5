"""A vLLM engine's settings where there is a CUDA device; vLLM itself is not started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout_models import build
from test_vllm_options import DEFAULTS

from engine.config import RolloutConfig
from engine.rollout.protocol import engine_capabilities
from engine.rollout.vllm.options import engine_arguments, resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GIVEN: dict[str, Any] = DEFAULTS | {"kv_cache_memory_mb": None}


def test_a_device_is_seen_and_its_memory_shared() -> None:
    options = resolve(build("qwen2").bfloat16().cuda(), **GIVEN)
    assert (options.on_gpu, options.kv_cache_memory_mb, options.dtype) == (True, None, "bfloat16")
    assert options.share, "vLLM's parameters will be the trainer's"
    arguments = engine_arguments(options)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["enforce_eager"] is False
    assert arguments["enable_chunked_prefill"] is True


def test_a_policy_elsewhere_or_quantised_weights_are_copied() -> None:
    assert not resolve(build("qwen2").bfloat16(), **GIVEN).share
    quantised = GIVEN | {"quantization": "fp8"}
    assert not resolve(build("qwen2").bfloat16().cuda(), **quantised).share


@pytest.mark.parametrize(("sleep", "level"), [(None, 2), (0, 0), (1, 1)])
def test_vllm_sleeps_while_the_policy_is_updated(sleep: int | None, level: int) -> None:
    config = RolloutConfig.model_validate({"engine": "vllm", "vllm": {"sleep": sleep}})
    assert engine_capabilities(config).sleep_level == level
