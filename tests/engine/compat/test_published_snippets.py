"""Snippets as articles print them, run on a tiny model: what `docs/migration.md` says they do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from tiny_engine import arithmetic_rows
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    OPTConfig,
    OPTForCausalLM,
    TrainingArguments,
)

import engine
from engine import (
    DataPipeline,
    DeviceMesh,
    HybridActor,
    RLTrainer,
    Trainer,
    create_critic_model,
    make_rl_data_loader,
    measure_switch_overhead,
)
from engine.compat.hf_trainer import read_settings
from engine.compat.rl_trainer import model_scores
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RewardError

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
    "lr": 5e-3,
    "num_generations": 4,
    "max_new_tokens": 6,
    "mini_batch_size": 8,
    "dtype": "float32",
    "threads": 1,
    "max_steps": 2,
}


class Lengths(nn.Module):
    """A reward model of one's own: longer conversations score more."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(scores=attention_mask.sum(1).float() / input_ids.shape[1])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of prompts."""
    rows = "".join(json.dumps(row) + "\n" for row in arithmetic_rows(8))
    (tmp_path / "data.jsonl").write_text(rows)
    return tmp_path / "data.jsonl"


def weights(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model: Any, before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_the_version_is_that_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert engine.__version__ == project["version"]


def test_a_hybrid_actor_of_a_model_generates_and_learns(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    turned = nn.Parameter(model.lm_head.weight.detach().t().contiguous().t())
    model.lm_head.weight = turned
    assert not model.lm_head.weight.is_contiguous()
    hybrid_actor = HybridActor(
        model=model, hybrid_config={"tp_size": 1, "fsdp_sharding": "FULL_SHARD"}, contiguous=True
    )
    assert model.lm_head.weight.is_contiguous()
    hybrid_actor.eval()
    ids = torch.tensor([[5, 6, 7]])
    sequences = hybrid_actor.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4
    )
    hybrid_actor.train()
    hybrid_actor(input_ids=sequences, labels=sequences).loss.backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in hybrid_actor.parameters())
    for mode in ("train", "eval"):
        assert measure_switch_overhead(hybrid_actor, mode=mode, repeats=1)["mem_increase_mb"] == 0
    assert HybridActor(policy=model).policy is model
    with pytest.raises(ConfigError, match="both model and policy"):
        HybridActor(model=model, policy=model)
    with pytest.raises(ConfigError, match=r"tp_size=4 needs 4 ranks.*torchrun --nproc-per-node 4"):
        HybridActor(model=model, hybrid_config={"tp_size": 4, "fsdp_sharding": "FULL_SHARD"})


def test_ppo_on_models_in_memory_improves_the_very_model(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    actor = AutoModelForCausalLM.from_pretrained(tiny_folder)
    start, seen = weights(actor), list[Any]()

    def reward_fn(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        seen.extend(zip(prompts, responses, strict=True))
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in responses]

    trainer = RLTrainer(
        actor_model=actor,
        critic_model=create_critic_model(actor),
        tokenizer=tokenizer,
        algo="ppo",
        data_loader=make_rl_data_loader(data, batch_size=4),
        reward_fn=reward_fn,
        config=CONFIG,
    )
    with trainer:
        assert trainer.config.algorithm.adv_estimator == "gae"
        assert trainer.config.actor.optim.lr == 5e-3
        metrics = trainer.fit(num_steps=1, checkpoint_dir=tmp_path / "ckpt")
        assert "critic/grad_norm" in metrics
        trainer.load_checkpoint(tmp_path / "ckpt" / "step_1")
        assert trainer.step == 1
    assert len(seen) == 16
    assert changed(actor, start)
    assert not list(Path(trainer.spec.model_path).parent.glob("*")), "nothing is left behind"


def test_a_pipeline_with_a_reward_model_that_returns_scores(tiny_folder: Path, data: Path) -> None:
    actor = AutoModelForCausalLM.from_pretrained(tiny_folder)
    start = weights(actor)
    pipeline = DataPipeline(
        actors=[actor],
        reward_models=[Lengths()],
        critics=[create_critic_model(actor)],
        algorithm="ppo",
        rollout_config={"num_generations": 2, "max_new_tokens": 6},
        train_config={
            "lr": 5e-3,
            "batch_size": 4,
            "dtype": "float32",
            "max_steps": 1,
            "threads": 1,
        },
        data_loader=str(data),
        tokenizer=tokenizer_of(tiny_folder),
    )
    metrics = RLTrainer(pipeline=pipeline).run()
    assert 0 < metrics["reward/mean"] <= 1
    assert changed(actor, start)


def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(folder)


def test_an_actor_engine_and_a_reward_function(tiny_folder: Path, data: Path) -> None:
    engine_ = HybridActor.from_pretrained(tiny_folder)
    start = weights(engine_)
    trainer = RLTrainer(
        actor_engine=engine_,
        reward_fn="tiny_engine:digit_share",
        algo="grpo",
        data_loader=data,
        config=CONFIG | {"batch_size": 4, "reward.isolation": "none"},
    )
    with trainer:
        trainer.fit(num_steps=1)
    assert changed(engine_, start)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "one of actor_model, actor_engine and pipeline"),
        ({"actor_model": nn.Linear(1, 1), "tokenizer": 1}, "actor_model is a Linear"),
        ({"actor_model": nn.Linear(1, 1)}, "no tokenizer; give tokenizer="),
        ({"actor_model": "PATH"}, "has no prompts; give data_loader="),
        ({"actor_model": "PATH", "config": {"learnig_rate": 1}}, "did you mean learning_rate?"),
        ({"actor_model": "PATH", "config": {"lr": -1}}, "lr=-1: Input should be greater"),
        ({"actor_model": "PATH", "reward_fn": len}, "takes no completions"),
        ({"actor_model": "PATH", "critic_model": nn.Linear(1, 1)}, "create_critic_model"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    tiny_folder: Path, arguments: dict[str, Any], words: str
) -> None:
    given = {k: str(tiny_folder) if v == "PATH" else v for k, v in arguments.items()}
    with pytest.raises(ConfigError) as caught:
        RLTrainer(**given)
    assert words in str(caught.value)


def test_pipelines_have_one_actor() -> None:
    with pytest.raises(ConfigError, match="2 actors"):
        DataPipeline(actors=["a", "b"])
    with pytest.raises(ConfigError, match="2 critics"):
        DataPipeline(actors=["a"], critics=["b", "c"])


def test_scores_have_one_number_a_conversation(tiny_folder: Path) -> None:
    talk = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": text}]
            for text in ("2", "2222")]  # fmt: skip
    short, long = model_scores(Lengths(), load_tokenizer(tiny_folder), talk)
    assert 0 < short < long == 1.0
    with pytest.raises(RewardError, match=r"returned \(2, 4\) for 2 conversations"):
        model_scores(lambda **_: torch.zeros(2, 4), load_tokenizer(tiny_folder), talk)


def test_a_critic_of_opt_reads_its_projected_states() -> None:
    shape: dict[str, Any] = {"vocab_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    shape |= {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 16}
    critic = create_critic_model(OPTForCausalLM(OPTConfig(**shape, max_position_embeddings=32)))
    values = critic(torch.tensor([[5, 6, 7]]))
    assert values.shape == (1, 3)
    values.sum().backward()


def test_a_device_mesh_is_pools() -> None:
    mesh = DeviceMesh(
        devices=["cuda:0-7"], sub_meshes={"actor": ["cuda:0-3"], "critic": ["cuda:4", "cuda:5-7"]}
    )
    roles = frozenset({"actor", "rollout", "reference", "critic", "reward"})
    actor, critic, reward = mesh.pools(roles)
    assert (actor.roles, actor.gpus) == (("actor", "reference", "rollout"), 1.0)
    assert (critic.roles, critic.gpus) == (("critic",), 1.0)
    assert (reward.roles, reward.gpus, reward.cpus) == (("reward",), 0.0, 0.0)
    assert (mesh.ranks(), mesh.ranks("critic")) == (4, 4)
    with pytest.raises(ConfigError, match=r"has cuda:9, which is not in devices"):
        DeviceMesh(devices=["cuda:0-7"], sub_meshes={"actor": ["cuda:9"]})
    with pytest.raises(ConfigError, match="which differ"):
        DeviceMesh(sub_meshes={"actor": ["cuda:0-1"], "critic": ["cuda:1-2"]})
    with pytest.raises(ConfigError, match="is no device"):
        DeviceMesh(devices=["tpu:0"])
    with pytest.raises(ConfigError, match="names 'judge'"):
        DeviceMesh(sub_meshes={"judge": ["cuda:0"]}).pools(roles)


def test_settings_in_short_and_parallel_config() -> None:
    config = read_settings(
        {
            "lr": 1e-6,
            "kl_coef": 0.02,
            "clip_range": 0.1,
            "parallel_config": {"tensor_parallel_size": "auto", "pipeline_parallel_size": 2},
            "actor": {"ppo_epochs": 2},
        },
        "PPO",
    ).config
    assert (config.rl.actor.optim.lr, config.rl.actor.kl_loss_coef) == (1e-6, 0.02)
    assert (config.rl.actor.clip_ratio, config.rl.actor.ppo_epochs) == (0.1, 2)
    assert (config.rl.trainer.placement, config.rl.actor.parallel.pp) == ("auto", 2)
    assert config.rl.algorithm.adv_estimator == "gae"


def test_settings_of_transformers_and_peft_are_told_and_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text("algorithm: {adv_estimator: gae}\nactor_rollout_ref: {rollout: {n: 2}}\n")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        learning_rate=2e-6,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        use_cpu=True,
        optim="sgd",
    )
    trainer = Trainer.from_hf_config(
        "Qwen/Qwen2.5-0.5B",
        config_path=file,
        args=arguments,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    config, out = trainer.config, capsys.readouterr().out
    assert config.model.path == "Qwen/Qwen2.5-0.5B"
    assert (config.rl.actor.optim.lr, config.rl.actor.optim.schedule) == (2e-6, "cosine")
    assert config.rl.actor.optim.optimizer == "SGD"
    assert config.rl.trainer.train_batch_size == 32
    assert (config.model.lora.rank, config.model.lora.quantize) == (8, "nf4")
    assert config.model.lora.target_modules == ("q_proj", "v_proj")
    assert (config.rl.rollout.n, config.rl.algorithm.adv_estimator) == (2, "gae")
    assert "learning_rate=2e-06" in out
    assert "→  actor.optim.lr" in out
    with pytest.raises(ConfigError, match=r"use_dora=True is not available"):
        Trainer.from_hf_config("m", peft_config=LoraConfig(use_dora=True))
    with pytest.raises(ConfigError, match=r"optimizer='adafactor': Input should be"):
        Trainer.from_hf_config(
            "m", args=TrainingArguments(output_dir=str(tmp_path), optim="adafactor", use_cpu=True)
        )


@pytest.mark.slow
def test_a_trainer_from_a_file_trains(tiny_folder: Path, tmp_path: Path) -> None:
    pd.DataFrame([row | {"extra_info": None} for row in arithmetic_rows(8)]).to_parquet(
        tmp_path / "train.parquet"
    )
    (tmp_path / "ppo.yaml").write_text(
        f"data: {{train_files: {tmp_path / 'train.parquet'}, max_response_length: 6}}\n"
        f"trainer: {{total_training_steps: 1, default_local_dir: {tmp_path / 'out'}, threads: 1}}\n"
        "critic: {ppo_epochs: 1}\n"
    )
    trainer = Trainer.from_hf_config(
        str(tiny_folder), config_path=tmp_path / "ppo.yaml", data={"train_batch_size": 4}
    )
    assert trainer.config.rl.algorithm.adv_estimator == "gae"
    assert (trainer.train() / "model.safetensors").is_file()
    again = RLTrainer.from_hf_config(str(tiny_folder), config_path=tmp_path / "ppo.yaml")
    assert isinstance(again, Trainer)


def test_the_health_check_is_that_of_the_command() -> None:
    from engine.cli.commands.utils import health_check

    findings = health_check.run(quick=True)
    assert {"torch", "ray"} <= {finding.what for finding in findings}
