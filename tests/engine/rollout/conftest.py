"""Engines under test; vLLM is started once for all rollout tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from rollout_models import CONTEXT, FAMILIES, GENERIC, Subject, build

from engine.rollout.protocol import create_engine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def vllm_subject() -> Iterator[Subject]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    model = build("qwen2")
    options = {"max_num_seqs": 16, "max_model_len": CONTEXT, "kv_cache_memory_mb": 64}
    engine = create_engine("vllm", model, seed=0, **options)
    yield Subject(engine, model, "vllm")
    engine.close()


NATIVE = [f"native-{family}" for family in FAMILIES + GENERIC]


@pytest.fixture(params=[*NATIVE, "vllm"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each engine over each model shape; vLLM's is shared, native ones are new for each test."""
    if request.param == "vllm":
        yield request.getfixturevalue("vllm_subject")
        return
    model = build(request.param.removeprefix("native-"))
    engine = create_engine(
        "native", model, max_num_seqs=16, max_model_len=CONTEXT, kv_cache_memory_mb=64, seed=0
    )
    yield Subject(engine, model, request.param)
    engine.close()
