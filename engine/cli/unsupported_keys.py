"""verl's keys that are not supported, and what to do instead.

Only a table. A value that asks for what happens anyway is accepted silently. A key without effect
on the result costs a notice. All others are rejected, because the run would not be what was asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


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
