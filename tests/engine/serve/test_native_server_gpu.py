"""The native server on a GPU: its model is there; skipped without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from served import SHAPE
from tiny_engine import write_tiny_folder

from engine.openai_api.schema import CompletionRequest, RequestLimits
from engine.serve.native_backend import NativeBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


def test_a_served_model_is_on_the_device(tmp_path: Path) -> None:
    wide = SHAPE.model_copy(update={"hidden_size": 128, "num_attention_heads": 4})
    backend = NativeBackend.load(write_tiny_folder(tmp_path / "model", wide), None)
    model = backend._decoder._engine._handle.get()  # type: ignore[attr-defined]
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    request = CompletionRequest(prompt="1+1=", max_tokens=4, n=2)

    async def complete() -> tuple[int, int]:
        accepted = await backend.submit(request, RequestLimits())
        return len([item async for item in accepted.answers]), accepted.prompt_tokens

    answers, tokens = asyncio.run(asyncio.wait_for(complete(), 60))
    assert answers == 2
    assert tokens > 0
    backend.close()
