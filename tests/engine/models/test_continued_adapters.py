"""Adapters of an earlier run, trained further as they are: what is read, checked and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tiny_engine import completions_batch, random_completions, response_log_probs
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import LoRAConfig, OptimConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, ModelError
from engine.models import (
    BaseModelView,
    adapter_parameters,
    has_adapters,
    load_model,
    load_policy_model,
    resolve_lora,
    save_model,
)
from engine.runtime.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

FROM_FOLDER = LoRAConfig(from_folder=True)


def log_probs(model: PreTrainedModel | BaseModelView) -> Tensor:
    return response_log_probs(model, completions_batch(*random_completions(5)), 1.0)


def train(model: PreTrainedModel, steps: int = 3) -> None:
    optimizer = Optimizer(model, OptimConfig(lr=3e-2), steps)
    for _ in range(steps):
        (-log_probs(model).mean()).backward()
        optimizer.step()


@pytest.fixture
def first(tiny_folder: Path, tmp_path: Path) -> PreTrainedModel:
    """A policy after a first run, saved in `tmp_path / "first"`."""
    lora = LoRAConfig(rank=3, alpha=5.0, target_modules=("q_proj", "down_proj"))
    model = load_policy_model(tiny_folder, "float32", lora)
    train(model)
    save_model(model, load_tokenizer(tiny_folder), tmp_path / "first")
    return model


def test_training_goes_on_with_the_same_adapters_on_the_same_base(
    first: PreTrainedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    second = load_policy_model(tmp_path / "first/adapter", "float32", FROM_FOLDER)
    ours, theirs = adapter_parameters(first), adapter_parameters(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {n for n, p in second.named_parameters() if p.requires_grad} == set(theirs)
    with torch.no_grad():
        assert torch.equal(log_probs(second), log_probs(first))
        assert torch.equal(log_probs(BaseModelView(second)), log_probs(load_model(tiny_folder)))
    train(second)
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours if ".lora_B." in name)
    save_model(second, load_tokenizer(tiny_folder), tmp_path / "second")
    config = json.loads((tmp_path / "second/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5.0)
    assert config["base_model_name_or_path"] == str(tiny_folder)
    peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second/adapter").eval()
    with torch.no_grad():
        assert torch.equal(log_probs(peft.base_model.model), log_probs(second))


def test_without_it_the_folder_is_merged(first: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "first/adapter"
    merged, fresh = (
        load_policy_model(folder, "float32"),
        load_policy_model(folder, "float32", LoRAConfig(rank=2)),
    )
    assert not has_adapters(merged)
    assert all(not p.any() for n, p in adapter_parameters(fresh).items() if ".lora_B." in n)
    with torch.no_grad():
        for model in (merged, fresh, BaseModelView(fresh)):
            torch.testing.assert_close(log_probs(model), log_probs(first), atol=1e-4, rtol=0)


def test_settings_are_the_folder_s(first: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "first/adapter"
    for asked in (FROM_FOLDER, LoRAConfig(from_folder=True, rank=3, dropout=0.1)):
        got = resolve_lora(folder, asked)
        assert (got.rank, got.alpha) == (3, 5.0)
        assert got.target_modules == ("down_proj", "q_proj")
        assert (got.from_folder, got.dropout) == (True, asked.dropout)
        assert resolve_lora(folder, got) == got
    plain = LoRAConfig(rank=7)
    assert resolve_lora(folder, plain) is plain


def test_a_regex_of_target_modules_stays_one(
    first: PreTrainedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    folder, regex = tmp_path / "first/adapter", r".*\.(q_proj|down_proj)"
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": regex}))
    assert resolve_lora(folder, FROM_FOLDER).target_modules == regex
    second = load_policy_model(folder, "float32", FROM_FOLDER)
    save_model(second, load_tokenizer(tiny_folder), tmp_path / "second")
    saved = tmp_path / "second/adapter"
    assert json.loads((saved / "adapter_config.json").read_text())["target_modules"] == regex
    with torch.no_grad():
        assert torch.equal(
            log_probs(load_policy_model(saved, "float32", FROM_FOLDER)), log_probs(first)
        )
        merged = load_policy_model(saved, "float32")
        torch.testing.assert_close(log_probs(merged), log_probs(first), atol=1e-4, rtol=0)


def test_dropout_is_the_run_s(first: PreTrainedModel, tmp_path: Path) -> None:
    lora = LoRAConfig(from_folder=True, dropout=0.5)
    model = load_policy_model(tmp_path / "first/adapter", "float32", lora)
    with torch.no_grad():
        quiet = log_probs(model)
        assert torch.equal(quiet, log_probs(first))
        assert not torch.equal(log_probs(model.train()), quiet)


def test_a_plain_folder_has_no_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    for path in (tiny_folder, tmp_path / "nowhere", "owner/name"):
        with pytest.raises(ConfigError, match=r"from_folder: model.path=.*no adapter_config.json"):
            load_policy_model(path, "float32", FROM_FOLDER)


def test_another_rank_is_refused(first: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank=8, but the adapters in .* have rank 3"):
        resolve_lora(tmp_path / "first/adapter", LoRAConfig(from_folder=True, rank=8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, ConfigError, r"not plain LoRA \(\['use_dora'\]\)"),
        ({"bias": "all"}, ConfigError, "not plain LoRA"),
        ({"target_modules": None}, ConfigError, r"not plain LoRA \(\['no target_modules'\]\)"),
        ({"target_parameters": ["w"]}, ConfigError, r"not plain LoRA \(\['target_parameters'\]\)"),
        ({"peft_type": "IA3"}, ConfigError, "not plain LoRA"),
        ({"r": 5}, ModelError, "don't fit their base"),
        ({"target_modules": ["q_proj"]}, ModelError, r"lack 0 weights and have 4 .*down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "o_proj"]}, ModelError, "lack 4 weights"),
        ({"target_modules": ["nothing"]}, ModelError, "don't fit their base"),
    ],
)
def test_folders_that_can_t_be_continued_are_refused(
    first: PreTrainedModel, tmp_path: Path, change: dict[str, Any], error: Any, message: str
) -> None:
    folder = tmp_path / "first/adapter"
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=message):
        load_policy_model(folder, "float32", FROM_FOLDER)
