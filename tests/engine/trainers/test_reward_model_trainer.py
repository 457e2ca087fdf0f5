"""The trainers of reward models and of process rewards."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from tiny_engine import random_completions, tiny_model, write_tiny_folder
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from engine import ProcessRewardTrainer, RewardModelTrainer, read_steps
from engine.config import LoRAConfig, RewardModelTrainingConfig
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import (
    PairExample,
    StepExample,
    collate_scored,
    collate_steps,
    read_reward_pairs,
)
from engine.errors import ConfigError, DataError, RewardError
from engine.rewards.model_based import process_reward_model, reward_model
from engine.runtime.policy_runtime import StartModel
from engine.trainers.preference_learning import LikelihoodRewardTrainer, calibration_error

pytestmark = pytest.mark.usefixtures("one_thread")


def pairs(count: int, seed: int = 0, better: int = 5) -> list[PairExample]:
    """Pairs whose chosen conversation has the token `better`, and the rejected one doesn't."""
    prompts, texts = random_completions(count, seed)
    plain = [[token if token != better else 6 for token in ids] for ids in texts]
    return [
        PairExample(p, [better, *ids], [7, *ids], margin=0.2 * (i % 2))
        for i, (p, ids) in enumerate(zip(prompts, plain, strict=True))
    ]


def trainer(model: Any, **changes: Any) -> RewardModelTrainer:
    values = {"threads": 1, "train_batch_size": 8, "optim": {"lr": 1e-2}, "max_steps": 6}
    config = RewardModelTrainingConfig.model_validate(values | changes)
    return RewardModelTrainer(model, 0, config, seed=0)


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradients_in_float64(packing: bool) -> None:
    subject = trainer(tiny_model("qwen2"), center_rewards_coefficient=0.1, packing=packing)
    worker = subject._ranks
    critic: Any = worker.sharded.module
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 32)[None])
    exact = copy.deepcopy(tiny_model("qwen2")).double().base_model
    head = critic.head.weight.detach().double().requires_grad_(True)
    rows = pairs(5)

    def score(ids: list[int]) -> torch.Tensor:
        return (exact(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] * head[0]).sum()

    losses = []
    for row in rows:
        chosen, rejected = (score([*row.prompt_ids, *ids]) for ids in row.responses)
        gap = chosen - rejected - row.margin
        losses.append(F.softplus(-gap) + 0.1 * (chosen + rejected) ** 2)
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
    metrics = worker.update(collate_scored(rows, 0))
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(found.pop("head.weight").double(), head.grad, rtol=1e-4, atol=1e-5)
    assert found.keys() == {f"backbone.{n}" for n, _ in exact.named_parameters()}
    for name, p in exact.named_parameters():
        torch.testing.assert_close(found[f"backbone.{name}"].double(), p.grad, rtol=1e-4, atol=1e-5)


def test_it_ranks_held_out_pairs() -> None:
    subject = trainer(tiny_model("qwen2"), max_steps=40)
    before = subject.validate(pairs(60, seed=3))
    final = subject.fit(pairs(64), pairs(60, seed=3))
    assert before["loss"] == pytest.approx(
        0.747, abs=0.01
    )  # a new head scores 0; margins 0 and 0.2
    assert final["reward_model/validation_accuracy"] > 0.9
    low, high = (final[f"reward_model/validation_accuracy_{end}"] for end in ("low", "high"))
    assert low < final["reward_model/validation_accuracy"] <= high
    assert final["reward_model/validation_loss"] < 0.3


def test_calibration_is_the_gap_between_confidence_and_accuracy() -> None:
    certain = torch.tensor([50.0, 50.0, 50.0, -50.0], dtype=torch.float64)
    assert calibration_error(certain) == pytest.approx(0.25)
    odds = torch.full((4,), 1.0986122886681098, dtype=torch.float64)  # σ is 0.75
    odds[0] = -odds[0]
    assert calibration_error(odds) == pytest.approx(0.0, abs=1e-12)


def test_a_run_that_is_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, again = (trainer(tiny_model("llama"), save_freq=3) for _ in range(2))
    wanted = whole.fit(pairs(10))
    first = trainer(tiny_model("llama"), save_freq=3)

    def stop(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 4:
            raise KeyboardInterrupt

    first.on_step = stop
    with pytest.raises(KeyboardInterrupt):
        first.fit(pairs(10), [], tmp_path)
    found = again.fit(pairs(10), [], tmp_path)
    assert found["reward_model/loss"] == wanted["reward_model/loss"]
    own, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_its_folder_is_the_reward_model_of_rl(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    tokenizer = load_tokenizer(start)
    draw = random.Random(0)
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"#### {a + b}", "rejected": f"#### {a + b + 1} or so"}
        for a, b in ((draw.randrange(20), draw.randrange(20)) for _ in range(24))
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    examples = read_reward_pairs(str(tmp_path / "pairs.jsonl"), tokenizer)
    subject = trainer(StartModel(str(start), "float32"), max_steps=20)
    subject.fit(examples)
    subject.save(tmp_path / "reward", start)
    wanted = subject.scores(examples)
    for column, side in enumerate(("chosen", "rejected")):
        found = reward_model(
            [row["prompt"] for row in rows],
            [row[side] for row in rows],
            model=str(tmp_path / "reward"),
        )
        assert found == pytest.approx(wanted[:, column].tolist(), abs=1e-4)
    assert (wanted[:, 0] > wanted[:, 1]).all()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert type(again).__name__ == "Qwen2ForSequenceClassification"
    assert again.config.num_labels == 1
    assert again.config.pad_token_id == tokenizer.pad_token_id


def test_adapters_and_the_head_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    lora = StartModel(str(start), "float32", LoRAConfig(rank=4, dropout=0.1), seed=3)
    whole, first, again = (trainer(lora, save_freq=2) for _ in range(3))
    frozen = [p.clone() for p in whole.model.parameters() if not p.requires_grad]
    whole.fit(pairs(10))

    def stop(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 4:
            raise KeyboardInterrupt

    first.on_step = stop
    with pytest.raises(KeyboardInterrupt):
        first.fit(pairs(10), [], tmp_path / "checkpoints")
    again.fit(pairs(10), [], tmp_path / "checkpoints")
    own, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    trained = [name for name, p in whole.model.named_parameters() if p.requires_grad]
    assert all(".lora_" in name or name == "head.weight" for name in trained)
    kept = [p for p in whole.model.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, kept, strict=True))

    whole.save(tmp_path / "reward", start)
    rows = pairs(6, seed=9)
    wanted = whole.scores(rows)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    base = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    base.config.pad_token_id = merged.config.pad_token_id
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "reward" / "adapter"))
    for model in (merged.eval(), adapted.eval()):
        for row, scores in zip(rows, wanted, strict=True):
            for ids, score in zip(row.responses, scores.tolist(), strict=True):
                with torch.no_grad():
                    found = model(input_ids=torch.tensor([[*row.prompt_ids, *ids]])).logits
                assert found.item() == pytest.approx(score, abs=1e-4)


def test_a_policy_s_adapters_are_refused(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    with pytest.raises(ConfigError, match=r"a reward model has new adapters \(model\.lora\.rank"):
        trainer(StartModel(str(start), "float32", LoRAConfig(from_folder=True)))


def test_a_language_model_learns_to_rank_by_its_log_probs(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    values = {"head": "likelihood", "threads": 1, "train_batch_size": 8, "optim": {"lr": 1e-2}}
    config = RewardModelTrainingConfig.model_validate(values | {"max_steps": 20})
    model = StartModel(str(start), "float32")
    with LikelihoodRewardTrainer(model, 0, config, seed=0) as subject:
        before = subject.validate(pairs(60, seed=3))
        final = subject.fit(pairs(64), pairs(60, seed=3))
        subject.save(tmp_path / "reward", start)
    assert before["accuracy"] < 0.7
    assert final["reward_model/validation_accuracy"] > 0.9
    assert final["reward_model/validation_loss"] < 0.3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "reward")
    row = pairs(1)[0]
    [wanted] = subject.scores([row]).tolist()
    found = []
    for ids in row.responses:
        whole = torch.tensor([[*row.prompt_ids, *ids]])
        with torch.no_grad():
            logs = again(input_ids=whole).logits.log_softmax(2)[0, len(row.prompt_ids) - 1 : -1]
        found.append(float(logs.gather(1, torch.tensor(ids)[:, None]).sum()))
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_language_model_s_adapters_are_trained_merged_and_resumed(tmp_path: Path) -> None:
    start = write_tiny_folder(tmp_path / "start")
    values = {"head": "likelihood", "threads": 1, "train_batch_size": 8, "optim": {"lr": 1e-2}}
    config = RewardModelTrainingConfig.model_validate(values | {"max_steps": 4, "save_freq": 2})
    lora = StartModel(str(start), "float32", LoRAConfig(rank=4), seed=3)
    whole, first, again = (LikelihoodRewardTrainer(lora, 0, config, seed=0) for _ in range(3))
    frozen = [p.clone() for p in whole.model.parameters() if not p.requires_grad]
    whole.fit(pairs(10))

    def stop(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    first.on_step = stop
    with pytest.raises(KeyboardInterrupt):
        first.fit(pairs(10), [], tmp_path / "checkpoints")
    again.fit(pairs(10), [], tmp_path / "checkpoints")
    own, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    kept = [p for p in whole.model.parameters() if not p.requires_grad]
    assert len(kept) == len(frozen) > 0
    assert all(torch.equal(a, b) for a, b in zip(frozen, kept, strict=True))

    whole.save(tmp_path / "reward", start)
    assert (tmp_path / "reward" / "adapter" / "adapter_config.json").is_file()
    rows = pairs(6, seed=9)
    merged = StartModel(str(tmp_path / "reward"), "float32")
    with LikelihoodRewardTrainer(merged, 0, config, seed=0) as loaded:
        torch.testing.assert_close(loaded.scores(rows), whole.scores(rows), rtol=1e-4, atol=1e-4)
    assert (
        whole.scores(rows) != LikelihoodRewardTrainer(lora, 0, config, seed=0).scores(rows)
    ).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"head": "likelihood", "center_rewards_coefficient": 0.1}, "is of a score's loss"),
        ({"sft_weight": 0.5}, "sft_weight=0.5 needs head=likelihood"),
    ],
)
def test_a_setting_of_another_head_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RewardModelTrainingConfig.model_validate(values)


def process_trainer(model: Any, **changes: Any) -> ProcessRewardTrainer:
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
def test_loss_and_gradients_of_steps_in_float64(packing: bool) -> None:
    subject = process_trainer(tiny_model("qwen2"), packing=packing)
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
    subject = process_trainer(tiny_model("qwen2"), max_steps=60)
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
    subject = process_trainer(StartModel(str(start), "float32", lora), max_steps=12)
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
