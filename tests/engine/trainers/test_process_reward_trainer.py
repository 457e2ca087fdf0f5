"""Process rewards: the loss in float64, held-out steps, and a folder that a reward loads."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import tiny_model, write_tiny_folder
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification

from engine import ProcessRewardTrainer, read_steps
from engine.config import LoRAConfig, RewardModelTrainingConfig
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import StepExample, collate_steps
from engine.errors import ConfigError, DataError, RewardError
from engine.rewards.model_based import process_reward_model
from engine.runtime.policy_runtime import StartModel
from engine.trainers.preference_learning import RewardModelTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def trainer(model: Any, **changes: Any) -> ProcessRewardTrainer:
    values = {"threads": 1, "train_batch_size": 8, "optim": {"lr": 1e-2}, "max_steps": 6}
    config = RewardModelTrainingConfig.model_validate({"head": "token"} | values | changes)
    return ProcessRewardTrainer(model, 0, config, seed=0)


def solutions(count: int, seed: int = 0) -> list[StepExample]:
    """Steps of three tokens; a step with token 5 in its middle is wrong."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        labels = [draw.random() < 0.5 for _ in range(draw.randrange(1, 4))]
        ids = [
            token
            for right in labels
            for token in (draw.randrange(10, 40), 6 if right else 5, draw.randrange(40, 60))
        ]
        prompt = [3, draw.randrange(60, 90), *ids[:2]]
        found.append(StepExample(prompt, ids[2:], [3 * i for i in range(len(labels))], labels))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradients_in_float64(packing: bool) -> None:
    subject = trainer(tiny_model("qwen2"), packing=packing)
    worker = subject._ranks
    critic: Any = worker.sharded.module
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
        critic.head.bias.fill_(0.1)
    exact = copy.deepcopy(tiny_model("qwen2")).double().base_model
    weight = critic.head.weight.detach().double().requires_grad_(True)
    bias = critic.head.bias.detach().double().requires_grad_(True)
    rows, losses = solutions(5), []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        states = exact(input_ids=ids).last_hidden_state[0]
        for end, label in zip(row.ends, row.labels, strict=True):
            score = states[len(row.prompt_ids) + end] @ weight[0] + bias[0]
            losses.append(F.softplus(-score if label else score))
    wanted = torch.stack(losses).mean()
    wanted.backward()
    worker.begin(1)
    found: dict[str, torch.Tensor] = {}

    def step() -> float:
        found.update(
            {n: p.grad.clone() for n, p in critic.named_parameters() if p.grad is not None}
        )
        return 0.0

    worker.train_state.optimizer.step = step  # type: ignore[method-assign]
    metrics = worker.update_steps(collate_steps(rows, 0))
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    for name, p in (("head.weight", weight), ("head.bias", bias)):
        torch.testing.assert_close(found.pop(name).double(), p.grad, rtol=1e-4, atol=1e-5)
    for name, p in exact.named_parameters():
        torch.testing.assert_close(found[f"backbone.{name}"].double(), p.grad, rtol=1e-4, atol=1e-5)


def test_it_judges_held_out_steps() -> None:
    subject = trainer(tiny_model("qwen2"), max_steps=60)
    final = subject.fit(solutions(128), solutions(60, seed=3))
    accuracy = final["reward_model/validation_accuracy"]
    low, high = (final[f"reward_model/validation_accuracy_{end}"] for end in ("low", "high"))
    assert accuracy > 0.9
    assert low < accuracy <= high
    assert final["reward_model/validation_solution_accuracy"] > 0.8


def words(folder: Path, count: int = 24) -> Path:
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(20), draw.randrange(20)
        right = [draw.random() < 0.5 for _ in range(2)]
        texts = [f"{a}+{b}={a + b if ok else a + b + 7}" for ok in right]
        rows.append(
            {"prompt": f"{a}+{b}", "completions": [*texts, "#### 7"]}
            | {"labels": [*right, draw.random() < 0.5]}
        )
    path = folder / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("rank", [0, 4])
def test_its_folder_is_a_reward(tmp_path: Path, rank: int) -> None:
    start = write_tiny_folder(tmp_path / "start")
    examples = read_steps(str(words(tmp_path)), load_tokenizer(start))
    lora = LoRAConfig(rank=rank)
    subject = trainer(StartModel(str(start), "float32", lora), max_steps=12)
    subject.fit(examples)
    subject.save(tmp_path / "reward", start)
    wanted = [scores.sigmoid() for scores in subject.scores(examples)]
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    reductions = {"min": torch.min, "mean": torch.mean, "product": torch.prod}
    for name, reduce in reductions.items():
        found = process_reward_model(
            [row["prompt"] for row in rows],
            ["\n".join(row["completions"]) for row in rows],
            model=str(tmp_path / "reward"),
            reduce=name,  # type: ignore[arg-type]
        )
        assert found == pytest.approx([float(reduce(one)) for one in wanted], abs=1e-4)
    nothing = process_reward_model(["1+1"], ["\n"], model=str(tmp_path / "reward"))
    assert nothing == [0.0]
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "reward")
    assert (type(again).__name__, again.config.num_labels) == ("Qwen2ForTokenClassification", 1)
    assert again.config.step_separator == "\n"
    assert (tmp_path / "reward" / "adapter").exists() == bool(rank)


def test_what_is_no_steps_or_no_such_model_is_named(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    bad = {
        "'completions' is 'a'": {"completions": "a", "labels": [True]},
        "'labels' is .* for 2 steps": {"completions": ["a", "b"], "labels": [True]},
        "no column 'labels'": {"completions": ["a"]},
    }
    for message, row in bad.items():
        (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "1+1"} | row))
        with pytest.raises(DataError, match=message):
            read_steps(str(tmp_path / "bad.jsonl"), load_tokenizer(start))
    config = RewardModelTrainingConfig()
    with pytest.raises(ConfigError, match="learns from pairs by RewardModelTrainer"):
        ProcessRewardTrainer(tiny_model("qwen2"), 0, config, seed=0)
    config = RewardModelTrainingConfig(head="token")
    with pytest.raises(ConfigError, match="learns from steps by ProcessRewardTrainer"):
        RewardModelTrainer(tiny_model("qwen2"), 0, config, seed=0)
    with pytest.raises(RewardError, match="2 labels a token"):
        process_reward_model(["1+1"], ["2"], model=str(start))
