"""verl's own command lines, as its documentation prints them: what they become here.

The texts are those of verl's quickstart, its multi-node page and its examples, after the module's
name; `$HOME` is as a shell leaves it. Nothing is trained here but in the tests marked slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.cli import forms
from engine.cli.commands.main_ppo import main
from engine.cli.commands.replay import main as replay
from engine.cli.commands.trainer.main_ppo import main as verls_main
from engine.cli.resolve import Resolved, resolve_file
from engine.cli.settings import RunConfig
from engine.errors import ConfigError
from engine.trainers.resume import run_settings

resolve = partial(resolve_file, forms.PPO)
PPO = """
data.train_files=/d/train.parquet data.val_files=/d/test.parquet data.train_batch_size=256
data.max_prompt_length=512 data.max_response_length=256
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 critic.optim.lr=1e-5
critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=4
algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['console'] trainer.val_before_train=False
trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10
trainer.test_freq=10 trainer.total_epochs=15
"""
PPO_8 = """
data.train_files=~/data/rlhf/gsm8k/train.parquet data.val_files=~/data/rlhf/gsm8k/test.parquet
data.train_batch_size=1024 data.val_batch_size=1312 data.max_prompt_length=512
data.max_response_length=512 actor_rollout_ref.model.path=~/models/deepseek-llm-7b-chat
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size=64
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.grad_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.micro_batch_size=256
actor_rollout_ref.rollout.log_prob_micro_batch_size=128
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.4
actor_rollout_ref.ref.log_prob_micro_batch_size=128
actor_rollout_ref.ref.fsdp_config.param_offload=True critic.optim.lr=1e-5
critic.model.path=~/models/deepseek-llm-7b-chat critic.model.enable_gradient_checkpointing=False
critic.ppo_micro_batch_size=64 critic.model.fsdp_config.param_offload=False
critic.model.fsdp_config.grad_offload=False critic.model.fsdp_config.optimizer_offload=False
algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_example_gsm8k' trainer.experiment_name='deepseek_llm_7b_function_rm'
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15
"""
LORA = """
algorithm.adv_estimator=grpo data.train_files=/d/train.parquet data.val_files=/d/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' data.prompt_key=messages
data.shuffle=False actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
actor_rollout_ref.model.use_shm=True actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_grpo_example_gsm8k' trainer.experiment_name='qwen2_7b_function_rm'
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
"""
GRPO = LORA.replace("actor_rollout_ref.model.lora_rank=64", "").replace(
    "actor_rollout_ref.model.lora_alpha=32", ""
)
MEGATRON = """
algorithm.adv_estimator=grpo data.train_files="['/d/g/train.parquet', '/d/m/train.parquet']"
data.val_files="['/d/g/test.parquet', '/d/m/test.parquet']" data.return_raw_chat=
data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error'
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=sync actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 algorithm.use_kl_in_reward=False
trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_grpo_example_gsm8k_math' trainer.experiment_name='qwen2_7b_megatron'
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15
"""
RM = "reward_model.enable=True reward_model.model.path=sfairXC/RM reward_model.model.use_rmpad=True"


def verls(text: str, *more: str) -> Resolved[RunConfig]:
    """What a command line becomes, with verl's defaults, after a shell has taken its quotes."""
    return resolve(None, [*shlex.split(text), *more], defaults_of_verl=True)


def test_ppo_of_the_quickstart_is_gae_with_verls_defaults() -> None:
    rl = verls(PPO).config.rl
    assert rl.algorithm.adv_estimator == "gae"
    assert (rl.rollout.n, rl.actor.ppo_mini_batch_size, rl.critic.ppo_mini_batch_size) == (
        1,
        64,
        256,
    )
    assert (rl.actor.optim.lr, rl.actor.optim.beta2, rl.actor.optim.warmup_ratio) == (
        1e-6,
        0.999,
        0,
    )
    assert (rl.critic.optim.lr, rl.critic.ppo_epochs) == (1e-5, 1)
    assert not rl.actor.use_kl_loss
    assert rl.actor.parallel.activation_checkpointing, "verl's enable_gradient_checkpointing"
    assert rl.critic.parallel is not None
    assert rl.critic.parallel.activation_checkpointing
    assert rl.critic.model_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert rl.actor.parallel.fsdp == 1


def test_a_critics_keys_mean_gae_and_other_defaults_stay_ours() -> None:
    resolved = resolve(None, shlex.split(PPO))
    assert resolved.config.rl.algorithm.adv_estimator == "gae"
    assert resolved.config.rl.rollout.n == 8
    assert any("gae, as in verl: critic.optim.lr" in notice for notice in resolved.notices)
    grpo = resolve(None, ["critic.optim.lr=1e-5", "algorithm.adv_estimator=grpo"])
    assert grpo.config.rl.algorithm.adv_estimator == "grpo"
    assert resolve(None, ["actor.optim.lr=1e-5"]).config.rl.algorithm.adv_estimator == "grpo"


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (2, 16)])
def test_ppo_on_nodes_shards_actor_and_critic_over_all_ranks(nodes: int, ranks: int) -> None:
    resolved = verls(PPO_8, f"trainer.nnodes={nodes}")
    config, rl = resolved.config, resolved.config.rl
    assert rl.actor.parallel.fsdp == ranks
    assert rl.critic.parallel is not None
    assert (rl.critic.parallel.fsdp, rl.critic.parallel.tp) == (ranks, 1)
    assert rl.reference.offload_params
    assert rl.rollout.engine == "vllm"
    assert (rl.rollout.vllm.gpu_memory_utilization, rl.rollout.tensor_parallel_size) == (0.4, 2)
    assert config.run.logger == ("console", "wandb")
    assert config.model.path == str(Path.home() / "models/deepseek-llm-7b-chat")
    assert config.data.train_files == (str(Path.home() / "data/rlhf/gsm8k/train.parquet"),)


def test_grpo_and_lora() -> None:
    for text, rank in ((GRPO, 0), (LORA, 64)):
        config = verls(text).config
        assert (config.model.lora.rank, config.rl.rollout.n) == (rank, 5)
        assert config.rl.actor.ppo_mini_batch_size == 5 * 256
        assert config.data.columns == {"prompt": "messages"}
        assert config.rl.actor.parallel.fsdp == 8
        assert config.rl.actor.parallel.activation_checkpointing
        assert config.rl.rollout.vllm.gpu_memory_utilization == 0.6


def test_layouts_in_megatrons_names() -> None:
    parallel = verls(MEGATRON).config.rl.actor.parallel
    assert (parallel.pp, parallel.tp, parallel.fsdp, parallel.dp) == (2, 2, 2, 1)
    hybrid = verls(GRPO, "actor_rollout_ref.actor.fsdp_config.fsdp_size=4").config.rl.actor.parallel
    assert (hybrid.fsdp, hybrid.dp) == (4, 2)
    with pytest.raises(ConfigError, match=r"tp=3.*8 ranks of trainer.n_gpus_per_node"):
        verls(GRPO, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3")


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.parametrize(
    ("changes", "policy", "samplers", "tp"),
    [
        ("trainer.nnodes=2", 8, 4, 2),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=1", 4, 4, 1),
        ("trainer.rollout_workers=3", 2, 3, 2),
        (
            "trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            1,
            1,
            1,
        ),
        ("trainer.n_gpus_per_node=3", 1, 1, 2),
    ],
)
def test_samplers_share_the_gpus_with_the_trainer(
    mode: str, changes: str, policy: int, samplers: int, tp: int
) -> None:
    resolved = verls(PPO_8, f"trainer.mode={mode}", *shlex.split(changes))
    rl = resolved.config.rl
    assert rl.actor.parallel.fsdp == policy
    assert (rl.trainer.rollout_workers, rl.rollout.tensor_parallel_size) == (samplers, tp)
    assert rl.rollout.vllm.in_process == (tp == 1)
    if policy > 1:
        assert any(f"the policy has {policy} of" in notice for notice in resolved.notices)
    with pytest.raises(ConfigError, match=r"leave the trainer none of the 8 GPUs"):
        verls(PPO_8, f"trainer.mode={mode}", "trainer.rollout_workers=4")


ON_PRETENDED_GPUS = """
import sys
from engine.cli.commands.main_ppo import main
from engine.controller.launch import init_options, init_ray
kind = {"accelerator_type:H100": 1}
counted = {"num_cpus": 4, "num_gpus": 3, "resources": kind, "object_store_memory": 200 << 20}
init_ray(init_options({}) | counted)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its GPUs are pretended")
def test_gpus_of_a_node_are_split_without_pools(tmp_path: Path, tiny_folder: Path) -> None:
    """Ray counts three GPUs, which no process finds: two ranks and a sampler run on CPUs."""
    rows = pd.DataFrame(arithmetic_rows(8)).drop(columns="extra_info")
    rows.to_parquet(tmp_path / "t.parquet")
    command = f"""
    data.train_files={tmp_path}/t.parquet data.val_files={tmp_path}/t.parquet
    data.train_batch_size=4 data.max_response_length=6
    actor_rollout_ref.model.path={tiny_folder} actor_rollout_ref.rollout.n=2
    algorithm.adv_estimator=grpo reward.name=tiny_engine:digit_share trainer.mode=async
    trainer.n_gpus_per_node=3 trainer.total_training_steps=2 trainer.threads=1
    trainer.default_local_dir={tmp_path}/out trainer.test_freq=1
    """
    program = [sys.executable, "-c", ON_PRETENDED_GPUS, *shlex.split(command)]
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        program,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "validation" in ran.stdout


def test_one_rank_keeps_what_only_fsdp_can_offload() -> None:
    offload = ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "critic.optim.lr=1")
    offload += ("actor_rollout_ref.ref.fsdp_config.param_offload=True",)
    offload += ("actor_rollout_ref.actor.fsdp_config.offload_policy=True",)
    resolved = resolve(None, [*offload, "trainer.n_gpus_per_node=1"])
    assert not resolved.config.rl.actor.parallel.offload_params
    assert not resolved.config.rl.reference.offload_params
    assert sum("on one rank" in notice for notice in resolved.notices) == 3
    two = resolve(None, [*offload, "trainer.n_gpus_per_node=2"]).config.rl
    assert two.actor.parallel.offload_params
    assert two.actor.parallel.offload_policy
    assert two.reference.offload_params


def test_a_reward_model_takes_the_place_of_the_rule() -> None:
    config = verls(PPO, *RM.split()).config
    assert config.rl.reward.name == "reward_model"
    assert config.rl.reward.options == {"model": "sfairXC/RM"}
    with pytest.raises(ConfigError, match="only one can score"):
        verls(PPO, *RM.split(), "custom_reward_function.path=f.py")


def test_keys_without_effect_for_one_reason_share_a_notice() -> None:
    notices = verls(PPO).grouped_notices()
    (micro,) = [notice for notice in notices if "cut by tokens" in notice]
    assert micro.count("micro_batch_size_per_gpu") == 4
    assert " have no effect here: " in micro


def test_a_file_is_the_first_argument_or_hydras(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 3}}\n")
    for named in (
        [str(file)],
        ["--config", str(file)],
        [f"--config-path={tmp_path}", "--config-name=ppo"],
    ):
        assert main([*named, "algorithm.gamma=0.5", "--print-config"]) == 0
        printed = capsys.readouterr().out
        assert "    n: 3\n" in printed
        assert "    gamma: 0.5\n" in printed
    assert main([str(file), "--config", str(file), "--print-config"]) == 2
    assert "give one file" in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml"), "--print-config"]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err
    assert main(["--config-name=ppo_megatron_trainer.yaml", "--print-config"]) == 0
    assert "verl's file of defaults" in capsys.readouterr().err


def test_references_in_a_file_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONT_RUNS", "/runs")
    file = tmp_path / "ppo_trainer.yaml"
    file.write_text(
        """
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 64
    ppo_epochs: 2
    clip_ratio: 0.3
    clip_ratio_high: ${.clip_ratio}
    use_torch_compile: ${oc.select:nothing.there,true}
    use_remove_padding: ${oc.select:actor_rollout_ref.model.use_remove_padding,false}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}", model: null}
  rollout: {name: "???", over_sample_rate: 0, trace: {backend: null}, skip_rollout: false}
  model: {path: /m}
critic:
  ppo_mini_batch_size: ${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}
  ppo_epochs: ${actor_rollout_ref.actor.ppo_epochs}
  model: {path: "${actor_rollout_ref.model.path}"}
trainer:
  project_name: p
  experiment_name: e
  default_local_dir: ${oc.env:FRONT_RUNS}/${trainer.project_name}/${.experiment_name}
"""
    )
    given = ["trainer.experiment_name=mine", "actor_rollout_ref.actor.strategy=fsdp"]
    config = resolve(file, given, defaults_of_verl=True).config
    assert (config.rl.critic.ppo_mini_batch_size, config.rl.critic.ppo_epochs) == (64, 2)
    assert config.rl.actor.clip_ratio_high == 0.3
    assert config.rl.critic.model_path == "/m"
    assert config.run.default_local_dir == "/runs/p/mine"
    with pytest.raises(ConfigError, match=r"algorithm.gamma='\$\{no.such\}' refers to another"):
        resolve(None, ["algorithm.gamma=${no.such}"])
    with pytest.raises(ConfigError, match="refers to another setting"):
        resolve(None, ["algorithm.gamma=${algorithm.lam}", "algorithm.lam=${algorithm.gamma}"])


def test_verls_module_name_has_verls_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert verls_main(["--print-config"]) == 0
    assert "adv_estimator: gae" in capsys.readouterr().out


def test_code_of_a_models_folder_is_refused_where_there_is_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    data.write_text("")
    (model / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "m.M"}}')
    command = [f"data.train_files={data}", f"actor_rollout_ref.model.path={model}"]
    assert main([*command, "actor_rollout_ref.model.trust_remote_code=True"]) == 2
    error = capsys.readouterr().err
    assert "actor_rollout_ref.model.trust_remote_code=true" in error
    assert "never run" in error


def test_validation_samples_where_it_is_told_to() -> None:
    how = "actor_rollout_ref.rollout.val_kwargs"
    sampled = resolve(None, [f"{how}.do_sample=True", f"{how}.n=4", f"{how}.top_k=-1"])
    assert sampled.config.rl.rollout.val_kwargs.n == 4
    greedy = resolve(None, [f"{how}.n=4", f"{how}.temperature=0", f"{how}.do_sample=False"])
    assert greedy.config == resolve(None, []).config
    (notice,) = greedy.notices
    assert f"{how}.n has no effect here: rollout.val_kwargs.do_sample is false" in notice


def test_a_resumed_run_may_validate_otherwise_and_keep_its_reference_elsewhere() -> None:
    recorded = run_settings(resolve(None, []).config.rl, 6, 0)
    assert "rl.rollout.n" in recorded
    assert not [n for n in recorded if n.startswith(("rl.rollout.val_kwargs", "rl.reference"))]


def test_a_dry_run_says_what_would_be_and_starts_nothing(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.DataFrame([row | {"extra_info": None} for row in arithmetic_rows(8)]).to_parquet(
        tmp_path / "train.parquet"
    )
    command = [
        f"data.train_files={tmp_path / 'train.parquet'}",
        "data.train_batch_size=100",  # of a smaller file all rows are a batch
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={tiny_folder}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "critic.ppo_epochs=1",
        "trainer.n_gpus_per_node=2",
        "trainer.total_epochs=3",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "run.price_per_hour=3600000",
    ]
    assert main([*command, "--dry-run", "--gpu=H100"]) == 0
    out = capsys.readouterr().out
    step, total, cost = (
        float(re.search(pattern, out)[1])  # type: ignore[index]
        for pattern in (
            r"time +(\S+) s a step",
            r"total +(\S+) s, roughly",
            r"cost +(\S+), at 3.6e",
        )
    )
    assert total == pytest.approx(3 * step, abs=0.06)
    assert cost == pytest.approx(1000 * 3 * step, rel=0.01)
    assert re.search(r"cached +nothing in .*checkpoints; 3 steps are to be done", out)
    assert "adv_estimator: gae" in out
    assert "run       3 steps of 8 of 8 prompts" in out
    assert re.search(r"actor +16 +8 +4 +16384 tokens", out)
    assert re.search(r"critic +16 +16 +8 +16384 tokens", out)
    assert "placement ray: actor+rollout+reference+critic, reward" in out
    assert "actor: 2 ranks, fsdp=2" in out
    assert "estimate  for 2 × H100" in out
    assert "of 80.0 GiB a rank at most" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_quickstart_trains_a_critic_and_takes_its_reward_from_a_file(
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as trainer.device=cpu leaves it
    for name in ("train", "test"):
        rows = [row | {"extra_info": {"index": i}} for i, row in enumerate(arithmetic_rows(8))]
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "own.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):\n"
        "    assert weight == 0.25\n"
        "    return weight * len(solution_str)\n"
    )
    text = PPO.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_folder)).replace(
        "/d/", f"{tmp_path}/"
    )
    smaller = ["data.train_batch_size=4", "data.max_response_length=6", "data.max_prompt_length=40"]
    smaller += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"]
    smaller += ["trainer.total_epochs=1", f"trainer.default_local_dir={tmp_path / 'out'}"]
    smaller += [f"custom_reward_function.path={tmp_path / 'own.py'}", "trainer.threads=1"]
    smaller += ["custom_reward_function.name=score", "data.train_max_samples=6"]
    smaller += ["+custom_reward_function.reward_kwargs.weight=0.25", "trainer.device=cpu"]
    smaller += ["trainer.critic_warmup=2", "trainer.test_freq=1", "trainer.log_val_generations=2"]
    smaller += [f"actor_rollout_ref.rollout.val_kwargs.{k}" for k in ("do_sample=True", "n=3")]
    smaller += ["trainer.total_training_steps=2", "data.val_max_samples=5"]
    smaller += [f"trainer.rollout_data_dir={tmp_path / 'seen'}", "trainer.logger=[console,jsonl]"]
    assert verls_main([*shlex.split(text), *smaller]) == 0
    out = capsys.readouterr().out
    assert "rl: gae on " in out  # local, or the Ray that other tests have started
    assert "6 prompts" in out
    assert (tmp_path / "seen" / "train_000001.parquet").is_file()
    rows = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [any(name.startswith("critic/") for name in row) for row in rows] == [True, True]
    learned = [any(name.startswith("actor/") for name in row) for row in rows]
    assert learned == [False, True], "critic_warmup=2: the policy learns from the second step on"
    assert all(row["validation/reward_best"] >= row["validation/reward"] for row in rows)
    assert len(pd.read_parquet(tmp_path / "seen" / "validation_000002.parquet")) == 15
    assert out.count("rl: validation ") == 4
    assert verls_main([*shlex.split(text), *smaller, "trainer.val_only=True"]) == 0
    out = capsys.readouterr().out
    assert "continues from" in out
    assert re.search(r"validation/reward +[0-9.]+", out)
    assert "2/2" not in out


def test_a_preset_gives_its_rl_and_says_what_only_a_workflow_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["--config", "preset:gsm8k-7b-8gpu"], ["preset:gsm8k-7b-8gpu"]):
        assert main([*given, "data.train_files=a.parquet", "rollout.n=4", "--print-config"]) == 0
        said = capsys.readouterr()
        assert "path: Qwen/Qwen2.5-7B-Instruct" in said.out
        assert "fsdp: 8" in said.out
        assert "n: 4" in said.out
        assert "sft.skip" in said.err
        assert "for workflows only" in said.err
    file = tmp_path / "mine.yaml"
    file.write_text("preset: gsm8k-7b-8gpu\nactor_rollout_ref: {rollout: {n: 3}}\n")
    assert main(["--config", str(file), "data.train_files=a.parquet", "--print-config"]) == 0
    said = capsys.readouterr()
    assert "fsdp: 8" in said.out
    assert "n: 3" in said.out
    assert "sft.skip" in said.err
    assert "rollout" not in said.err
    assert main(["--config", "preset:nope", "--print-config"]) == 2
    assert "there is no such preset; give one of" in capsys.readouterr().err


def test_the_table_of_keys_says_what_becomes_of_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (honoured|noted|refused) \|", page, re.MULTILINE)
    assert len(rows) > 25
    for arguments, said in rows:
        found = "refused"
        with contextlib.suppress(ConfigError):
            resolved = resolve(None, arguments.split())
            found = "honoured" if resolved.config != RunConfig() else "noted"
            assert bool(resolved.notices) == (found == "noted"), arguments
        assert found == said, arguments


@pytest.mark.slow
def test_two_ranks_by_verls_keys_and_a_step_of_theirs_again_on_one(
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ray_cluster: None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = [row | {"extra_info": {"index": i}} for i, row in enumerate(arithmetic_rows(8))]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))\n"
    )
    command = f"""
    data.train_files={tmp_path}/train.parquet data.train_batch_size=4 data.max_response_length=6
    data.max_prompt_length=8 data.truncation=left actor_rollout_ref.model.path={tiny_folder}
    +actor_rollout_ref.model.override_config.rope_theta=70.0
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.optim.optimizer=SGD
    actor_rollout_ref.actor.optim.override_optimizer_config.momentum=0.9
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.use_kl_loss=True critic.optim.lr=1e-3
    critic.model.path={tiny_folder} critic.ppo_mini_batch_size=2 algorithm.adv_estimator=gae
    custom_reward_function.path={tmp_path}/own.py trainer.n_gpus_per_node=2 trainer.nnodes=1
    trainer.device=cpu trainer.total_training_steps=2 trainer.default_local_dir={tmp_path}/out
    trainer.threads=2 trainer.logger=[console,jsonl] debug.record_steps=[2]
    """
    assert verls_main(shlex.split(command)) == 0
    out = capsys.readouterr().out
    assert "rl: gae on ray" in out
    metrics = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/grad_norm"] > 0 for row in metrics] == [True, True]
    checkpoint = next((tmp_path / "out" / "checkpoints").glob("step_2"))
    ranks = {path.name.split(".")[0] for path in checkpoint.iterdir() if "actor" in path.name}
    assert len(ranks) == 2, sorted(ranks)
    written = json.loads((tmp_path / "out" / "step_2" / "config.json").read_text())
    assert "70.0" in json.dumps(written)

    second = checkpoint.parent / "recorded" / "step_2"
    assert replay(["--all", "--on-ranks", str(second)]) == 0
    out = capsys.readouterr().out
    assert "recorded on 2 ranks, run again on as many" in out
    assert "metrics, to the bit" in out
    assert replay([str(second)]) in (0, 1)
    assert "ranks draw mini-batches of their own rows" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_two_ranks_is_nearly_the_same_on_one(
    tmp_path: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ray_cluster: None,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pd.DataFrame(arithmetic_rows(8)).drop(columns="extra_info").to_parquet(tmp_path / "t.parquet")
    command = f"""
    data.train_files={tmp_path}/t.parquet data.train_batch_size=4 data.max_response_length=6
    actor_rollout_ref.model.path={tiny_folder} actor_rollout_ref.rollout.n=2
    actor_rollout_ref.actor.ppo_mini_batch_size=4 algorithm.adv_estimator=grpo
    reward.name=tiny_engine:digit_share trainer.n_gpus_per_node=2 trainer.device=cpu
    trainer.total_training_steps=1 trainer.default_local_dir={tmp_path}/out trainer.threads=2
    debug.record_steps=[1]
    """
    assert main(shlex.split(command)) == 0
    capsys.readouterr()
    assert replay([str(tmp_path / "out" / "checkpoints" / "recorded" / "step_1")]) == 0
    assert "metrics, within 0.001" in capsys.readouterr().out
