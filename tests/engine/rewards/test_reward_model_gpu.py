"""The reward model on a GPU: there, in bfloat16, with the CPU's scores; skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

from engine.config import RewardConfig
from engine.data.tokenizer import load_tokenizer
from engine.rewards import Scorer, model_based
from engine.rewards import model_based as reward_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
TEXTS = ["4", "5 or so", "a long answer that says nothing at all"]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A random classifier with one score, and a tokenizer."""
    tokenizer = load_tokenizer(tiny_folder)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_labels=1,
        initializer_range=0.2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForSequenceClassification(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def scores(folder: Path, reward: str = "reward_model", **options: str) -> list[float]:
    settings = {"model": str(folder)} | options
    scorer = Scorer(RewardConfig(name=reward, options=settings))
    try:
        found = scorer.score(["2+2?"] * len(TEXTS), TEXTS, {"ground_truth": ["4"] * len(TEXTS)})
    finally:
        scorer.close()
    assert not found.failures
    return [row[0] for row in found.rows]


def test_every_parameter_is_on_the_device(folder: Path) -> None:
    found = scores(folder)
    loaded = reward_models.load_scoring_model("SequenceClassification", str(folder), "", "")
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert found == pytest.approx(scores(folder, device="cpu", dtype="float32"), abs=0.1)


def test_a_model_of_steps_is_there_too(folder: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    shape = LlamaConfig.from_pretrained(folder, num_labels=1)
    LlamaForTokenClassification(shape).save_pretrained(steps)
    load_tokenizer(folder).save_pretrained(steps)
    found = scores(steps, reward="process_reward_model")
    loaded = model_based.load_scoring_model("TokenClassification", str(steps), "", "")
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    there = scores(steps, reward="process_reward_model", device="cpu", dtype="float32")
    assert found == pytest.approx(there, abs=0.1)


def test_another_device_can_be_asked_for(folder: Path) -> None:
    scores(folder, device="cpu")
    loaded = reward_models.load_scoring_model("SequenceClassification", str(folder), "", "cpu")
    assert {p.device.type for p in loaded.model.parameters()} == {"cpu"}
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
