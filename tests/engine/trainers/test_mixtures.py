"""Mixtures of experts, in RL too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from thorough import and_slow
from tiny_engine import arithmetic_rows, tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.models import load_model, save_model
from engine.parallel.layout import ModelShape
from engine.planner.sizes import sizes
from engine.trainers.layout_checks import check_layouts
from engine.trainers.rl import RLTrainer

RAY = {"trainer": {"placement": "ray"}}


def check(family: str, values: dict[str, Any]) -> None:
    config = RLConfig.model_validate(RAY | values)
    check_layouts(config, LoRAConfig(), tiny_model(family).config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"actor": {"parallel": {"tp": 2}}}, "actor.parallel.tp=2 with a mixture of experts"),
        ({"critic": {"parallel": {"pp": 2}}}, "critic.parallel.pp=2 with a mixture of experts"),
        (
            {"actor": {"parallel": {"fsdp": 2}}, "rollout": {"tensor_parallel_size": 2}},
            "rollout.tensor_parallel_size=2 with a mixture of experts",
        ),
        (
            {"actor": {"parallel": {"sp": 2}, "router_aux_loss_coef": 0.1}},
            "router_aux_loss_coef=0.1 with actor.parallel.sp=2",
        ),
        (
            {"actor": {"router_replay": {"mode": "R2"}, "kl_loss_type": "full"}},
            "mode=R2 with actor.kl_loss_type=full",
        ),
        (
            {
                "actor": {"router_replay": {"mode": "R2"}, "use_kl_loss": False},
                "algorithm": {"dataflow": "online_dpo"},
            },
            "with algorithm.dataflow=online_dpo",
        ),
        (
            {"actor": {"router_replay": {"mode": "R2"}, "old_log_probs": "rollout"}},
            "R2 records what the trainer's own pass chooses",
        ),
        ({"actor": {"router_replay": {"mode": "R3"}}}, "set rollout.enable_rollout_routing_replay"),
        (
            {
                "actor": {"router_replay": {"mode": "R3"}},
                "rollout": {"enable_rollout_routing_replay": True, "parts": 2},
            },
            "rollout.engine=native, rollout.parts=2 and trainer.mode=sync: it records",
        ),
        (
            {
                "actor": {"router_replay": {"mode": "R3"}},
                "rollout": {
                    "enable_rollout_routing_replay": True,
                    "engine": "failing_engines:Refusing",
                },
            },
            "rollout.engine=failing_engines:Refusing, which doesn't record experts; set it to nat",
        ),
        (
            {"rollout": {"enable_rollout_routing_replay": True}},
            "which is disabled; set both or neither",
        ),
    ],
)
def test_what_experts_do_not_go_with_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check("qwen3_moe", values)


def test_what_they_go_with_is_not_and_a_dense_model_has_no_routers() -> None:
    check("mixtral", {"actor": {"parallel": {"fsdp": 2}, "router_aux_loss_coef": 0.1}})
    vllm = {"engine": "vllm", "tensor_parallel_size": 2}
    check("qwen3_moe", {"actor": {"parallel": {"fsdp": 2}}, "rollout": vllm})
    replay = {"actor": {"router_replay": {"mode": "R3"}}}
    recorded = {"rollout": {"engine": "vllm", "parts": 2, "enable_rollout_routing_replay": True}}
    check("qwen3_moe", replay | recorded)
    with pytest.raises(ConfigError, match=r"coef=0\.1 with a model of type 'qwen2'"):
        check("qwen2", {"actor": {"router_aux_loss_coef": 0.1}})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_planner_counts_all_experts_and_a_token_s_own(family: str) -> None:
    model: Any = tiny_model(family)
    found = sizes(ModelShape.of(model.config))
    every = dict(model.named_parameters())
    assert found.total == pytest.approx(sum(p.numel() for p in every.values()), rel=0.01)
    experts = sum(p.numel() for name, p in every.items() if ".experts." in name)
    assert found.experts * found.layers == experts
    assert found.chosen * 2 == found.experts  # half of the tiny ones' are chosen
    assert found.active == found.layer - found.experts // 2
    assert found.read(1) == pytest.approx(found.total - experts / 2)
    assert found.read(1000) == pytest.approx(found.total)


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


@pytest.mark.usefixtures("one_thread")
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
