"""Evaluation on a GPU: the model is there, in bfloat16; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.config import EvaluateConfig
from engine.evaluation.evaluate import evaluate_model
from engine.workers import evaluation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


def test_the_model_that_decodes_is_on_the_device(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, torch.dtype]] = []
    create = evaluation.create_engine

    def noted(name: str, model: torch.nn.Module, **options: Any) -> Any:
        seen.extend((p.device.type, p.dtype) for p in [*model.parameters(), *model.buffers()])
        return create(name, model, **options)

    monkeypatch.setattr(evaluation, "create_engine", noted)
    config = EvaluateConfig(k=2, samples=2)
    frame = pd.DataFrame(arithmetic_rows(4))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rows = evaluate_model(tiny_folder, frame, "rl", config, max_response_length=8, seed=0)
    assert len(rows) == 4
    assert {device for device, _ in seen} == {"cuda"}
    assert torch.bfloat16 in {dtype for _, dtype in seen}
    assert torch.cuda.max_memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before + (1 << 20), "and it leaves again"
