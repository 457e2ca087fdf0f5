"""Actors over tiny models, one rank each."""

from __future__ import annotations

import pytest
from tiny_engine import tiny_model

from engine import HybridActor


@pytest.fixture(params=["qwen2", "llama", "gpt2"])
def actor(request: pytest.FixtureRequest) -> HybridActor:
    return HybridActor(tiny_model(request.param))


@pytest.fixture
def qwen() -> HybridActor:
    return HybridActor(tiny_model("qwen2"))
