"""RL of adapters, quantised bases among them."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from thorough import and_slow
from tiny_engine import (
    arithmetic_rows,
    random_completions,
    response_log_probs,
    tiny_model,
    training_batch,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import Batch
from engine.checkpoint import find_latest
from engine.checkpoint.format import read_role_states
from engine.config import ActorConfig, LoRAConfig, RLConfig, RolloutConfig, SFTConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError, ConfigError, WorkerError
from engine.models import (
    adapter_parameters,
    add_adapters,
    load_model,
    load_policy_model,
    save_model,
)
from engine.models.lora import merged_copy
from engine.models.quantize import QuantizedLinear
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import register_engine
from engine.trainers.offline import SFTExample, SFTTrainer
from engine.trainers.rl import RLTrainer
from engine.workers.actor import ActorWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import ProcessState, WorkerContext
from engine.workers.rollout_worker import RolloutWorker

pytestmark = pytest.mark.usefixtures("one_thread")


LORA = LoRAConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def start_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head, which adapters leave as it is, can say more than "all about alike"."""
    model = load_model(tiny_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4.0)
    folder = tmp_path_factory.mktemp("sharp") / "model"
    return save_model(model, load_tokenizer(tiny_folder), folder)


def actor(folder: Path, process: ProcessState, lora: LoRAConfig = LORA, **kl: Any) -> ActorWorker:
    values = {"use_kl_loss": False, "optim": {"lr": 1e-2}, "max_tokens_per_micro_batch": 64}
    return ActorWorker(
        WorkerContext("actor", process=process),
        model_path=str(folder),
        config=ActorConfig.model_validate(values | kl),
        temperature=0.9,
        total_steps=10,
        seed=0,
        lora=lora,
    )


def reference(folder: Path, process: ProcessState) -> ReferenceWorker:
    return ReferenceWorker(
        WorkerContext("reference", process=process),
        model_path=str(folder),
        temperature=0.9,
        max_tokens_per_micro_batch=64,
        base_of_policy=True,
    )


def rollout(
    folder: Path, process: ProcessState, lora: LoRAConfig = LORA, lora_way: str = ""
) -> RolloutWorker:
    return RolloutWorker(
        WorkerContext("rollout", process=process),
        model_path=str(folder),
        config=RolloutConfig.model_validate({"n": 2, "lora": lora_way}),
        max_response_length=6,
        max_model_len=40,
        seed=0,
        lora=lora,
    )


def prompts() -> Batch:
    found, _ = random_completions(4)
    return Batch({"group_ids": torch.arange(4)}, {"prompt_ids": found})


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def parameters_alive() -> int:
    gc.collect()
    return sum(o.numel() for o in gc.get_objects() if isinstance(o, nn.Parameter))


@pytest.mark.slow
def test_the_reference_is_the_shared_base_before_and_after_updates(start_folder: Path) -> None:
    batch, process = training_batch(9), ProcessState()
    start = reference(start_folder, ProcessState()).log_probs(batch)["ref_log_probs"]
    policy = actor(start_folder, process)
    before, base = parameters_alive(), copies(policy.sharded.module)
    subject = reference(start_folder, process)
    assert torch.equal(subject.log_probs(batch)["ref_log_probs"], start)
    assert parameters_alive() == before
    for _ in range(2):
        assert policy.update(batch)["actor/grad_norm"] > 0
        ours = policy.log_probs(batch)["old_log_probs"]
        assert (ours - start).abs().max() > 1e-3
        assert torch.equal(subject.log_probs(batch)["ref_log_probs"], start)
        assert torch.equal(policy.log_probs(batch)["old_log_probs"], ours)
    own = set(adapter_parameters(policy.sharded.module))
    for name, tensor in policy.sharded.module.state_dict().items():
        assert torch.equal(tensor, base[name]) == (name not in own), name


@pytest.mark.parametrize("kind", ["full", "low_var_kl"])
def test_a_kl_loss_to_the_shared_base_trains_as_one_to_a_copy(
    start_folder: Path, kind: str
) -> None:
    batch, results = training_batch(9), []
    for own in (False, True):
        process = ProcessState()
        policy = actor(start_folder, process, use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=0.5)
        subject = reference(start_folder, ProcessState() if own else process)
        process.reference = subject.sharded
        facts = [policy.update(batch | subject.log_probs(batch)) for _ in range(2)]
        results.append((facts, copies(policy.sharded.module), subject.full_kl if not own else None))
    (facts, weights, full_kl), (same_facts, same_weights, _) = results
    assert facts == same_facts
    assert facts[1]["actor/kl"] > 0
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert full_kl is not None
    assert full_kl(batch)["ref_kl"].sum() > 0


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_rollout_beside_the_actor_and_elsewhere_follows_updates(
    start_folder: Path, way: str
) -> None:
    process, other = ProcessState(), ProcessState()
    policy, here = actor(start_folder, process), rollout(start_folder, process, lora_way=way)
    there = rollout(start_folder, other, lora_way=way)
    for _ in range(3):
        policy.update(training_batch(9))
    packed = policy.weights()
    count = sum(p.numel() for p in adapter_parameters(policy.sharded.module).values())
    assert packed["weights"].numel() == 4 * count, "only adapters travel"
    assert there.load_weights(packed) == 3
    first, second = here.generate(prompts()), there.generate(prompts())
    assert torch.equal(first["responses"], second["responses"])
    assert torch.equal(first["rollout_log_probs"], second["rollout_log_probs"])
    policy.temperature = 1.0
    wanted = policy.log_probs(first)["old_log_probs"]
    assert (first["rollout_log_probs"] - wanted).abs().max() < 1e-4
    start = reference(start_folder, ProcessState())
    start.temperature = 1.0
    assert (start.log_probs(first)["ref_log_probs"] - wanted).abs().max() > 1e-2
    plain = rollout(start_folder, ProcessState(), LoRAConfig())
    with pytest.raises(WorkerError, match="same model folder, dtype and adapters"):
        plain.load_weights(packed)


def test_state_moves_to_another_actor_with_the_same_adapters(start_folder: Path) -> None:
    batch, first = training_batch(9), actor(start_folder, ProcessState())
    first.update(batch)
    kept = copies(first.sharded.module)
    second = actor(start_folder, ProcessState())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(t, kept[name]) for name, t in second.sharded.module.state_dict().items())
    assert first.update(batch) == second.update(batch)
    for name, tensor in first.sharded.module.state_dict().items():
        assert torch.equal(tensor, second.sharded.module.state_dict()[name])
    with pytest.raises(CheckpointError, match=r"alpha=8.0, this run has 9.0"):
        actor(start_folder, ProcessState(), LoRAConfig(rank=4, alpha=9.0)).load_state_dict(
            first.state_dict()
        )
    with pytest.raises(CheckpointError, match="of another model"):
        actor(start_folder, ProcessState(), LoRAConfig(rank=2, alpha=8.0)).load_state_dict(
            first.state_dict()
        )
    with pytest.raises(CheckpointError, match="of another model"):
        actor(start_folder, ProcessState(), LoRAConfig()).load_state_dict(first.state_dict())


def trainer(folder: Path, lora: LoRAConfig = LORA, **changes: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {"optim": {"lr": 3e-2, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 8},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 8,
            "train_batch_size": 8,
            "placement": "local",
            "threads": 2,
        },
    }
    for section, content in changes.items():
        values[section] = values.get(section, {}) | content
    settings = RLConfig.model_validate(values)
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), settings.trainer.train_batch_size, 0)
    return RLTrainer(folder, settings, loader, max_response_length=6, max_model_len=40, lora=lora)


def test_a_run_learns_and_saves_what_it_learned(start_folder: Path, tmp_path: Path) -> None:
    with trainer(start_folder, actor={"kl_loss_type": "full"}) as subject:
        subject.fit()
        subject.save(tmp_path / "out")
        encoded = subject.source.prompts.encode(arithmetic_rows(5))
        said = subject.roles.rollout.generate_greedy(encoded).result()
    rewards = [row["reward/mean"] for row in subject.history]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3
    assert all(row["actor/grad_norm"] > 0 for row in subject.history)
    assert subject.history[0]["actor/kl"] == pytest.approx(0.0, abs=1e-6)
    assert subject.history[-1]["actor/kl"] > 1e-4
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    start = load_model(start_folder).state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, start[name]) == (not name.endswith("proj.weight")), name
    eos = load_tokenizer(tmp_path / "out").eos_token_id
    for row, prompt in enumerate(encoded.columns["prompt_ids"]):
        theirs = plain.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        length = int(said["response_mask"][row].sum())
        ours = said["responses"][row, :length].tolist()
        assert theirs[0, len(prompt) : len(prompt) + length].tolist() == ours
        assert length == 6 or ours[-1] == eos


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_local_and_ray_give_equal_runs(start_folder: Path) -> None:
    histories = []
    for placement in ("local", "ray"):
        with trainer(
            start_folder, trainer={"placement": placement, "mode": "one_step_off", "threads": 2}
        ) as subject:
            subject.fit(3)
            rows = subject.history
        histories.append(
            [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]
        )
    assert histories[0] == histories[1]


@pytest.mark.parametrize("mode", and_slow(["one_step_off"], ["async"]))
def test_rollout_ahead_learns_with_adapters(start_folder: Path, mode: str) -> None:
    with trainer(start_folder, trainer={"mode": mode}) as subject:
        subject.fit()
    rewards = [row["reward/mean"] for row in subject.history]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3
    last = subject.history[-1]
    assert last["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.3)


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    start_folder: Path, tmp_path: Path
) -> None:
    changes = {"algorithm": {"adv_estimator": "gae"}, "trainer": {"total_training_steps": 2}}
    changes["trainer"] |= {"train_batch_size": 4, "save_freq": 1}
    histories = []
    with trainer(start_folder, **changes) as whole:
        whole.fit()
        whole.save(tmp_path / "whole")
        histories.append(whole.history)
    with trainer(start_folder, **changes) as first:
        first.fit(1, checkpoint_dir=tmp_path / "ckpt")
    with trainer(start_folder, **changes) as second:
        second.fit(checkpoint_dir=tmp_path / "ckpt")
        second.save(tmp_path / "resumed")
        histories.append(second.history)
    assert all("critic/grad_norm" in row for row in histories[0])
    for row, same in zip(*histories, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith("perf/")} == {
            k: v for k, v in same.items() if not k.startswith(("perf/", "checkpoint/"))
        }
    a, b = (load_model(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_engines_that_know_no_adapters_are_refused(start_folder: Path) -> None:
    @register_engine("without_adapters")
    class WithoutAdapters(NativeEngine):
        pass

    with pytest.raises(ConfigError, match=r"rank=4 with rollout.engine=without_adapters.*native"):
        trainer(start_folder, rollout={"engine": "without_adapters"})


def test_the_warm_start_trains_adapters() -> None:
    model = tiny_model("qwen2")
    add_adapters(model, LORA.model_copy(update={"rank": 16, "dropout": 0.05}), seed=0)
    base = copies(model)
    rows = [SFTExample(p, r) for p, r in zip(*random_completions(6), strict=True)]
    settings = SFTConfig.model_validate(
        {"threads": 1, "max_steps": 25, "train_batch_size": 6, "optim": {"lr": 3e-2}}
    )
    losses: list[float] = []
    subject = SFTTrainer(model, 0, settings, seed=0)
    subject.on_step = lambda step, total, metrics: losses.append(metrics["sft/loss"])
    subject.fit(rows, [])
    assert losses[-1] < losses[0] / 4
    own = set(adapter_parameters(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, base[name]) == (name not in own), name


Kind = Literal["nf4", "int8"]


KINDS = ["nf4", "int8"]


def lora(kind: Kind, **changes: Any) -> LoRAConfig:
    return LoRAConfig.model_validate({"rank": 4, "alpha": 8.0, "quantize": kind} | changes)


@pytest.fixture(scope="module")
def qlora_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head, which adapters leave as it is, can say more than "all about alike"."""
    model = load_model(tiny_folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0 if "embed" in name or "proj" in name else 1.0)
    folder = tmp_path_factory.mktemp("sharp") / "model"
    return save_model(model, load_tokenizer(tiny_folder), folder)


def qlora_trainer(folder: Path, settings: LoRAConfig, **changes: Any) -> RLTrainer:
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
    qlora_folder: Path, tmp_path: Path, kind: Kind
) -> None:
    with qlora_trainer(qlora_folder, lora(kind)) as subject:
        subject.fit()
        prompts = subject.source.prompts.encode(arithmetic_rows(6))
        said = subject.roles.rollout.generate(prompts).result()
        subject.save(tmp_path / "out")
    assert all(row["actor/grad_norm"] > 0 for row in subject.history)
    start = load_policy_model(qlora_folder, "float32", lora(kind), seed=0)
    assert any(isinstance(module, QuantizedLinear) for module in start.modules())
    policy = merged_change(tmp_path / "out", start, kind)

    def apart(model: PreTrainedModel) -> float:
        with torch.no_grad():
            theirs = response_log_probs(model, said, 1.0)
        return float((said["rollout_log_probs"] - theirs)[said["response_mask"] > 0].abs().max())

    dense = load_model(qlora_folder)
    exact = load_policy_model(tmp_path / "out/adapter", "float32", LoRAConfig(from_folder=True))
    assert apart(policy) < 1e-4, "rollout samples from the quantised base and the adapters"
    assert min(apart(model) for model in (start, dense, exact)) > 10 * apart(policy)


def result(row: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in row.items() if not k.startswith(("perf/", "checkpoint/"))}


def test_a_resumed_run_is_the_uninterrupted_one(qlora_folder: Path, tmp_path: Path) -> None:
    changes = {"save_freq": 1, "total_training_steps": 2}
    with qlora_trainer(qlora_folder, lora("nf4"), **changes) as whole:
        whole.fit()
        whole.save(tmp_path / "whole")
    with qlora_trainer(qlora_folder, lora("nf4"), **changes) as first:
        first.fit(1, checkpoint_dir=tmp_path / "ckpt")
    found = find_latest(tmp_path / "ckpt")
    assert found is not None
    [saved] = read_role_states(found.folder, "actor")
    adapters = adapter_parameters(load_policy_model(qlora_folder, "float32", lora("nf4")))
    assert saved.get("model").keys() == adapters.keys(), "only adapters are saved"
    with qlora_trainer(qlora_folder, lora("nf4"), **changes) as second:
        second.fit(checkpoint_dir=tmp_path / "ckpt")
        second.save(tmp_path / "resumed")
    for row, same in zip(whole.history, second.history, strict=True):
        assert result(row) == result(same)
    a, b = (weights(load_model(tmp_path / name)) for name in ("whole", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_rollout_ahead_has_a_quantised_copy_that_follows(
    qlora_folder: Path, tmp_path: Path
) -> None:
    with qlora_trainer(qlora_folder, lora("nf4"), mode="one_step_off", threads=2) as subject:
        subject.fit()
        subject.save(tmp_path / "out")
    start = load_policy_model(qlora_folder, "float32", lora("nf4"), seed=0)
    merged_change(tmp_path / "out", start, "nf4")
    weighed = [row["rollout_corr/rollout_is_mean"] for row in subject.history]
    assert weighed[0] == pytest.approx(1.0, abs=1e-4), "the copy's base and adapters are the same"
    assert all(0.5 < mean < 2.0 for mean in weighed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_start_trains_adapters_on_a_quantised_base(
    qlora_folder: Path, tmp_path: Path, kind: Kind
) -> None:
    settings = lora(kind, rank=16, dropout=0.05)
    model = load_policy_model(qlora_folder, "float32", settings, seed=0)
    start = load_policy_model(qlora_folder, "float32", settings, seed=0)
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
    save_model(model, load_tokenizer(qlora_folder), tmp_path / "out")
    merged_change(tmp_path / "out", start, kind)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert subject.validation_loss(rows) == pytest.approx(
        SFTTrainer(plain, 0, config, seed=0).validation_loss(rows), abs=1e-3
    )
