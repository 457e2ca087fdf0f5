"""GRPO on a mixture of experts: rollout's experts are replayed, and the balancing loss is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from thorough import and_slow
from tiny_engine import arithmetic_rows
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, save_model
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load_tokenizer(tiny_folder)
    shape = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(shape)
    return save_model(model, tokenizer, tmp_path_factory.mktemp("mixture") / "model")


@pytest.mark.parametrize("lora", and_slow([0], [2]))
def test_a_step_replays_what_rollout_chose(folder: Path, tmp_path: Path, lora: int) -> None:
    values: dict[str, Any] = {
        "actor": {
            "router_replay": {"mode": "R3"},
            "router_aux_loss_coef": 0.01,
            "optim": {"lr": 1e-2},
            "ppo_mini_batch_size": 8,
            "old_log_probs": "trainer",
        },
        "rollout": {"n": 4, "enable_rollout_routing_replay": True},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"train_batch_size": 4, "total_training_steps": 2, "placement": "local"},
    }
    config = RLConfig.model_validate(values)
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 4, 0)
    with RLTrainer(
        folder, config, loader, max_response_length=6, max_model_len=40, lora=LoRAConfig(rank=lora)
    ) as trainer:
        trainer.fit()
        trainer.save(tmp_path / "out")
    assert len(trainer.history) == 2
    for row in trainer.history:
        assert row["actor/router_aux_loss"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
    start, end = load_model(folder).state_dict(), load_model(tmp_path / "out").state_dict()
    moved = {name for name, tensor in end.items() if not torch.equal(tensor, start[name])}
    experts = {name for name in end if ".experts." in name}
    assert experts <= moved if not lora else moved and not experts & moved
