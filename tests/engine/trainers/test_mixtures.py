"""What a mixture of experts doesn't go with is refused by name, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import tiny_model

from engine.config import LoRAConfig, RLConfig
from engine.errors import ConfigError
from engine.parallel.layout import ModelShape
from engine.planner.sizes import sizes
from engine.trainers.layout_checks import check_layouts

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
            "rollout.parts=2 and trainer.mode=sync: native records",
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
