"""verl's keys that we have under another name, in another unit, or with other values.

A table; the converters of its values are in `verl_values`. Keys with the same name and meaning on
both sides (`algorithm.gamma`, `data.max_prompt_length`) need no entry. Keys that we don't have are
in `unsupported_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cli.verl_values import (
    Convert,
    bypass,
    device,
    engine_name,
    group_metric,
    loggers,
    negative_is_none,
    never_below_one,
    optimizer,
    pair,
    path,
    paths,
    same,
    size_or_auto,
    sleep_level,
    text,
    zero_alone,
    zero_is_none,
    zero_is_off,
)


@dataclass(frozen=True, slots=True)
class Key:
    """Where a key of verl's goes."""

    path: str | tuple[str, ...]  # in RunConfig, e.g. "rl.actor.optim.lr"; several: one an item
    convert: Convert = same
    times: str = ""  # path of a setting that the value is multiplied by, e.g. "rl.rollout.n"
    note: str = ""  # what differs, for --help


_N = "rl.rollout.n"
_PROMPTS = "counts prompts (rl.*: completions)"
_ACTOR, _CRITIC = "actor_rollout_ref.actor", "critic"

# The optimizer's names, in which verl's versions differ.
_OPTIM = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "lr_warmup_steps_ratio": "warmup_ratio",
    "lr_warmup_steps": "warmup_steps",
    "lr_scheduler_type": "schedule",
    "warmup_style": "schedule",
    "min_lr_ratio": "min_lr_ratio",
    "clip_grad": "grad_clip",
    "num_cycles": "num_cycles",
    "optimizer": "optimizer",
    "override_optimizer_config.momentum": "momentum",
    "lr_decay_style": "schedule",
    "min_lr": "min_lr_ratio",
}
_OPTIM_VALUES: dict[str, Convert] = {
    "lr_warmup_steps": negative_is_none,
    "optimizer": optimizer,
    "min_lr": zero_alone,
}

# Of the actor, where only the section's name differs.
_ACTOR_SAME = (
    "ppo_epochs",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "tau_pos",
    "tau_neg",
    "loss_agg_mode",
    "loss_scale_factor",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "router_replay.mode",
    "policy_loss.loss_mode",
    "policy_loss.clip_cov_ratio",
    "policy_loss.clip_cov_lb",
    "policy_loss.clip_cov_ub",
    "policy_loss.kl_cov_ratio",
    "policy_loss.ppo_kl_coef",
    "policy_loss.dro_beta",
)

# Of vLLM, where only the section's name differs.
_VLLM_SAME = (
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "quantization",
)
_ROLLOUT = "actor_rollout_ref.rollout"

# Parallelism, below the role's section: verl's names and ours.
_PARALLEL = {
    "ulysses_sequence_parallel_size": "sp",
    "megatron.tensor_model_parallel_size": "tp",
    "megatron.pipeline_model_parallel_size": "pp",
    "megatron.context_parallel_size": "sp",
    "megatron.sequence_parallel": "sequence_parallel",
    "megatron.param_offload": "offload_params",
    "megatron.optimizer_offload": "offload_optimizer",
}
_FSDP = {
    "fsdp_size": "fsdp",
    "param_offload": "offload_params",
    "optimizer_offload": "offload_optimizer",
}
# A section of published configurations: sizes, or auto.
_PARALLEL_CONFIG = {
    "tensor_parallel_size": "actor.parallel.tp",
    "pipeline_parallel_size": "actor.parallel.pp",
    "sequence_parallel_size": "actor.parallel.sp",
    "data_parallel_size": "actor.parallel.dp",
    "fsdp_size": "actor.parallel.fsdp",
    "rollout_tensor_parallel_size": "rollout.tensor_parallel_size",
}
_FSDP_SECTIONS = {
    f"{_ACTOR}.fsdp_config": "rl.actor.parallel",
    f"{_CRITIC}.model.fsdp_config": "rl.critic.parallel",
    f"{_CRITIC}.fsdp": "rl.critic.parallel",
}

VERL: dict[str, Key] = {
    **{f"{_ACTOR}.{name}": Key(f"rl.actor.parallel.{ours}") for name, ours in _PARALLEL.items()},
    **{f"{_CRITIC}.{name}": Key(f"rl.critic.parallel.{ours}") for name, ours in _PARALLEL.items()},
    **{
        f"{section}.{name}": Key(
            f"{path}.{ours}", negative_is_none if name == "fsdp_size" else same
        )
        for section, path in _FSDP_SECTIONS.items()
        for name, ours in _FSDP.items()
    },
    **{
        f"actor_rollout_ref.ref.{section}.param_offload": Key("rl.reference.offload_params")
        for section in ("fsdp_config", "megatron")
    },
    "actor_rollout_ref.model.use_remove_padding": Key("rl.actor.parallel.packing"),
    "actor_rollout_ref.model.use_rmpad": Key("rl.actor.parallel.packing"),
    "actor_rollout_ref.model.trust_remote_code": Key("model.trust_remote_code"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Key(
        "rl.actor.parallel.activation_checkpointing"
    ),
    f"{_CRITIC}.model.enable_gradient_checkpointing": Key(
        "rl.critic.parallel.activation_checkpointing"
    ),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": Key("rl.rollout.tensor_parallel_size"),
    "data.train_files": Key("data.train_files", paths),
    "data.val_files": Key("data.val_files", paths),
    "data.prompt_key": Key("data.columns.prompt", text),
    "data.train_batch_size": Key("rl.trainer.train_batch_size"),
    "data.seed": Key("seed"),
    "actor_rollout_ref.model.path": Key("model.path", path),
    "actor_rollout_ref.model.lora_rank": Key("model.lora.rank"),
    "actor_rollout_ref.model.lora_alpha": Key("model.lora.alpha"),
    "actor_rollout_ref.model.target_modules": Key("model.lora.target_modules"),
    "actor_rollout_ref.model.override_config": Key("model.override_config"),
    **{f"{_ACTOR}.{name}": Key(f"rl.actor.{name}") for name in _ACTOR_SAME},
    **{
        f"{role}.optim.{name}": Key(f"rl.{ours_role}.optim.{ours}", _OPTIM_VALUES.get(name, same))
        for role, ours_role in ((_ACTOR, "actor"), (_CRITIC, "critic"))
        for name, ours in _OPTIM.items()
    },
    f"{_ACTOR}.optim.betas": Key(
        ("rl.actor.optim.beta1", "rl.actor.optim.beta2"), pair, note="two numbers"
    ),
    f"{_ACTOR}.grad_clip": Key("rl.actor.optim.grad_clip"),
    f"{_ACTOR}.ppo_mini_batch_size": Key("rl.actor.ppo_mini_batch_size", times=_N, note=_PROMPTS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Key("rl.actor.max_tokens_per_micro_batch"),
    "actor_rollout_ref.rollout.name": Key(
        "rl.rollout.engine", engine_name, note="native (or hf), vllm, server"
    ),
    "actor_rollout_ref.rollout.n": Key(_N),
    "actor_rollout_ref.rollout.temperature": Key("rl.rollout.temperature"),
    "actor_rollout_ref.rollout.top_k": Key("rl.rollout.top_k", zero_is_off, note="0 or -1: off"),
    "actor_rollout_ref.rollout.top_p": Key("rl.rollout.top_p"),
    **{
        f"{_ROLLOUT}.val_kwargs.{name}": Key(f"rl.rollout.val_kwargs.{name}", convert)
        for name, convert in (
            ("do_sample", same),
            ("n", same),
            ("temperature", zero_is_none),
            ("top_k", zero_is_off),
            ("top_p", same),
        )
    },
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": Key(
        "rl.rollout.enable_rollout_routing_replay"
    ),
    "actor_rollout_ref.rollout.max_num_seqs": Key("rl.rollout.max_num_seqs"),
    "actor_rollout_ref.rollout.multi_turn.enable": Key("rl.rollout.multi_turn.enable"),
    "actor_rollout_ref.rollout.multi_turn.format": Key("rl.rollout.multi_turn.format"),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": Key(
        "rl.rollout.multi_turn.max_assistant_turns"
    ),
    **{f"{_ROLLOUT}.{name}": Key(f"rl.rollout.vllm.{name}") for name in _VLLM_SAME},
    f"{_ROLLOUT}.free_cache_engine": Key(
        "rl.rollout.vllm.sleep", sleep_level, note="true: 2, false: 0"
    ),
    f"{_ROLLOUT}.cudagraph_capture_sizes": Key(
        "rl.rollout.vllm.engine_kwargs.cudagraph_capture_sizes"
    ),
    f"{_ROLLOUT}.engine_kwargs.vllm": Key("rl.rollout.vllm.engine_kwargs"),
    f"{_CRITIC}.optim.betas": Key(
        ("rl.critic.optim.beta1", "rl.critic.optim.beta2"), pair, note="two numbers"
    ),
    f"{_CRITIC}.model.path": Key("rl.critic.model_path", path),
    f"{_CRITIC}.model.lora_rank": Key("rl.critic.lora.rank"),
    f"{_CRITIC}.model.lora_alpha": Key("rl.critic.lora.alpha"),
    f"{_CRITIC}.model.target_modules": Key("rl.critic.lora.target_modules"),
    f"{_CRITIC}.grad_clip": Key("rl.critic.optim.grad_clip"),
    f"{_CRITIC}.ppo_mini_batch_size": Key("rl.critic.ppo_mini_batch_size", times=_N, note=_PROMPTS),
    f"{_CRITIC}.ppo_max_token_len_per_gpu": Key("rl.critic.max_tokens_per_micro_batch"),
    "algorithm.filter_groups.metric": Key("rl.algorithm.filter_groups.metric", group_metric),
    "algorithm.rollout_correction.bypass_mode": Key(
        "rl.actor.old_log_probs", bypass, note="true: rollout, false: auto"
    ),
    **{
        f"{section}.{name}": Key(f"rl.reward.overlong_buffer.{name}")
        for section in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for name in ("enable", "len", "penalty_factor")
    },
    **{
        f"parallel_config.{name}": Key(
            (f"rl.{ours}", "rl.trainer.placement"), size_or_auto, note="or auto"
        )
        for name, ours in _PARALLEL_CONFIG.items()
    },
    "trainer.n_gpus_per_node": Key("run.n_gpus_per_node"),
    "trainer.nnodes": Key("run.nnodes"),
    "trainer.device": Key("run.device", device),
    "trainer.val_only": Key("run.val_only"),
    "trainer.log_val_generations": Key("run.log_val_generations"),
    "trainer.rollout_data_dir": Key("run.rollout_data_dir", path),
    "trainer.test_freq": Key(
        "rl.trainer.test_freq", never_below_one, note="-1: only first and last"
    ),
    "trainer.total_epochs": Key("run.total_epochs"),
    "trainer.val_before_train": Key("run.val_before_train"),
    "trainer.save_freq": Key("run.save_freq"),
    "trainer.resume_mode": Key("run.resume_mode"),
    "trainer.resume_from_path": Key("rl.trainer.resume_from", path),
    "trainer.default_local_dir": Key("run.default_local_dir", path),
    "trainer.project_name": Key("run.project_name", text),
    "trainer.experiment_name": Key("run.experiment_name", text),
    "trainer.logger": Key("run.logger", loggers),
}
