"""Every estimator, policy loss, aggregation, KL and correction runs through the real trainer."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from thorough import and_slow
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.algorithms import advantages, aggregation, divergences, policy_losses, preference_losses
from engine.algorithms import correction as rejection
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.models import save_model
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, section by section."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def two_steps(folder: Path, **changes: Any) -> list[dict[str, float]]:
    """Metrics of two steps with two optimizer steps each, so that the second is off-policy."""
    base = {
        "actor": {
            "optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0},
            "ppo_mini_batch_size": 8,
            "max_tokens_per_micro_batch": 128,
        },
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 2,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 1,
        },
    }
    settings = RLConfig.model_validate(merged(base, changes))
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    history: list[dict[str, float]] = []
    with RLTrainer(folder, settings, loader, max_response_length=6, max_model_len=40) as trainer:
        trainer.on_step = lambda step, total, metrics: history.append(dict(metrics))
        trainer.fit()
    assert len(history) == settings.trainer.total_training_steps
    for metrics in history:
        broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        assert not broken
        assert metrics["actor/grad_norm"] > 0
    return history


@pytest.mark.parametrize(
    ("estimator", "loss"), [*zip(advantages.names(), cycle(policy_losses.names()), strict=False)]
)
def test_every_advantage_estimator_and_policy_loss(
    tiny_folder: Path, estimator: str, loss: str
) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"adv_estimator": estimator},
        "actor": {"policy_loss": {"loss_mode": loss}},
    }
    if estimator == "gdpo":
        changes["reward"] = {"name": "tiny_engine:digits_and_brevity", "isolation": "none"}
    history = two_steps(tiny_folder, **changes)
    assert any(abs(metrics["actor/ppo_kl"]) > 1e-7 for metrics in history), "never off-policy"
    assert ("critic/grad_norm" in history[-1]) == (estimator.startswith("gae"))
    assert ("reward/brevity" in history[-1]) == (estimator == "gdpo")


# One of each way; the tests of `algorithms` have every name and criterion, with its values.
KL_KINDS = ("k1", "abs", "k2", "k3", "k3+", "full")
KL_PENALTIES = ("k1", "abs", "k2", "low_var_kl", "full")
CRITERIA = ("token_k1", "seq_sum_k2", "seq_mean_k3", "seq_max_k1")


@pytest.mark.parametrize(
    ("kind", "mode"),
    and_slow(
        zip(KL_KINDS, cycle(aggregation.MODES), strict=False),
        [(name, "token-mean") for name in divergences.NAMES if name not in KL_KINDS],
    ),
)
def test_every_kl_in_the_loss_and_every_aggregation(
    tiny_folder: Path, kind: str, mode: str
) -> None:
    extra = {"loss_scale_factor": 32.0} if mode == "seq-mean-token-sum-norm" else {}
    loss = {"kl_loss_type": kind, "kl_loss_coef": 0.1, "loss_agg_mode": mode}
    history = two_steps(tiny_folder, actor=loss | extra)
    assert abs(history[-1]["actor/kl"]) > 1e-9


def test_the_cases_have_every_policy_loss_aggregation_and_rejection() -> None:
    assert len(policy_losses.names()) <= len(advantages.names())
    assert len(aggregation.MODES) <= len(KL_KINDS)
    assert len(CRITERIA) <= len(KL_PENALTIES)


@pytest.mark.parametrize(
    ("kind", "criterion"),
    and_slow(
        zip(KL_PENALTIES, cycle(CRITERIA), strict=False),
        [("k1", name) for name in rejection.CRITERIA if name not in CRITERIA],
    ),
)
def test_every_kl_in_the_reward_and_every_rejection(
    tiny_folder: Path, kind: str, criterion: str
) -> None:
    bound = "0.5_2.0" if criterion.endswith("k1") else "0.5"
    correction = {"rollout_rs": criterion, "rollout_rs_threshold": bound}
    history = two_steps(
        tiny_folder,
        algorithm={
            "use_kl_in_reward": True,
            "kl_penalty": kind,
            "kl_ctrl": {"type": "adaptive"},
            "rollout_correction": correction,
        },
        actor={"use_kl_loss": False},
    )
    assert history[0]["reward/kl"] == pytest.approx(0.0, abs=1e-5)
    assert abs(history[1]["reward/kl"]) > 1e-6
    assert history[1]["reward/kl_coef"] != history[0]["reward/kl_coef"]
    assert history[1][f"rollout_corr/rollout_rs_{criterion}_masked_fraction"] == 0.0


@pytest.mark.parametrize(
    ("level", "threshold", "normalise"),
    and_slow(
        [  # each two of them in each combination
            ("token", 2.0, False),
            ("token", "0.5_5.0", True),
            ("sequence", 2.0, True),
            ("sequence", "0.5_5.0", False),
        ],
        [
            ("token", 2.0, True),
            ("token", "0.5_5.0", False),
            ("sequence", 2.0, False),
            ("sequence", "0.5_5.0", True),
        ],
    ),
)
def test_every_importance_weight(
    tiny_folder: Path, level: str, threshold: Any, normalise: bool
) -> None:
    settings = {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalise,
    }
    metrics = two_steps(tiny_folder, algorithm={"rollout_correction": settings})[-1]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("name", preference_losses.names())
def test_every_preference_loss_online(tiny_folder: Path, name: str) -> None:
    changes = {"dataflow": "online_dpo", "preference": {"loss": name}}
    metrics = two_steps(tiny_folder, algorithm=changes)[-1]
    assert 0 <= metrics["actor/rewards/accuracies"] <= 1
    assert metrics["preference/pairs"] > 0


# An update a step, in one pass.
WHOLE_STEP = {"use_kl_loss": False, "ppo_mini_batch_size": 0, "max_tokens_per_micro_batch": 8192}


def teacher(tiny_folder: Path, folder: Path, seed: int = 0) -> str:
    """The tiny model, some way off."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return str(save_model(model, load_tokenizer(tiny_folder), folder))


def test_distillation_comes_closer_to_its_teacher(tiny_folder: Path, tmp_path: Path) -> None:
    history = two_steps(
        tiny_folder,
        algorithm={
            "dataflow": "distillation",
            "teacher": teacher(tiny_folder, tmp_path / "teacher"),
        },
        actor=WHOLE_STEP,
        rollout={"n": 32},
        trainer={"total_training_steps": 15},
    )
    course = [metrics["distillation/reverse_kl"] for metrics in history]
    assert sum(course[-3:]) < 0.85 * sum(course[:3])


@pytest.mark.parametrize(
    "distillation",
    [
        {"loss": "reverse_kl"},
        {"loss": "forward_kl", "top_k": 16},
        {"loss": "jsd", "beta": 0.9, "top_k": 4, "route_by": "ability"},
        {"loss": "jsd", "route_by": "ability"},
    ],
)
def test_distributions_are_distilled(
    tiny_folder: Path, tmp_path: Path, distillation: dict[str, Any]
) -> None:
    """From two teachers by weight, or each row from its own."""
    ability = arithmetic_rows(1)[0]["ability"]
    folders = [teacher(tiny_folder, tmp_path / f"teacher{seed}", seed) for seed in (0, 1)]
    rows = (ability, "another") if "route_by" in distillation else ("", "")
    teachers = [
        {"model": folder, "rows": value} for folder, value in zip(folders, rows, strict=True)
    ]
    history = two_steps(
        tiny_folder,
        algorithm={
            "dataflow": "distillation",
            "distillation": distillation | {"teachers": teachers},
        },
        actor=WHOLE_STEP | {"optim": {"lr": 1e-2}},
        trainer={"total_training_steps": 5},
    )
    course = [metrics["actor/divergence"] for metrics in history]
    assert sum(course[-2:]) < 0.9 * sum(course[:2])


@pytest.mark.parametrize(
    ("changes", "metrics"),
    [
        ({"algorithm": {"filter_groups": {"enable": True}}}, ["sampling/rollouts"]),
        (
            {
                "reward": {
                    "overlong_buffer": {"enable": True, "len": 5},
                    "clip": [0.1, 0.6],
                    "whiten": True,
                },
                "actor": {"use_kl_loss": False},
            },
            ["reward/overlong_penalty", "reward/mean", "actor/rows_skipped"],
        ),
        (
            {
                "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
                "reward": {"name": "answer_and_format", "weights": {"format": 0.2}},
                "actor": {"entropy_coeff": 0.01},  # few random answers are right
            },
            ["reward/format", "actor/entropy", "actor/kl"],
        ),
        (
            {
                "algorithm": {"adv_estimator": "gdpo", "gdpo_reward_weights": [1.0, 0.5]},
                "reward": {"name": "tiny_engine:digits_and_brevity", "isolation": "none"},
            },
            ["reward/brevity"],
        ),
    ],
)
def test_every_shaping(tiny_folder: Path, changes: dict[str, Any], metrics: list[str]) -> None:
    assert set(metrics) <= two_steps(tiny_folder, **changes)[-1].keys()
