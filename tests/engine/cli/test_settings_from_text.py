"""From typed keys to a configuration, and from mistakes to sentences in the user's words."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli.forms import PPO, PREFERENCE, REWARD_MODEL, SFT
from engine.cli.program import config_text, help_text
from engine.cli.resolve import Form, resolve_file, setting_paths
from engine.cli.settings import RunConfig
from engine.compat.hf_trainer import _FORM as SHORT
from engine.errors import ConfigError

resolve = partial(resolve_file, PPO)


def at(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def parsed(*arguments: str) -> RunConfig:
    return resolve(None, arguments).config


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(None, arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", [PPO, SFT, PREFERENCE, REWARD_MODEL, SHORT])
def test_every_target_of_the_table_is_a_setting(form: Form[Any]) -> None:
    settings = dict(setting_paths(form.config))
    for name, key in form.table.settings.items():
        entries = {parent for path in key.paths if (parent := path.rpartition(".")[0]) in settings}
        assert {settings[parent] for parent in entries} <= {dict}, name
        assert entries or set(key.paths) <= set(settings), name
        assert not key.times or key.times in settings, name


@pytest.mark.parametrize("form", [PPO, SFT])
def test_no_key_is_both_known_and_absent(form: Form[Any]) -> None:
    both = [key for key in form.known for e in form.table.unsupported if e.pattern == key]
    assert both == []


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("data.train_files=a.parquet", "data.train_files", ("a.parquet",)),
        ("data.val_files=['a.parquet','b.jsonl']", "data.val_files", ("a.parquet", "b.jsonl")),
        ("data.train_batch_size=16", "rl.trainer.train_batch_size", 16),
        ("data.max_response_length=32", "data.max_response_length", 32),
        ("data.seed=7", "seed", 7),
        ("actor_rollout_ref.model.path=/m", "model.path", "/m"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "rl.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.optim.betas=[0.8,0.99]", "rl.actor.optim.beta2", 0.99),
        ("actor_rollout_ref.actor.grad_clip=0.5", "rl.actor.optim.grad_clip", 0.5),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "rl.actor.clip_ratio_high", 0.28),
        ("actor_rollout_ref.actor.use_kl_loss=False", "rl.actor.use_kl_loss", False),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            "rl.actor.policy_loss.loss_mode",
            "gspo",
        ),
        ("actor_rollout_ref.rollout.name=hf", "rl.rollout.engine", "native"),
        ("actor_rollout_ref.rollout.name=vllm", "rl.rollout.engine", "vllm"),
        ("actor_rollout_ref.rollout.top_k=-1", "rl.rollout.top_k", 0),
        ("critic.optim.lr=1e-5", "rl.critic.optim.lr", 1e-5),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "rl.actor.optim.optimizer", "SGD"),
        ("actor_rollout_ref.actor.optim.optimizer=adam", "rl.actor.optim.optimizer", "AdamW"),
        ("critic.optim.lr_scheduler_type=wsd", "rl.critic.optim.schedule", "wsd"),
        (
            "actor_rollout_ref.actor.optim.lr_decay_style=linear",
            "rl.actor.optim.schedule",
            "linear",
        ),
        ("actor_rollout_ref.actor.optim.min_lr=0.0", "rl.actor.optim.min_lr_ratio", 0.0),
        (
            "actor_rollout_ref.model.override_config.rope_theta=1000000.0",
            "model.override_config",
            {"rope_theta": 1e6},
        ),
        ("critic.cliprange_value=0.3", "rl.critic.cliprange_value", 0.3),
        ("critic.model.path=/other", "rl.critic.model_path", "/other"),
        ("rl.algorithm.kl_ctrl.kl_coef=0.1", "rl.algorithm.kl_ctrl.kl_coef", 0.1),
        ("algorithm.filter_groups.metric=acc", "rl.algorithm.filter_groups.metric", "score"),
        ("algorithm.rollout_correction.bypass_mode=true", "rl.actor.old_log_probs", "rollout"),
        ("+algorithm.gamma=0.9", "rl.algorithm.gamma", 0.9),
        ("rl.algorithm.gamma=0.9", "rl.algorithm.gamma", 0.9),
        (
            "algorithm={use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.2, type: adaptive}}",
            "rl.algorithm.kl_ctrl.kl_coef",
            0.2,
        ),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=7", "rl.actor.optim.warmup_steps", 7),
        ("critic.optim.lr_warmup_steps=-1", "rl.critic.optim.warmup_steps", None),
        ("data.train_max_samples=64", "data.train_max_samples", 64),
        ("trainer.rollout_data_dir=/r", "run.rollout_data_dir", "/r"),
        ("trainer.device=cpu", "run.device", "cpu"),
        ("parallel_config.tensor_parallel_size=auto", "rl.trainer.placement", "auto"),
        (
            "parallel_config={tensor_parallel_size: auto, fsdp_size: 2}",
            "rl.trainer.placement",
            "auto",
        ),
        ("parallel_config={fsdp_size: auto, tensor_parallel_size: 2}", "rl.actor.parallel.tp", 2),
        ("actor_rollout_ref.actor.megatron.context_parallel_size=2", "rl.actor.parallel.sp", 2),
        ("reward.name=my.rewards:mine", "rl.reward.name", "my.rewards:mine"),
        ("reward.weights.answer=0.5", "rl.reward.weights", {"answer": 0.5}),
        ("reward.weights={answer: 0.5}", "rl.reward.weights", {"answer": 0.5}),
        ("plugins=[a.b]", "rl.plugins", ("a.b",)),
        ("trainer.test_freq=-1", "rl.trainer.test_freq", 10**9),
        ("trainer.test_freq=5", "rl.trainer.test_freq", 5),
        ("trainer.total_epochs=3", "run.total_epochs", 3),
        ("trainer.experiment_name=2026", "run.experiment_name", "2026"),
        ("trainer.logger=console", "run.logger", ("console",)),
        ("trainer.logger=[jsonl,wandb]", "run.logger", ("file", "wandb")),
        ("run.logger=jsonl", "run.logger", ("file",)),
        ("trainer.logger=['console','mlflow']", "run.logger", ("console", "mlflow")),
        ("trainer.placement=local", "rl.trainer.placement", "local"),
        (
            "reward_model.overlong_buffer.penalty_factor=0.5",
            "rl.reward.overlong_buffer.penalty_factor",
            0.5,
        ),
    ],
)
def test_a_key_reaches_its_setting(argument: str, path: str, value: Any) -> None:
    config = parsed(argument)
    assert at(config, path) == value
    assert config != RunConfig() or at(RunConfig(), path) == value


def test_verls_mini_batch_counts_prompts_and_ours_completions() -> None:
    verls = parsed(
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "critic.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
    )
    assert verls.rl.actor.ppo_mini_batch_size == 64
    assert verls.rl.critic.ppo_mini_batch_size == 32
    default_n = parsed("actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert default_n.rl.actor.ppo_mini_batch_size == 16 * RunConfig().rl.rollout.n
    ours = parsed("rl.critic.ppo_mini_batch_size=8", "rollout.n=4", "actor.ppo_mini_batch_size=2")
    assert ours.rl.critic.ppo_mini_batch_size == 8
    assert ours.rl.actor.ppo_mini_batch_size == 2


def test_the_later_value_holds_and_null_is_the_default() -> None:
    assert parsed("algorithm.gamma=0.5", "rl.algorithm.gamma=0.9").rl.algorithm.gamma == 0.9
    assert parsed("actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr=null") == RunConfig()


def test_a_verl_shaped_file_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        """
data: {train_files: [a.parquet], train_batch_size: 8}
actor_rollout_ref:
  model: {path: /m, lora_rank: 0}
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    optim: {lr: 1e-4, betas: [0.9, 0.99]}
    ppo_mini_batch_size: 2
    fsdp_config: {param_offload: true}
  rollout: {name: vllm, n: 3, tensor_model_parallel_size: 1}
critic:
  model: {path: /m}
trainer: {total_training_steps: null, total_epochs: 2, logger: console}
rl:
"""
    )
    resolved = resolve(file, ["actor_rollout_ref.actor.optim.lr=2e-4", "trainer.total_epochs=4"])
    config = resolved.config
    assert config.data.train_files == ("a.parquet",)
    assert config.model.path == "/m"
    assert config.rl.actor.optim.lr == 2e-4
    assert config.rl.actor.optim.beta2 == 0.99
    assert config.rl.actor.ppo_mini_batch_size == 6
    assert config.rl.rollout.engine == "vllm"
    assert config.run.total_epochs == 4
    assert config.rl.algorithm.adv_estimator == "gae"
    assert [note.split()[0] for note in resolved.notices] == ["algorithm.adv_estimator"]


@pytest.mark.parametrize(
    ("text", "argument", "path", "value"),
    [
        (
            "actor_rollout_ref: {actor: {optim: {warmup_style: constant, "
            "lr_scheduler_type: constant}}}",
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "rl.actor.optim.schedule",
            "cosine",
        ),
        (
            "rl: {trainer: {train_batch_size: 8}}\ndata: {train_batch_size: 16}",
            "rl.trainer.train_batch_size=4",
            "rl.trainer.train_batch_size",
            4,
        ),
        (
            "rl: {trainer: {train_batch_size: 8}}\ndata: {train_batch_size: 16}",
            "rl.trainer.train_batch_size=null",
            "rl.trainer.train_batch_size",
            RunConfig().rl.trainer.train_batch_size,
        ),
        (
            "custom_reward_function: {path: mine.py, name: f}",
            "reward.name=answer_and_format",
            "rl.reward.name",
            "answer_and_format",
        ),
        (
            "custom_reward_function: {name: f}\n"
            "reward: {custom_reward_function: {path: theirs.py, name: g}}",
            "custom_reward_function.path=mine.py",
            "rl.reward.name",
            "engine.cli.reward_file:mine.py::f",
        ),
    ],
)
def test_an_argument_holds_against_all_names_that_a_file_has_for_the_setting(
    tmp_path: Path, text: str, argument: str, path: str, value: Any
) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(text)
    assert at(resolve(file, [argument]).config, path) == value


def test_shuffled_mini_batches_are_what_happens_here() -> None:
    assert resolve(None, ["actor_rollout_ref.actor.shuffle=true"]).notices == []
    [notice] = resolve(None, ["actor_rollout_ref.actor.shuffle=false"]).notices
    assert notice.endswith("has no effect here: mini-batches are cut from shuffled rows")


def test_print_config_is_read_back(tmp_path: Path) -> None:
    config = parsed(
        "data.train_files=a.parquet",
        "critic.ppo_mini_batch_size=2",
        "reward.weights={answer: 2.0}",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.total_epochs=3",
    )
    file = tmp_path / "resolved.yaml"
    file.write_text(config_text(config))
    again = resolve(file, [])
    assert again.config == config
    assert again.notices == []
    assert "total_training_steps" not in yaml.safe_load(file.read_text())["rl"]["trainer"]


def test_steps_win_over_epochs_as_in_verl() -> None:
    resolved = resolve(None, ["trainer.total_epochs=3", "trainer.total_training_steps=9"])
    assert resolved.config.run.total_epochs is None
    assert resolved.config.rl.trainer.total_training_steps == 9
    assert "trainer.total_epochs has no effect" in resolved.notices[0]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("algorithm.adv_estimater=grpo", ("unknown key", "did you mean algorithm.adv_estimator?")),
        ("actor_rollout_ref.actor.optim.lrr=1", ("actor_rollout_ref.actor.optim.lr?",)),
        ("zzz=1", ("unknown key 'zzz'", "--help")),
        ("trainer.default_local_dir", ("not of the form key=value",)),
        ("~algorithm.gamma=1", ("not of the form key=value",)),
        ("data.train_files=[a", ("data.train_files", "not valid YAML")),
        (
            "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
            ("not available here", "experts"),
        ),
        ("actor_rollout_ref.actor.strategy=deepspeed", ("set fsdp, fsdp2, or megatron",)),
        ("trainer.device=npu", ("trainer.device='npu'", "'auto', 'cuda' or 'cpu'")),
        ("trainer.nnodes=2", ("trainer.nnodes=2", "n_gpus_per_node")),
        ("reward_model.enable=True", ("reward_model.model.path",)),
        ("reward_model.enable=1", ("reward_model.enable=1 must be true or false",)),
        ("custom_reward_function={path: f.py, reward_kwargs: 3}", ("must be names and values",)),
        ("actor_rollout_ref.rollout.expert_parallel_size=2", ("not available here",)),
        ("trainer.logger=['console','swanlab']", ("trainer.logger.1='swanlab'", "mlflow")),
        ("data.truncation=left", ("data.truncation=left", "without data.max_prompt_length")),
        ("actor_rollout_ref.actor.optim.optimizer=Lion", ("'AdamW', 'Adam' or 'SGD'",)),
        ("critic.optim.optimizer_impl=torchao.optim", ("set optimizer to AdamW, Adam or SGD",)),
        ("actor_rollout_ref.actor.optim.min_lr=1e-7", ("set min_lr_ratio, over lr",)),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cyclic", ("lr_scheduler_type='cyclic'",)),
        ("critic.model.override_config.dropout=0.1", ("config.json",)),
        ("actor_rollout_ref.actor.optim.lr=abc", ("actor_rollout_ref.actor.optim.lr='abc'",)),
        ("actor.optim.lr=-1", ("actor.optim.lr=-1: Input should be greater than 0",)),
        ("actor_rollout_ref.actor.optim.betas=0.9", ("optim.betas=0.9", "two numbers")),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=a", ("='a' must be a whole number",)),
        ("algorithm.rollout_correction.bypass_mode=3", ("bypass_mode=3 must be true or false",)),
        ("algorithm.gamma=${x}", ("refers to another setting",)),
        ("data=3", ("unknown key 'data'",)),
    ],
)
def test_a_mistake_is_one_sentence(argument: str, words: tuple[str, ...]) -> None:
    message = refusal(argument)
    assert all(word in message for word in words), message


def test_settings_that_disagree_are_named_as_they_were_typed() -> None:
    message = refusal(
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    )
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=16×4=64 is more than the 32" in message
    assert "data.train_batch_size × actor_rollout_ref.rollout.n" in message


def test_vllm_is_tuned_by_verls_names(tmp_path: Path) -> None:
    prefix = "actor_rollout_ref.rollout"
    given = [
        f"{prefix}.name=vllm",
        f"{prefix}.gpu_memory_utilization=0.6",
        f"{prefix}.enforce_eager=True",
        f"{prefix}.free_cache_engine=False",
        f"{prefix}.max_num_batched_tokens=16384",
        f"{prefix}.enable_chunked_prefill=null",
        f"{prefix}.quantization=fp8",
        f"{prefix}.cudagraph_capture_sizes=[1,8]",
        f"+{prefix}.engine_kwargs.vllm.kv_cache_dtype=fp8",
        f"+{prefix}.engine_kwargs.vllm.compilation_config.cudagraph_mode=PIECEWISE",
        "rl.rollout.vllm.engine_kwargs.attention_config.backend=FLASH_ATTN",
    ]
    resolved = resolve(None, given)
    vllm = resolved.config.rl.rollout.vllm
    assert resolved.notices == []
    assert (vllm.gpu_memory_utilization, vllm.enforce_eager, vllm.sleep) == (0.6, True, 0)
    assert (vllm.max_num_batched_tokens, vllm.enable_chunked_prefill) == (16384, None)
    assert vllm.quantization == "fp8"
    assert vllm.engine_kwargs == {
        "cudagraph_capture_sizes": [1, 8],
        "kv_cache_dtype": "fp8",
        "compilation_config": {"cudagraph_mode": "PIECEWISE"},
        "attention_config": {"backend": "FLASH_ATTN"},
    }
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {name: vllm, engine_kwargs: "
        "{vllm: {kv_cache_dtype: fp8, speculative_config: {method: ngram}}}}}"
    )
    from_file = resolve(file, [f"{prefix}.engine_kwargs.vllm.max_logprobs=3"])
    assert from_file.config.rl.rollout.vllm.engine_kwargs == {
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram"},
        "max_logprobs": 3,
    }
    assert f"{prefix}.free_cache_engine=1 must be true" in refusal(
        f"{prefix}.name=vllm", f"{prefix}.free_cache_engine=1"
    )


def test_our_own_paths_in_a_message_become_the_typed_keys() -> None:
    resolved = resolve(None, ["actor_rollout_ref.actor.kl_loss_coef=0.1", "algorithm.gamma=1"])
    told = resolved.with_typed_keys("actor.kl_loss_coef=0.1 and rl.algorithm.gamma. my.actor.lr")
    assert told == ("actor_rollout_ref.actor.kl_loss_coef=0.1 and algorithm.gamma. my.actor.lr")


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.rollout.free_cache_engine=true",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=5",
        "actor_rollout_ref.rollout.engine_kwargs.sglang.mem_fraction_static=0.5",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "reward_model.model.path=/rm",
    ],
)
def test_what_has_no_effect_is_said_and_harmless(argument: str) -> None:
    resolved = resolve(None, [argument])
    assert resolved.config == RunConfig()
    assert len(resolved.notices) == 1
    assert resolved.notices[0].startswith(f"{argument.partition('=')[0]} has no effect here: ")


@pytest.mark.parametrize(
    "argument",
    [
        "actor_rollout_ref.model.lora_rank=0",
        "reward_model.enable=False",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.model.trust_remote_code=False",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "actor_rollout_ref.rollout.multi_turn.enable=false",
        "trainer.resume_from_path=null",
        "custom_reward_function.path=null",
        "actor_rollout_ref.model.override_config={}",
        "actor_rollout_ref.actor.optim.num_cycles=0.5",
        "actor_rollout_ref.actor.optim.optimizer_impl=torch.optim",
        "data.truncation=error",
    ],
)
def test_what_asks_for_nothing_else_passes_in_silence(argument: str) -> None:
    resolved = resolve(None, [argument])
    assert (resolved.config, resolved.notices) == (RunConfig(), [])


def test_layouts_by_verls_names() -> None:
    config = parsed(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "critic.megatron.pipeline_model_parallel_size=2",
        "actor.parallel.fsdp=2",
    )
    actor = config.rl.actor.parallel
    assert (actor.fsdp, actor.sp, actor.tp, actor.pp) == (2, 2, 4, 1)
    assert actor.activation_checkpointing
    assert config.rl.rollout.tensor_parallel_size == 2
    assert config.rl.critic.parallel is not None
    assert config.rl.critic.parallel.pp == 2


def test_true_is_not_taken_for_one() -> None:
    assert "tensor_model_parallel_size=True" in refusal(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=true"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [("- 1", "holds a list"), ("a: [", "is not valid YAML"), (None, "does not exist")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        resolve(file, [])


def test_help_lists_every_setting_with_default_and_meaning() -> None:
    text = help_text(PPO, "", "all")
    words = " ".join(text.split())
    keys = [PPO.find(shown) for shown in re.findall(r"^  (\S+) = ", text, re.MULTILINE)]
    shown = [path for key in keys if key is not None for path in key.paths]
    assert sorted(shown) == sorted(path for path, _ in setting_paths(RunConfig))
    assert "actor_rollout_ref.actor.optim.lr = 0.0005" in text
    assert "Peak learning rate" in text
    assert "counts prompts" in text
    assert "trainer.placement = ''" in text
    assert "one of '', ray, local" in words
    assert max(map(len, text.splitlines())) <= 120
