"""Losses of the first steps on one batch are TRL's.

The figures are those that DPOTrainer and RewardTrainer of TRL 1.16.0 gave in float32 for the same
weights, tokens and AdamW (betas 0.9 and 0.95, no decay, norm clipped at 1). `benchmarks/vs_trl.py
--tasks dpo,reward` compares both side by side.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine import PreferenceTrainer, RewardModelTrainer
from engine.config import PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.training_examples import PairExample

pytestmark = pytest.mark.usefixtures("one_thread")

DPO: dict[str, tuple[dict[str, Any], list[float]]] = {
    "sigmoid": ({"beta": 0.3}, [0.693147, 0.291279, 0.098549, 0.043979, 0.012946]),
    "ipo": ({"beta": 0.3}, [2.777778, 0.698952, 0.413043, 0.164747, 0.054941]),
    "hinge": ({"beta": 0.3}, [1.0, 0.250476, 0.042785, 0.0, 0.0]),
    "robust": (
        {"beta": 0.3, "label_smoothing": 0.1},
        [0.693147, 0.095086, -0.309101, -0.431634, -0.639809],
    ),
}
REWARD_MODEL = [0.693147, 0.679946, 0.610679, 0.466246, 0.317005]


def model() -> Qwen2ForCausalLM:
    """Weights by a formula, so that no generator's draws are in the figures."""
    shape: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    built = Qwen2ForCausalLM(Qwen2Config(**shape))
    with torch.no_grad():
        for i, p in enumerate(built.parameters()):
            places = torch.arange(p.numel(), dtype=torch.float64)
            wave = torch.sin(places * (1.3 + 0.01 * i) + i)
            p.copy_((0.2 * wave + (p.dim() == 1)).view(p.shape))
    return built.eval()


def pairs() -> list[PairExample]:
    def ids(start: int, count: int) -> list[int]:
        return [2 + (start * 37 + 11 * j * (j + start)) % 95 for j in range(count)]

    return [
        PairExample(ids(i, 3 + i % 4), [*ids(i + 20, 2 + i % 5), 1], [*ids(i + 50, 6 - i % 5), 1])
        for i in range(8)
    ]


def settings(**changes: Any) -> dict[str, Any]:
    optim = {"lr": 1e-2, "weight_decay": 0.0, "warmup_ratio": 0.0, "schedule": "constant"}
    return {"threads": 1, "train_batch_size": 8, "max_steps": 5, "optim": optim} | changes


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("loss", list(DPO))
def test_dpo(loss: str, packing: bool) -> None:
    options, wanted = DPO[loss]
    found: list[float] = []
    config = PreferenceTrainingConfig.model_validate(
        settings(loss=loss, packing=packing, **options)
    )
    trainer = PreferenceTrainer(model(), 0, config, seed=0)
    trainer.on_step = lambda step, total, metrics: found.append(metrics["preference/loss"])
    trainer.fit(pairs())
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_reward_model(packing: bool) -> None:
    found: list[float] = []
    config = RewardModelTrainingConfig.model_validate(settings(packing=packing))
    trainer = RewardModelTrainer(model(), 0, config, seed=0)
    trainer.on_step = lambda step, total, metrics: found.append(metrics["reward_model/loss"])
    trainer.fit(pairs())
    assert found == pytest.approx(REWARD_MODEL, abs=1e-5)
