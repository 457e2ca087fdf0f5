"""verl's keys that differ from ours: renamed, in other units, with other values, or not supported.

Keys of rewards are in `reward_file`; verl's defaults are in `resolve`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.errors import ConfigError

# Values of verl's keys as ours: other units, other words, other ways to say "off".

Convert = Callable[[object, str], object]  # the value, and its key for messages

NEVER = 10**9  # steps: longer than any run


def same(value: object, key: str) -> object:
    """As it is."""
    return value


def text(value: object, key: str) -> str:
    """A name that YAML may have read as a number or a date."""
    return str(value)


def path(value: object, key: str) -> str:
    """A path or name; the shell leaves a ~ that stands after a = as it is."""
    return os.path.expanduser(str(value))


def paths(value: object, key: str) -> list[object]:
    """One path, or a list of them."""
    return [path(one, key) if isinstance(one, str) else one for one in listed(value, key)]


def listed(value: object, key: str) -> list[object]:
    """One value, or a list of them."""
    return list(value) if isinstance(value, list | tuple) else [value]


_LOGGERS = ("console", "file", "jsonl", "mlflow", "tensorboard", "wandb")


def loggers(value: object, key: str) -> list[object]:
    """Names of loggers; those that only verl has are rejected with the way out."""
    names = listed(value, key)
    foreign = [name for name in names if name not in _LOGGERS]
    if foreign:
        raise ConfigError(
            f"{key}: {', '.join(map(str, foreign))} is not a logger here; choose from "
            f"{', '.join(_LOGGERS)}"
        )
    return names


def zero_is_off(value: object, key: str) -> object:
    """verl switches top-k off with -1, we with 0."""
    return 0 if value == -1 else value


def negative_is_none(value: object, key: str) -> object:
    """verl's -1 leaves a setting to its default."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value < 0 else value


def zero_is_none(value: object, key: str) -> object:
    """verl's temperature of 0 goes with do_sample=False, which decodes greedily by itself."""
    return None if value == 0 else value


def device(value: object, key: str) -> object:
    """Processors of other vendors are rejected."""
    if value not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"{key}={value!r} is not available here; choose cuda, cpu or auto")
    return value


def never_below_one(value: object, key: str) -> object:
    """verl's -1 (or 0) steps between two validations: only the first and the last are done."""
    return NEVER if isinstance(value, int) and value < 1 else value


def pair(value: object, key: str) -> list[object]:
    """Two numbers, such as AdamW's betas."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be a list of two numbers, such as [0.9,0.95]")
    return list(value)


def optimizer(value: object, key: str) -> object:
    """torch's names; Megatron's own Adam is AdamW."""
    return {"adam": "AdamW", "adamw": "AdamW", "sgd": "SGD"}.get(str(value), value)


def zero_alone(value: object, key: str) -> object:
    """Megatron's least learning rate; other ones are given as a share of the peak."""
    if value != 0:
        raise ConfigError(f"{key}={value!r} is not available here: set min_lr_ratio, over lr")
    return value


def size_or_auto(value: object, key: str) -> list[object]:
    """A number of ranks, or `auto`, with which the planner chooses it."""
    return [None, "auto"] if value == "auto" else [value, None]


def engine_name(value: object, key: str) -> object:
    """verl's `hf` decodes with the trainer's own model, as our `native` does."""
    return "native" if value == "hf" else value


def sleep_level(value: object, key: str) -> int:
    """verl frees the KV cache and the weights, which the next update loads again."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return 2 if value else 0


def group_metric(value: object, key: str) -> object:
    """What verl's DAPO compares in a group; its sequence scores and `acc` are our raw score."""
    ours = {"acc": "score", "seq_reward": "score", "seq_final_reward": "reward"}
    return ours.get(value, value) if isinstance(value, str) else value


def bypass(value: object, key: str) -> str:
    """Whether the log-probs of sampling stand for the trainer's own."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} must be true or false")
    return "rollout" if value else "auto"


# verl's keys that we have under another name, in another unit, or with other values.
#
# A table; the converters of its values are in `verl_values`. Keys with the same name and meaning
# on
# both sides (`algorithm.gamma`, `data.max_prompt_length`) need no entry. Keys that we don't have
# are
# in `unsupported_keys`.


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


# verl's keys that are not supported, and what to do instead.
#
# Only a table. A value that asks for what happens anyway is accepted silently. A key without
# effect
# on the result costs a notice. All others are rejected, because the run would not be what was
# asked
# for.


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """A key of verl's, or many of them, that this project does not have."""

    pattern: str  # the key, with * for anything, e.g. "actor_rollout_ref.*.fsdp_config.*"
    reason: str  # what to do instead, or why nothing is lost
    accepted: tuple[object, ...] = ()  # values that change nothing; null always is one
    rejected: bool = True  # False: other values cost a notice, not the run

    def matches(self, key: str) -> bool:
        """Whether the pattern matches `key`."""
        return fnmatchcase(key, self.pattern)


def _ignore(pattern: str, why: str) -> UnsupportedKey:
    return UnsupportedKey(pattern, why, rejected=False)


def _reject(pattern: str, why: str, accepted: tuple[object, ...] = ()) -> UnsupportedKey:
    return UnsupportedKey(pattern, why, accepted)


_MICRO = "micro-batches are cut by tokens; see actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_ENGINE = "the rollout engine chooses this itself"
_SHARDING = "a model is sharded as rl.actor.parallel says: dp, fsdp, sp, tp and pp ranks"
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_EXPERTS = "a mixture's experts are sharded with the other weights, see docs/parallel.md"
_RECOMPUTE = "see actor_rollout_ref.model.enable_gradient_checkpointing"
_OFFLOAD = "see actor_rollout_ref.actor.fsdp_config.optimizer_offload"
_MASTERS = "masters are float32; set model.dtype for the weights that are computed with"
_PADDING = "see actor_rollout_ref.model.use_remove_padding"
_KERNELS = "the model's own kernels are used"
_AS_ACTOR = "the reference is sharded as the actor is"
_TEXT = "prompts are text"
_TURNS = "set actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
_ENVIRONMENT = "tools and answers are the environment's, see rl.rollout.agent.environment.name"
_SAMPLES = "samples go to trainer.default_local_dir/rollouts, see trainer.log_rollouts_freq"

UNSUPPORTED: tuple[UnsupportedKey, ...] = (
    # Sizes and memory: other values give the same result.
    _ignore("*.ppo_micro_batch_size*", _MICRO),
    _ignore("*.log_prob_micro_batch_size*", _MICRO),
    _ignore("*.forward_micro_batch_size*", _MICRO),
    _ignore("*.forward_max_token_len_per_gpu", _MICRO),
    _ignore("*.log_prob_max_token_len_per_gpu", _MICRO),
    _ignore("*use_dynamic_bsz", _MICRO),
    _reject("*.fsdp_config.model_dtype", _MASTERS, ("fp32", "float32")),
    _ignore("*.fsdp_config*", _SHARDING),
    _ignore("critic.fsdp*", _SHARDING),
    _reject("*.strategy", "set fsdp, fsdp2, or megatron with its sizes", _STRATEGIES),
    _reject("*.megatron.expert_model_parallel_size", _EXPERTS, (1,)),
    _reject("*.megatron.expert_tensor_parallel_size", _EXPERTS, (1,)),
    _reject("*.megatron.dist_checkpointing_path", "give a Hugging Face folder as model.path"),
    _ignore("*.megatron.override_transformer_config.recompute*", _RECOMPUTE),
    _ignore("*.megatron.override_transformer_config.*fusion*", _KERNELS),
    _ignore("*.megatron.override_transformer_config.*attention_backend", _KERNELS),
    _reject("*.megatron.override_transformer_config*", "change the model's config.json", ({},)),
    _ignore("actor_rollout_ref.ref.megatron*", _AS_ACTOR),
    _ignore("actor_rollout_ref.ref.ulysses_sequence_parallel_size", _AS_ACTOR),
    _ignore("*.megatron*", _SHARDING),
    _ignore("actor_rollout_ref.hybrid_engine", "the rollout always shares the trainer's weights"),
    _ignore("actor_rollout_ref.nccl_timeout", "deadlines are rl.trainer.step_timeout_s"),
    _ignore("*.enable_activation_offload", "activations are kept"),
    _ignore("critic.model.use_remove_padding", "see rl.critic.parallel.packing"),
    _ignore("*.use_torch_compile", "nothing is compiled"),
    _ignore("*.use_liger", _KERNELS),
    _ignore("*.use_fused_kernels", _KERNELS),
    _ignore("*.fused_kernel_options*", _KERNELS),
    _ignore("*.use_shm", "models and data are read where they are"),
    _ignore("*.entropy_from_logits_with_chunking", _MICRO),
    _ignore("*.entropy_checkpointing", _MICRO),
    _ignore("*.calculate_entropy", "the entropy is always measured"),
    _ignore("*.calculate_sum_pi_squared", "it is computed where the estimator reads it"),
    _ignore("*.checkpoint.*", "whole Hugging Face folders are saved"),
    _ignore("*.profiler*", "nothing is profiled"),
    _ignore("global_profiler*", "nothing is profiled"),
    *(
        _ignore(f"actor_rollout_ref.rollout.{name}", _ENGINE)
        for name in (
            "max_model_len",
            "load_format",
            "layered_summon",
            "disable_log_stats",
            "engine_kwargs*",
            "mode",
            "calculate_log_probs",
            "agent.*",
            "checkpoint_engine*",
            "skip_tokenizer_init",
            "multi_stage_wake_up",
            "update_weights_bucket_megabytes",
            "trace.*",
            "skip_dump_dir",
        )
    ),
    _ignore(
        "actor_rollout_ref.rollout.dtype",
        "rollout uses the policy's weights; see model.dtype, rl.rollout.dtype",
    ),
    _ignore("actor_rollout_ref.rollout.seed", "set seed"),
    _ignore("actor_rollout_ref.rollout.prompt_length", "set data.max_prompt_length"),
    _ignore("actor_rollout_ref.rollout.response_length", "set data.max_response_length"),
    _ignore("*.rollout_n", "it is actor_rollout_ref.rollout.n"),
    UnsupportedKey("*.shuffle", "mini-batches are cut from shuffled rows", (True,), rejected=False),
    _ignore("*.data_loader_seed", "set seed"),
    # The data.
    _ignore("data.return_*", "rows keep all their columns"),
    _ignore("data.val_batch_size", "validation takes all rows at once"),
    _ignore("data.gen_batch_size", "batches that are refilled have data.train_batch_size prompts"),
    _ignore("data.*_workers", "data are prepared in the controller"),
    _ignore("data.validation_shuffle", "the mean over all rows needs no order"),
    _ignore("data.reward_fn_key", "the reward gets all columns and one function scores all rows"),
    _reject("data.tokenizer", "the model's own tokenizer is used"),
    _reject("data.sampler*", "see data.sampling"),
    _reject("data.datagen*", "give files"),
    _reject("data.custom_cls*", "give files, and name their columns in data.columns"),
    _reject("data.tool_config_path", "there are no tools"),
    _reject("data.function_tool_path", "there are no tools"),
    *(
        _ignore(f"data.{name}", _TEXT)
        for name in ("image_key", "video_key", "audio_key", "image_patch_size", "mm_processor_*")
    ),
    # What would change the result.
    _reject("*.data_parallel_size", _SHARDING, (1,)),
    _reject("*.pipeline_model_parallel_size", "a rollout engine has no stages", (1,)),
    _reject("*.expert_parallel_size", "there is no expert parallelism", (1,)),
    _reject("*.exclude_modules", "name the modules that get an adapter in target_modules"),
    _reject("*.lora_adapter_path", "set actor_rollout_ref.model.path to the adapter's folder"),
    _reject("*.lora.rank", "set actor_rollout_ref.model.lora_rank", (0,)),
    _ignore("*.lora.*", "see actor_rollout_ref.model.lora_rank"),
    _reject("critic.model.override_config*", "change the model's config.json", ({},)),
    _reject("*.external_lib", "name your modules in rl.plugins"),
    _reject("*.custom_chat_template", "put it into the model's tokenizer"),
    _reject("*.tokenizer_path", "put the tokenizer into the model's folder"),
    _reject("*.hf_config_path", "put config.json into the model's folder"),
    _reject("*.optim.optimizer_impl", "set optimizer to AdamW, Adam or SGD", ("torch.optim",)),
    _ignore("*.optim.total_training_steps", "the schedule ends with the run"),
    _ignore("*.optim.zero_indexed_step", "the first step already counts"),
    _ignore("*.optim.override_optimizer_config.*offload*", _OFFLOAD),
    _ignore("*.optim.override_optimizer_config.*overlap*", _OFFLOAD),
    _reject("*.optim.override_optimizer_config*", "set betas, weight_decay or momentum", ({},)),
    _reject("*.optim.lr_decay_steps", "the schedule ends with the run"),
    _reject("*.optim.lr_warmup_init", "a warm-up begins at its first share of lr", (0, 0.0)),
    _reject("*.optim.weight_decay_incr_style", "weight_decay is constant", ("constant",)),
    _reject("*.optim.lr_wsd_decay_*", "wsd ends in a cosine, see optim.stable_ratio"),
    _reject("*.optim.use_checkpoint_opt_param_scheduler", "settings are the run's", (False,)),
    _ignore("actor_rollout_ref.rollout.micro_batch_size*", _MICRO),
    _reject("actor_rollout_ref.rollout.over_sample_rate", "set trainer.mode=async", (0, 0.0)),
    _reject("actor_rollout_ref.rollout.skip_rollout", "completions are sampled", (False,)),
    _reject("actor_rollout_ref.ref.model*", "the reference is actor_rollout_ref.model.path"),
    _ignore("actor_rollout_ref.actor.use_remove_padding", _PADDING),
    _reject("actor_rollout_ref.rollout.do_sample", "set rollout.temperature", (True,)),
    _reject("actor_rollout_ref.rollout.ignore_eos", "completions end at the end token", (False,)),
    _reject("actor_rollout_ref.rollout.multi_turn.max_user_turns", _TURNS),
    _reject("actor_rollout_ref.rollout.multi_turn.*_config_path", _ENVIRONMENT),
    _ignore("actor_rollout_ref.rollout.multi_turn.*", _ENVIRONMENT),
    _reject("actor_rollout_ref.rollout.agent.*_path", _ENVIRONMENT),
    _ignore("actor_rollout_ref.rollout.agent.*", _ENVIRONMENT),
    _ignore("critic.enable", "algorithm.adv_estimator decides whether there is a critic"),
    _ignore("critic.model.tokenizer_path", "the critic reads the policy's tokens"),
    _reject("*.trust_remote_code", "no code of a model's folder is run", (False,)),
    _ignore("critic.model.*", "the critic is read from its folder as it is"),
    _reject("critic.loss_agg_mode", "the value loss is a mean over tokens", ("token-mean",)),
    _reject("algorithm.use_pf_ppo", "choose an estimator of docs/algorithms.md", (False,)),
    _ignore("algorithm.pf_ppo*", "it needs use_pf_ppo"),
    _reject(
        "algorithm.rollout_correction.loss_type",
        "set actor_rollout_ref.actor.policy_loss.loss_mode",
        ("ppo_clip",),
    ),
    # Rewards.
    _reject("reward_model.reward_manager", "one manager scores all rows", ("naive", "dapo")),
    _reject("reward.reward_manager.name", "one manager scores all rows", ("naive", "dapo")),
    _ignore("*overlong_buffer*.log", "the penalty is always measured"),
    _ignore("*overlong_buffer_cfg.log", "the penalty is always measured"),
    _ignore("*.max_resp_len", "it is data.max_response_length"),
    _ignore("reward_model.launch_reward_fn_async", "the reward always runs beside the other roles"),
    _ignore("reward_model.*", "the reward is a function, see rl.reward"),
    _ignore("reward.num_workers", "the reward is one process, see rl.reward"),
    _reject("*sandbox_fusion.url", "call it from your own reward function"),
    _ignore("*sandbox_fusion*", "it needs a url"),
    # The loop.
    _ignore("trainer.balance_batch", "ranks get equally many rows, in micro-batches cut by tokens"),
    _ignore("trainer.use_*", "there is one trainer"),
    _ignore("trainer.validation_data_dir", _SAMPLES),
    _reject("trainer.default_hdfs_dir", "copy trainer.default_local_dir when the run is over"),
    _reject("trainer.max_actor_ckpt_to_keep", "all saved models are kept"),
    _reject(
        "trainer.max_critic_ckpt_to_keep",
        "checkpoints are kept by rl.trainer.max_checkpoints_to_keep",
    ),
    _ignore(
        "trainer.del_local_ckpt_after_load",
        "checkpoints are kept by rl.trainer.max_checkpoints_to_keep",
    ),
    _ignore("trainer.esi_redundant_time", "saves come by trainer.save_freq"),
    _ignore("trainer.ray_wait_register_center_timeout", "set rl.trainer.start_timeout_s"),
    _ignore("ray_init*", "Ray is joined at RAY_ADDRESS, or started here"),
    _ignore("ray_kwargs*", "Ray is joined at RAY_ADDRESS, or started here"),
    _reject(
        "distillation.enabled",
        "set algorithm.dataflow=distillation and algorithm.teacher=FOLDER",
        (False,),
    ),
    _ignore("distillation*", "see algorithm.teacher and algorithm.distillation"),
    _reject("trainer.v1.trainer_mode", "set trainer.mode to one_step_off or async", ("sync",)),
    _ignore("trainer.v1.*", "see trainer.mode"),
    _ignore("transfer_queue*", "futures go from worker to worker through Ray"),
    _ignore("hydra*", "Hydra is not used"),
    _ignore("defaults", "Hydra is not used; give all values in one file"),
)


def find_unsupported(key: str) -> UnsupportedKey | None:
    """The first entry that matches `key`."""
    return next((entry for entry in UNSUPPORTED if entry.matches(key)), None)
