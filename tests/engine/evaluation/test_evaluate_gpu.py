"""Evaluation on a GPU: the model is there, in bfloat16; skipped without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tiny_engine import arithmetic_rows

from engine.config import DataConfig, EvaluateConfig
from engine.evaluation.scoring import evaluate_model
from engine.promotion import gate
from engine.rollout import protocol
from engine.storage.digests import sources_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


def of_the_model(folder: Path, frame: pd.DataFrame, config: EvaluateConfig) -> pd.DataFrame:
    return evaluate_model(folder, frame, "rl", config, max_response_length=8, seed=0)


def of_the_champion(folder: Path, frame: pd.DataFrame, config: EvaluateConfig) -> pd.DataFrame:
    """As `promote` evaluates a champion without a recorded evaluation; MLflow only has its copy."""
    data = DataConfig(max_response_length=8)
    here: Any = SimpleNamespace(sources_digest=sources_digest())
    new = gate.Evaluated(folder, folder, frame, here, data, config, 0)
    registry: Any = SimpleNamespace(download_model=lambda name, version, to: folder)
    champion: Any = SimpleNamespace(name="m", version="1", tags={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "require_intact_copy", lambda *arguments: None)
        patch.setattr(gate, "read_problems", lambda dataset: frame)
        rows, recorded = gate.champion_evaluation(
            registry, champion, "champion", new, scratch=folder
        )
    assert recorded is None
    return rows


def keep_workspaces() -> None:
    """cuBLAS and cuBLASLt keep theirs (33 MiB on Hopper) from a process's first products on."""
    one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    F.linear(one @ one, one, one[0])


@pytest.mark.parametrize("evaluated", [of_the_model, of_the_champion])
def test_the_model_that_decodes_is_on_the_device(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, evaluated: Any
) -> None:
    seen: list[tuple[str, torch.dtype]] = []
    create = protocol.create_engine

    def noted(name: str, model: torch.nn.Module, **options: Any) -> Any:
        seen.extend((p.device.type, p.dtype) for p in [*model.parameters(), *model.buffers()])
        return create(name, model, **options)

    monkeypatch.setattr(protocol, "create_engine", noted)
    config = EvaluateConfig(k=2, samples=2)
    frame = pd.DataFrame(arithmetic_rows(4))
    keep_workspaces()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rows = evaluated(tiny_folder, frame, config)
    assert len(rows) == 4
    assert {device for device, _ in seen} == {"cuda"}
    assert torch.bfloat16 in {dtype for _, dtype in seen}
    assert torch.cuda.max_memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before + (1 << 20), "and it leaves again"
