"""A vLLM engine's settings where there is a CUDA device; vLLM itself is not started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout_models import build
from test_vllm_options import DEFAULTS, adapted

from engine.config import RolloutConfig
from engine.rollout.protocol import engine_capabilities
from engine.rollout.vllm.options import engine_arguments, resolve
from engine.rollout.vllm.weight_load import base_on_host

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


def test_a_base_leaves_the_device_while_vllm_starts() -> None:
    model = adapted("qwen2", "all-linear").cuda()
    expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    before = torch.cuda.memory_allocated()
    with base_on_host(model):
        places = {(".lora_" in name, p.device.type) for name, p in model.named_parameters()}
        assert places == {(True, "cuda"), (False, "cpu")}
        frozen = sum(p.nbytes for name, p in model.named_parameters() if ".lora_" not in name)
        assert torch.cuda.memory_allocated() <= before - frozen
        shared = model.model.norm.weight
        shared.data = shared.data.cuda()
        view = shared.data_ptr()
    assert shared.data_ptr() == view, "what vLLM shares by then stays"
    for name, parameter in model.named_parameters():
        assert parameter.is_cuda
        assert torch.equal(parameter.cpu(), expected[name]), name


@pytest.mark.parametrize(("sleep", "level"), [(None, 2), (0, 0), (1, 1)])
def test_vllm_sleeps_while_the_policy_is_updated(sleep: int | None, level: int) -> None:
    config = RolloutConfig.model_validate({"engine": "vllm", "vllm": {"sleep": sleep}})
    assert engine_capabilities(config).sleep_level == level
