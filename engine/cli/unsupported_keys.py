"""verl's keys that we knowingly don't have, and what to do instead.

A table and nothing else. A key is harmless where its value asks for what happens here anyway; then
it is accepted in silence. Keys without effect on the result are accepted with a notice. All others
are refused, because the run would not be what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Absent:
    """A key of verl's, or many of them, that this project does not have."""

    pattern: str  # the key, with * for anything, e.g. "actor_rollout_ref.*.fsdp_config.*"
    say: str  # the way out, or why nothing is lost
    harmless: tuple[Any, ...] = ()  # values that change nothing; null is always one
    refused: bool = True  # False: other values cost a notice, not the run
    same_as: str = ""  # harmless where it equals the setting at this path of RunConfig

    def matches(self, key: str) -> bool:
        """Whether `key`, or the section that it names, is meant."""
        return fnmatchcase(key, self.pattern)


def _void(pattern: str, why: str) -> Absent:
    return Absent(pattern, why, refused=False)


_MICRO = "micro-batches are cut by tokens; see actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_ENGINE = "the rollout engine chooses this itself"
_SPREAD = "a model is spread as rl.actor.parallel says: dp, fsdp, sp, tp and pp ranks"
_FSDP = "set rl.actor.parallel.fsdp, the ranks that share the weights"
_AS_ACTOR = "the reference is spread as the actor is"
_GREEDY = "validation takes one greedy completion a prompt"
_WARMUP = "set lr_warmup_steps_ratio, the share of all steps"
_NO_LORA = "a critic trains all its weights; leave it out"
_TEXT = "prompts are text"

ABSENT: tuple[Absent, ...] = (
    # Sizes and memory: other values give the same result.
    _void("*.ppo_micro_batch_size*", _MICRO),
    _void("*.log_prob_micro_batch_size*", _MICRO),
    _void("*.forward_micro_batch_size*", _MICRO),
    _void("*.forward_max_token_len_per_gpu", _MICRO),
    _void("*.log_prob_max_token_len_per_gpu", _MICRO),
    _void("*use_dynamic_bsz", _MICRO),
    Absent("*.fsdp_size", _FSDP, (-1, 1)),
    _void("*.fsdp_config.param_offload", "see rl.actor.parallel.offload_params"),
    _void("*.fsdp_config.optimizer_offload", "see rl.actor.parallel.offload_optimizer"),
    _void("*.fsdp_config*", _SPREAD),
    _void("critic.fsdp*", _SPREAD),
    _void("*.strategy", _SPREAD),
    _void("actor_rollout_ref.ref.megatron*", _AS_ACTOR),
    _void("actor_rollout_ref.ref.ulysses_sequence_parallel_size", _AS_ACTOR),
    _void("*.megatron*", _SPREAD),
    _void("actor_rollout_ref.hybrid_engine", "the rollout always shares the trainer's weights"),
    _void("actor_rollout_ref.nccl_timeout", "deadlines are rl.trainer.step_timeout_s"),
    _void("*.enable_activation_offload", "activations are kept"),
    _void("critic.model.use_remove_padding", "see rl.critic.parallel.packing"),
    _void("*.use_torch_compile", "nothing is compiled"),
    _void("*.use_liger", "the model's own kernels are used"),
    _void("*.use_fused_kernels", "the model's own kernels are used"),
    _void("*.fused_kernel_options*", "the model's own kernels are used"),
    _void("*.use_shm", "models and data are read where they are"),
    _void("*.trust_remote_code", "no code of a model's folder is run"),
    _void("*.entropy_from_logits_with_chunking", _MICRO),
    _void("*.entropy_checkpointing", _MICRO),
    _void("*.calculate_entropy", "the entropy is always measured"),
    _void("*.calculate_sum_pi_squared", "it is computed where the estimator reads it"),
    _void("*.checkpoint.*", "whole Hugging Face folders are saved"),
    _void("*.profiler*", "nothing is profiled"),
    _void("global_profiler*", "nothing is profiled"),
    *(
        _void(f"actor_rollout_ref.rollout.{name}", _ENGINE)
        for name in (
            "gpu_memory_utilization",
            "enforce_eager",
            "free_cache_engine",
            "max_num_batched_tokens",
            "max_model_len",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "cudagraph_capture_sizes",
            "load_format",
            "layered_summon",
            "disable_log_stats",
            "engine_kwargs*",
            "mode",
            "calculate_log_probs",
            "agent.*",
            "checkpoint_engine*",
            "skip_tokenizer_init",
        )
    ),
    _void(
        "actor_rollout_ref.rollout.dtype",
        "rollout uses the policy's weights; see model.dtype, rl.rollout.dtype",
    ),
    _void("actor_rollout_ref.rollout.seed", "set seed"),
    _void("actor_rollout_ref.rollout.prompt_length", "set data.max_prompt_length"),
    _void("actor_rollout_ref.rollout.response_length", "set data.max_response_length"),
    _void("*.rollout_n", "it is actor_rollout_ref.rollout.n"),
    Absent("*.shuffle", "mini-batches are cut from shuffled rows", (True,), refused=False),
    _void("*.data_loader_seed", "set seed"),
    # The data.
    _void("data.return_*", "rows keep all their columns"),
    _void("data.val_batch_size", "validation takes all rows at once"),
    _void("data.gen_batch_size", "batches that are refilled have data.train_batch_size prompts"),
    _void("data.*_workers", "data are prepared in the controller"),
    _void("data.validation_shuffle", "the mean over all rows needs no order"),
    Absent("data.prompt_key", "name the column `prompt`", ("prompt",)),
    _void("data.reward_fn_key", "the reward gets all columns and one function scores all rows"),
    Absent("data.truncation", "set data.filter_overlong_prompts=true instead", ("error",)),
    Absent("data.*_max_samples", "give a file with fewer rows", (-1,)),
    Absent("data.tokenizer", "the model's own tokenizer is used"),
    Absent("data.custom_cls*", "write the rows as Parquet or JSONL"),
    Absent("data.tool_config_path", "there are no tools"),
    Absent("data.function_tool_path", "there are no tools"),
    Absent("data.apply_chat_template_kwargs*", "put it into the model's chat template", ({},)),
    *(
        _void(f"data.{name}", _TEXT)
        for name in ("image_key", "video_key", "audio_key", "image_patch_size", "mm_processor_*")
    ),
    # What would change the result.
    Absent("*.data_parallel_size", _SPREAD, (1,)),
    Absent("*.pipeline_model_parallel_size", "a rollout engine has no stages", (1,)),
    Absent("*.expert_parallel_size", "experts are not spread", (1,)),
    Absent("critic.model.lora_rank", _NO_LORA, (0,)),
    _void("critic.model.lora_alpha", _NO_LORA),
    _void("critic.model.target_modules", _NO_LORA),
    Absent("*.exclude_modules", "name the modules that get an adapter in target_modules"),
    Absent("*.lora_adapter_path", "set actor_rollout_ref.model.path to the adapter's folder"),
    Absent("*.lora.rank", "set actor_rollout_ref.model.lora_rank", (0,)),
    _void("*.lora.*", "see actor_rollout_ref.model.lora_rank"),
    Absent("*.override_config*", "change the model's config.json", ({},)),
    Absent("*.external_lib", "name your modules in rl.plugins"),
    Absent("*.custom_chat_template", "put it into the model's tokenizer"),
    Absent("*.tokenizer_path", "put the tokenizer into the model's folder"),
    Absent("*.hf_config_path", "put config.json into the model's folder"),
    Absent("*.optim.lr_warmup_steps", _WARMUP, (-1, 0)),
    Absent("*.optim.optimizer", "AdamW is what there is", ("AdamW",)),
    _void("*.optim.optimizer_impl", "AdamW is torch.optim's"),
    _void("*.optim.total_training_steps", "the schedule ends with the run"),
    _void("*.optim.num_cycles", "a cosine goes down once"),
    _void("*.optim.zero_indexed_step", "the first step already counts"),
    Absent("*.optim.override_optimizer_config", "set beta1, beta2 and weight_decay"),
    Absent("actor_rollout_ref.rollout.do_sample", "set rollout.temperature", (True,)),
    Absent("actor_rollout_ref.rollout.ignore_eos", "completions end at the end token", (False,)),
    Absent("actor_rollout_ref.rollout.val_kwargs.temperature", _GREEDY, (0, 0.0)),
    Absent("actor_rollout_ref.rollout.val_kwargs.n", _GREEDY, (1,)),
    Absent("actor_rollout_ref.rollout.val_kwargs.do_sample", _GREEDY, (False,)),
    _void("actor_rollout_ref.rollout.val_kwargs.top_*", _GREEDY),
    Absent("actor_rollout_ref.rollout.multi_turn.enable", "completions have one turn", (False,)),
    _void("actor_rollout_ref.rollout.multi_turn.*", "completions have one turn"),
    _void("critic.enable", "algorithm.adv_estimator decides whether there is a critic"),
    Absent("critic.model.path", "the critic starts from the policy's model", same_as="model.path"),
    _void("critic.model.tokenizer_path", "the critic reads the policy's tokens"),
    _void("critic.model.*", "the critic has the policy's shape"),
    Absent("critic.loss_agg_mode", "the value loss is a mean over tokens", ("token-mean",)),
    Absent("algorithm.use_pf_ppo", "choose an estimator of docs/algorithms.md", (False,)),
    _void("algorithm.pf_ppo*", "it needs use_pf_ppo"),
    Absent(
        "algorithm.rollout_correction.loss_type",
        "set actor_rollout_ref.actor.policy_loss.loss_mode",
        ("ppo_clip",),
    ),
    # Rewards.
    Absent("*custom_reward_function.reward_kwargs*", "write them into the function", ({},)),
    Absent("reward_model.enable", "give a reward function: rl.reward.name", (False,)),
    Absent("reward.reward_model.enable", "give a reward function: rl.reward.name", (False,)),
    Absent("reward_model.model.*", "give a reward function: rl.reward.name"),
    Absent("reward_model.reward_manager", "one manager scores all rows", ("naive", "dapo")),
    Absent("reward.reward_manager.name", "one manager scores all rows", ("naive", "dapo")),
    _void("*overlong_buffer*.log", "the penalty is always measured"),
    _void("*overlong_buffer_cfg.log", "the penalty is always measured"),
    _void("*.max_resp_len", "it is data.max_response_length"),
    _void("reward_model.launch_reward_fn_async", "the reward always runs beside the other roles"),
    _void("reward_model.*", "the reward is a function, see rl.reward"),
    _void("reward.num_workers", "the reward is one process, see rl.reward"),
    Absent("*sandbox_fusion.url", "call it from your own reward function"),
    _void("*sandbox_fusion*", "it needs a url"),
    # The loop.
    _void("trainer.n_gpus_per_node", _SPREAD),
    _void("trainer.nnodes", "the nodes are those of the Ray cluster that RAY_ADDRESS names"),
    _void("trainer.device", "see rl.trainer.placement=auto, and gpus in rl.trainer.pools"),
    _void("trainer.balance_batch", "ranks get equally many rows, in micro-batches cut by tokens"),
    _void("trainer.use_*", "there is one trainer"),
    Absent("trainer.resume_from_path", "a run resumes from trainer.default_local_dir by itself"),
    Absent("trainer.critic_warmup", "critic and policy start together", (0,)),
    Absent("trainer.val_only", "set trainer.val_before_train=true and one step", (False,)),
    Absent("trainer.log_val_generations", "look at the report of tasks/evaluate.py", (0,)),
    Absent("trainer.rollout_data_dir", "completions are not written"),
    Absent("trainer.validation_data_dir", "completions are not written"),
    Absent("trainer.default_hdfs_dir", "copy trainer.default_local_dir when the run is over"),
    Absent("trainer.max_actor_ckpt_to_keep", "all saved models are kept"),
    Absent(
        "trainer.max_critic_ckpt_to_keep",
        "checkpoints are kept by rl.trainer.max_checkpoints_to_keep",
    ),
    _void(
        "trainer.del_local_ckpt_after_load",
        "checkpoints are kept by rl.trainer.max_checkpoints_to_keep",
    ),
    _void("trainer.esi_redundant_time", "saves come by trainer.save_freq"),
    _void("trainer.ray_wait_register_center_timeout", "set rl.trainer.start_timeout_s"),
    _void("ray_init*", "Ray is joined at RAY_ADDRESS, or started here"),
    _void("ray_kwargs*", "Ray is joined at RAY_ADDRESS, or started here"),
    Absent(
        "distillation.enabled",
        "set algorithm.dataflow=distillation and algorithm.teacher=FOLDER",
        (False,),
    ),
    _void("distillation*", "see algorithm.teacher"),
    Absent("trainer.v1.trainer_mode", "set trainer.mode to one_step_off or async", ("sync",)),
    _void("trainer.v1.*", "see trainer.mode"),
    _void("transfer_queue*", "futures go from worker to worker through Ray"),
    _void("hydra*", "Hydra is not used"),
    _void("defaults", "Hydra is not used; give all values in one file"),
)


def find_absent(key: str) -> Absent | None:
    """The first entry that speaks of `key`."""
    return next((entry for entry in ABSENT if entry.matches(key)), None)
