"""QLoRA through the trainers: on a quantised base that stays as it is, only adapters learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows, random_completions, response_log_probs
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint import find_latest
from engine.checkpoint.format import read_role_states
from engine.config import LoRAConfig, RLConfig, SFTConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.models import (
    adapter_parameters,
    load_model,
    load_policy_model,
    save_model,
)
from engine.models.lora import merged_copy
from engine.models.quantize import QuantizedLinear
from engine.trainers.offline import SFTExample, SFTTrainer
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

Kind = Literal["nf4", "int8"]
KINDS = ["nf4", "int8"]


def lora(kind: Kind, **changes: Any) -> LoRAConfig:
    return LoRAConfig.model_validate({"rank": 4, "alpha": 8.0, "quantize": kind} | changes)


@pytest.fixture(scope="module")
def start_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head, which adapters leave as it is, can say more than "all about alike"."""
    model = load_model(tiny_folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0 if "embed" in name or "proj" in name else 1.0)
    folder = tmp_path_factory.mktemp("sharp") / "model"
    return save_model(model, load_tokenizer(tiny_folder), folder)


def trainer(folder: Path, settings: LoRAConfig, **changes: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"optim": {"lr": 3e-2, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    }
    run = {"total_training_steps": 3, "train_batch_size": 4, "placement": "local", "threads": 1}
    config = RLConfig.model_validate(values | {"trainer": run | changes})
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40, lora=settings)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def base_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """All but the adapters: packed matrices and their scales, embeddings, norms, biases."""
    return {name: t for name, t in weights(model).items() if ".lora_" not in name}


def merged_change(run: Path, start: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """Check what a run wrote: its base is that of `start`, bit for bit; return its policy."""
    policy = load_policy_model(run / "adapter", "float32", lora(kind, rank=0, from_folder=True))
    wanted, got = base_of(start), base_of(policy)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    # The run merged its own base, in its own memory, with its adapters.
    saved, expected = weights(load_model(run)), weights(merged_copy(policy))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    moved = adapter_parameters(policy)
    first = adapter_parameters(start)
    assert moved.keys() == first.keys()
    assert not any(torch.equal(moved[name], first[name]) for name in moved)
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_adapters_on_a_quantised_base(
    start_folder: Path, tmp_path: Path, kind: Kind
) -> None:
    with trainer(start_folder, lora(kind)) as subject:
        subject.fit()
        prompts = subject.source.prompts.encode(arithmetic_rows(6))
        said = subject.roles.rollout.generate(prompts).result()
        subject.save(tmp_path / "out")
    assert all(row["actor/grad_norm"] > 0 for row in subject.history)
    start = load_policy_model(start_folder, "float32", lora(kind), seed=0)
    assert any(isinstance(module, QuantizedLinear) for module in start.modules())
    policy = merged_change(tmp_path / "out", start, kind)

    def apart(model: PreTrainedModel) -> float:
        with torch.no_grad():
            theirs = response_log_probs(model, said, 1.0)
        return float((said["rollout_log_probs"] - theirs)[said["response_mask"] > 0].abs().max())

    dense = load_model(start_folder)
    exact = load_policy_model(tmp_path / "out/adapter", "float32", LoRAConfig(from_folder=True))
    assert apart(policy) < 1e-4, "rollout samples from the quantised base and the adapters"
    assert min(apart(model) for model in (start, dense, exact)) > 10 * apart(policy)


def result(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith(("perf/", "checkpoint/"))}


def test_a_resumed_run_is_the_uninterrupted_one(start_folder: Path, tmp_path: Path) -> None:
    changes = {"save_freq": 1, "total_training_steps": 2}
    with trainer(start_folder, lora("nf4"), **changes) as whole:
        whole.fit()
        whole.save(tmp_path / "whole")
    with trainer(start_folder, lora("nf4"), **changes) as first:
        first.fit(1, checkpoint_dir=tmp_path / "ckpt")
    found = find_latest(tmp_path / "ckpt")
    assert found is not None
    [saved] = read_role_states(found.folder, "actor")
    adapters = adapter_parameters(load_policy_model(start_folder, "float32", lora("nf4")))
    assert saved.get("model").keys() == adapters.keys(), "only adapters are saved"
    with trainer(start_folder, lora("nf4"), **changes) as second:
        second.fit(checkpoint_dir=tmp_path / "ckpt")
        second.save(tmp_path / "resumed")
    for row, same in zip(whole.history, second.history, strict=True):
        assert result(row) == result(same)
    a, b = (weights(load_model(tmp_path / name)) for name in ("whole", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_rollout_ahead_has_a_quantised_copy_that_follows(
    start_folder: Path, tmp_path: Path
) -> None:
    with trainer(start_folder, lora("nf4"), mode="one_step_off", threads=2) as subject:
        subject.fit()
        subject.save(tmp_path / "out")
    start = load_policy_model(start_folder, "float32", lora("nf4"), seed=0)
    merged_change(tmp_path / "out", start, "nf4")
    weighed = [row["rollout_corr/rollout_is_mean"] for row in subject.history]
    assert weighed[0] == pytest.approx(1.0, abs=1e-4), "the copy's base and adapters are the same"
    assert all(0.5 < mean < 2.0 for mean in weighed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_start_trains_adapters_on_a_quantised_base(
    start_folder: Path, tmp_path: Path, kind: Kind
) -> None:
    settings = lora(kind, rank=16, dropout=0.05)
    model = load_policy_model(start_folder, "float32", settings, seed=0)
    start = load_policy_model(start_folder, "float32", settings, seed=0)
    before = base_of(model)
    rows = [SFTExample(p, r) for p, r in zip(*random_completions(6), strict=True)]
    config = SFTConfig.model_validate(
        {"threads": 1, "max_steps": 16, "train_batch_size": 6, "optim": {"lr": 3e-2}}
    )
    losses: list[float] = []
    subject = SFTTrainer(model, 0, config, seed=0)
    subject.on_step = lambda step, total, metrics: losses.append(metrics["sft/loss"])
    subject.fit(rows, [])
    assert losses[-1] < losses[0] / 4
    after = base_of(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    save_model(model, load_tokenizer(start_folder), tmp_path / "out")
    merged_change(tmp_path / "out", start, kind)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert subject.validation_loss(rows) == pytest.approx(
        SFTTrainer(plain, 0, config, seed=0).validation_loss(rows), abs=1e-3
    )
