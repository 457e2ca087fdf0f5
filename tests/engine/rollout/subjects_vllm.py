"""vLLM: in process on the trainer's storage, as a bfloat16 copy, and in worker processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from rollout_models import CONTEXT, Subject, build
from rollout_subjects import subject

from engine.rollout.protocol import create_engine

SIZES = {"max_num_seqs": 16, "max_model_len": CONTEXT, "kv_cache_memory_mb": 64, "seed": 0}
BF16 = {"tolerance": 0.2, "mean_tolerance": 0.03, "exact": False}


def _open(
    name: str, family: str, options: dict[str, Any], tolerances: dict[str, Any]
) -> Iterator[Subject]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    model = build(family)
    if tolerances:  # bfloat16's rounding grows with the spread of the logits
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.4 if parameter.dim() == 2 else 1.0)
    engine = create_engine("vllm", model, **SIZES, **options)
    yield Subject(engine, model, name, **tolerances)
    engine.close()


def _add(
    name: str, family: str, tolerances: dict[str, Any], slow: bool = False, **options: Any
) -> None:
    marks = (pytest.mark.slow,) if slow else ()
    subject(name, shared=True, marks=marks)(partial(_open, name, family, options, tolerances))


_add("vllm", "qwen2", {})
_add("vllm-bf16", "qwen2", BF16, dtype="bfloat16")
_add("vllm-tp2", "qwen2", {}, slow=True, tensor_parallel_size=2, bucket_mb=1)
_add("vllm-worker", "qwen3", {}, slow=True, in_process=False)
_add("vllm-llama", "llama", {}, slow=True)
_add("vllm-mistral-tp2-bf16", "mistral", BF16, slow=True, tensor_parallel_size=2, dtype="bfloat16")
