"""Precision, in RL too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import (
    TINY_MODEL,
    arithmetic_rows,
    random_completions,
    tiny_model,
    write_tiny_folder,
)

from engine.config import LoRAConfig, RLConfig, SFTConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError
from engine.models import load_model, resolve_dtype, saved_dtype
from engine.trainers.auto_placement import model_dtype
from engine.trainers.offline import SFTExample, SFTTrainer
from engine.trainers.rl import RLTrainer


@pytest.fixture(params=["amx", "avx512_bf16", "neither"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine without a GPU whose processor has these instructions for bfloat16."""
    kind = str(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: kind == "amx")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: kind == "avx512_bf16")
    return kind


def test_auto_is_what_the_hardware_computes_in(instructions: str) -> None:
    wanted = "float32" if instructions == "neither" else "bfloat16"
    assert resolve_dtype("auto", 96) == wanted
    assert resolve_dtype("auto", 4096, compute_dtype="bfloat16") == wanted
    assert resolve_dtype("auto", 4096, gpu=True) == "bfloat16"  # in another machine
    assert resolve_dtype("auto", 32) == "float32"
    assert resolve_dtype("auto", 4096, compute_dtype="float32") == "float32"
    for dtype in ("float32", "bfloat16", "float16"):
        assert resolve_dtype(dtype, 96) == dtype


def test_auto_asks_the_device_that_the_actor_gets(
    tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "num_attention_heads": 4}
    folder = write_tiny_folder(tmp_path, TINY_MODEL.model_copy(update=shape))
    own = "float32" if instructions == "neither" else "bfloat16"

    def chosen(**trainer: object) -> str:
        return model_dtype("auto", folder, RLConfig.model_validate({"trainer": trainer}))

    assert chosen(placement="ray") == chosen(placement="local") == own
    gpus = {"roles": ["actor", "rollout", "reference"], "gpus": 1.0}
    assert chosen(pools=[gpus, {"roles": ["reward"]}]) == "bfloat16"
    assert chosen(pools=[gpus | {"gpus": 0.0}, {"roles": ["reward"], "gpus": 1.0}]) == own


def test_reduced_weights_are_computed_with_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"compute_dtype=float32 with model\.dtype=bfloat16"):
        resolve_dtype("bfloat16", 512, compute_dtype="float32")
    with pytest.raises(ConfigError, match=r"compute_dtype=bfloat16 with model\.dtype=float16"):
        resolve_dtype("float16", 512, compute_dtype="bfloat16")
    assert resolve_dtype("bfloat16", 512, compute_dtype="bfloat16") == "bfloat16"
    assert resolve_dtype("float32", 512, compute_dtype="bfloat16") == "float32"
    with pytest.raises(ConfigError, match=r"model\.dtype='half' is unknown; choose auto or"):
        resolve_dtype("half", 512)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_from_scratch_is_the_float32_one_rounded(tmp_path: Path, dtype: str) -> None:
    exact = load_model(write_tiny_folder(tmp_path / "exact"))
    reduced = TINY_MODEL.model_copy(update={"dtype": dtype})
    folder = write_tiny_folder(tmp_path / "reduced", reduced)
    assert (saved_dtype(tmp_path / "exact"), saved_dtype(folder)) == ("float32", dtype)
    for name, parameter in load_model(folder, dtype).named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).to(getattr(torch, dtype)))


GAP = (
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/log_prob_diff_mean",
    "rollout_corr/log_prob_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
)


def run(folder: Path, out: Path, dtype: str, lora: int = 0, **actor: Any) -> list[dict[str, float]]:
    """Steps of GRPO with a reference and a critic-free baseline; the policy is saved to `out`."""
    config = RLConfig.model_validate(
        {
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}, "max_tokens_per_micro_batch": 256}
            | actor,
            "rollout": {"n": 4},
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {"total_training_steps": 3, "train_batch_size": 4, "placement": "local"},
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    with RLTrainer(
        folder,
        config,
        loader,
        max_response_length=6,
        max_model_len=40,
        dtype=dtype,
        lora=LoRAConfig(rank=lora),
    ) as trainer:
        trainer.fit()
        trainer.save(out)
        return trainer.history


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("dtype", "lora", "gap"),
    [("float32", 0, 1e-4), ("bfloat16", 0, 0.1), ("bfloat16", 4, 0.1), ("float16", 0, 0.02)],
)
def test_a_run_in_each_dtype(
    tiny_folder: Path, tmp_path: Path, dtype: str, lora: int, gap: float
) -> None:
    steps = run(tiny_folder, tmp_path, dtype, lora)
    assert saved_dtype(tmp_path) == dtype
    start, end = load_model(tiny_folder, dtype), load_model(tmp_path, dtype)
    pairs = zip(start.parameters(), end.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
    for metrics in steps:
        assert set(GAP) <= metrics.keys()
        assert 0 <= metrics["rollout_corr/log_prob_diff_mean"] < gap
        assert metrics["rollout_corr/log_prob_diff_max"] < 10 * gap
        assert abs(metrics["rollout_corr/kl"]) <= metrics["rollout_corr/log_prob_diff_mean"]
        assert ("actor/loss_scale" in metrics) == (dtype == "float16")
    if dtype == "float32":
        assert steps[0]["rollout_corr/log_prob_diff_max"] < 1e-4


@pytest.mark.usefixtures("one_thread")
def test_recomputed_log_probs_are_compared_with_rollouts_too(
    tiny_folder: Path, tmp_path: Path
) -> None:
    steps = run(tiny_folder, tmp_path, "bfloat16", old_log_probs="trainer")
    assert all(0 < step["rollout_corr/log_prob_diff_max"] < 1.0 for step in steps)


@cache
def warm_start_losses(dtype: torch.dtype) -> list[float]:
    rows = [SFTExample(p, r) for p, r in zip(*random_completions(6, 0), strict=True)]
    model = tiny_model("qwen2")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    found: list[float] = []
    config = {"threads": 1, "train_batch_size": 6, "max_steps": 20, "optim": {"lr": 2e-2}}
    trainer = SFTTrainer(model, 0, SFTConfig.model_validate(config), seed=0)
    trainer.on_step = lambda step, total, metrics: found.append(metrics["sft/loss"])
    trainer.fit(rows, [])
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_warm_start_converges_as_in_float32(dtype: torch.dtype) -> None:
    exact, reduced = warm_start_losses(torch.float32), warm_start_losses(dtype)
    assert reduced[0] == pytest.approx(exact[0], rel=0.01)
    assert reduced[5] == pytest.approx(exact[5], rel=0.2)
    assert exact[-1] < 0.05
    assert reduced[-1] < 0.05
