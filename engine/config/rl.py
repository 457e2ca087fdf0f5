"""The roles of an RL run and the loop around them, with rewards, recorded steps and GPU kinds."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from engine.config.algorithm import AlgorithmConfig
from engine.config.base import NamedSection, Options, Section
from engine.config.data import AdapterConfig
from engine.config.rollout_engines import AgentConfig, MultiTurnConfig, ServerConfig, VllmConfig
from engine.config.training import LoopConfig, OptimConfig, ParallelConfig


class OverlongBufferConfig(Section):
    """DAPO's soft penalty on completions that come near the length limit."""

    enable: bool = Field(False, description="Penalize completions near the length limit (DAPO)")
    len: int = Field(16, ge=1, description="Tokens before the limit where the penalty starts")
    penalty_factor: float = Field(1.0, ge=0, description="Penalty at the limit")


class RewardSpec(NamedSection):
    """A reward function; its name alone stands for one without options."""

    name: str = Field("answer_match", description="Its registered name, or package.module:function")
    options: Options = Field({}, description="Options that the reward declares, by name")


class RewardConfig(RewardSpec):
    """What a completion is worth."""

    sources: dict[str, RewardSpec] = Field({})
    """Another reward for the rows of a data_source, by that source's name"""
    components: dict[str, RewardSpec] = Field({})
    """Rewards that are added as components, by the component's name"""
    timeout_s: float = Field(30.0, gt=0, description="Deadline for scoring one batch")
    sample_timeout_s: float = Field(5.0, gt=0)
    """Deadline of one completion, for rewards that run in a pool"""
    processes: int = Field(0, ge=0, description="Processes of a pool; 0: one per core, at most 8")
    isolation: Literal["process", "none"] = "process"
    """Where a reward of yours runs: a process of its own, or the role's"""
    weights: dict[str, float] = Field({}, description="Weights of named components; 1 unless given")
    on_error: Literal["drop", "zero", "fail"] = "drop"
    """A sample whose reward fails: leave it out, score 0, or end the run"""
    clip: tuple[float, float] | None = Field(None, description="Bounds of a completion's reward")
    whiten: bool = Field(False, description="Scale token rewards to unit variance over the batch")
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    def specs(self) -> dict[str, RewardSpec]:
        """Return all reward functions by setting, e.g. `reward.components.format`."""
        specs: dict[str, RewardSpec] = {"reward": self}
        specs |= {f"reward.sources.{name}": spec for name, spec in self.sources.items()}
        return specs | {f"reward.components.{name}": s for name, s in self.components.items()}


RECORDS = "recorded"  # folder of the records, beside the checkpoints


class DebugConfig(Section):
    """Records of steps, for `python -m engine.replay`."""

    record_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps, e.g. [3, 40], whose inputs and state go to recorded/ beside the checkpoints"""
    record_failed: bool = False
    """The same for steps that end in an error or with a metric that is not finite; each step then
    waits for a write of the state that it begins with"""

    @property
    def enabled(self) -> bool:
        """Tell whether any step may be recorded."""
        return bool(self.record_steps) or self.record_failed


class GpuKindConfig(Section):
    """What one GPU that the planner's table does not have can do, from its data sheet."""

    memory_gib: float = Field(gt=0, description="Its memory in GiB")
    tflops: float = Field(gt=0, description="Dense bfloat16, in 10^12 operations a second")
    memory_gbs: float = Field(gt=0, description="Bandwidth of its memory, 10^9 bytes a second")
    link_gbs: float = Field(32.0, gt=0)
    """To GPUs of its machine, each way, 10^9 bytes a second"""
    network_gbs: float = Field(12.5, gt=0)
    """To other machines, 10^9 bytes a second for each GPU"""
    vendor: Literal["nvidia", "amd"] = "nvidia"


class PolicyLossConfig(Section):
    """Which policy loss. An option that is None has the loss's own default."""

    loss_mode: str = "vanilla"
    """Name in the registry of policy losses, or package.module:name"""
    clip_cov_ratio: float | None = Field(None, gt=0, description="Share of tokens clip_cov drops")
    clip_cov_lb: float | None = Field(None, description="Least covariance that clip_cov drops")
    clip_cov_ub: float | None = Field(None, description="Largest covariance that clip_cov drops")
    kl_cov_ratio: float | None = Field(None, gt=0, le=1, description="Share kl_cov penalises")
    ppo_kl_coef: float | None = Field(None, ge=0, description="kl_cov's penalty")
    dro_beta: float | None = Field(None, gt=0, description="DRO's quadratic penalty")
    options: Options = Field({}, description="Options of a loss of your own, by name")


class RouterReplayConfig(Section):
    """Whose choice of experts an MoE model's routers repeat in training."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """R2: the trainer's own before the update; R3: that of rollout"""


class UpdateConfig(Section):
    """How a role learns from a step's batch."""

    ppo_mini_batch_size: int = Field(0, ge=0, description="Completions per optimizer step; 0: all")
    ppo_epochs: int = Field(1, ge=1, description="Passes over each step's batch")
    max_tokens_per_micro_batch: int = Field(16384, ge=64)
    """Tokens of one forward and backward pass; on a GPU fewer if 16384 need too much memory"""


class ActorConfig(UpdateConfig):
    """The policy's update."""

    optim: OptimConfig = OptimConfig(lr=5e-4, weight_decay=0.0)
    old_log_probs: Literal["auto", "rollout", "trainer"] = "auto"
    """rollout: as sampled; trainer: recomputed; auto: as sampled where both agree"""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    clip_ratio: float | None = Field(None, gt=0, lt=1, description="Clip range; None: loss's (0.2)")
    clip_ratio_low: float | None = Field(None, gt=0, lt=1, description="Low clip; None: clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0, description="High clip; None: clip_ratio")
    clip_ratio_c: float | None = Field(None, gt=1, description="Dual clip; None: the loss's own")
    tau_pos: float | None = Field(None, gt=0, description="SAPO's gate where advantages are > 0")
    tau_neg: float | None = Field(None, gt=0, description="SAPO's gate where advantages are <= 0")
    loss_agg_mode: str | None = None
    """How token losses become one number; None: the loss's own, or token-mean"""
    loss_scale_factor: float | None = Field(None, gt=0)
    """Divisor of seq-mean-token-sum-norm; None: the response width"""
    entropy_coeff: float = Field(0.0, ge=0, description="Coefficient of the loss's entropy bonus")
    use_kl_loss: bool = Field(True, description="KL to the reference as a term of the loss")
    kl_loss_coef: float = Field(0.001, ge=0, description="Coefficient of use_kl_loss's term")
    kl_loss_type: str = Field("low_var_kl", description="KL estimator in the loss")
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """MoE models: weight of the loss that balances experts' load"""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    parallel: ParallelConfig = ParallelConfig()


class CriticConfig(UpdateConfig):
    """The value model of PPO."""

    model_path: str = ""
    """Start model, with the policy's tokens; empty: the policy's model"""
    optim: OptimConfig = OptimConfig(lr=1e-3, weight_decay=0.0)
    ppo_epochs: int = Field(2, ge=1, description="Passes over each step's batch")
    cliprange_value: float = Field(0.5, gt=0)
    """Values move at most this far from the rollout's before their loss is clipped"""
    lora: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig | None = Field(None, description="None: as the actor's")


class ReferenceConfig(Section):
    """The policy as it was before RL, sharded as the actor is."""

    offload_params: bool = Field(False, description="Keep it in CPU memory between uses (fsdp)")


class TokenSamplingConfig(Section):
    """How a token is drawn."""

    temperature: float = Field(1.0, gt=0, description="Sampling temperature")
    top_k: int = Field(0, ge=0, description="Sample among this many likeliest tokens; 0: all")
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the likeliest tokens that sum to this probability"""


class ValidationSamplingConfig(TokenSamplingConfig):
    """How completions of validation rows are decoded."""

    do_sample: bool = False
    """true: sample n completions by temperature, top_k and top_p; false: one greedy completion"""
    n: int = Field(1, ge=1, description="Completions per row; the score is their mean")


class RolloutConfig(TokenSamplingConfig):
    """How completions are sampled."""

    engine: str = "native"
    """native, vllm, server, or yours as package.module:name"""
    options: Options = Field({}, description="Options of an engine of your own, by name")
    n: int = Field(8, ge=1, description="Completions per prompt")
    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that decode together; the actor's other ranks are further copies. With
    rollout.vllm.in_process=false: processes of each vLLM engine"""
    parts: int = Field(1, ge=1, description="Parts that are rewarded while the rest still decodes")
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of the weights in processes that only decode; empty: the policy's"""
    max_num_seqs: int = Field(512, ge=1, description="Completions decoded at once")
    kv_cache_memory_mb: int | None = Field(None, ge=16)
    """KV cache of a copy of the policy; null: native's grows with its sequences, vLLM's has 256 on
    a CPU, and on a GPU what rollout.vllm.gpu_memory_utilization leaves"""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """async, native and vllm: keys and values of unfinished completions after new weights arrive.
    recompute: each log-prob is that of one version; keep: they stay, which is free (PipelineRL)"""
    enable_rollout_routing_replay: bool = False
    """MoE models: record experts for actor.router_replay.mode=R3"""
    cuda_graphs: bool = False
    """native on a GPU: replay decode steps of the Llama family as CUDA graphs"""
    lora: Literal["", "merged", "adapter"] = ""
    """LoRA in rollout. merged: a dense copy of the adapted matrices; adapter: no copy, on a base
    that native and vllm in process share with the trainer. Empty: adapter on a GPU, for native only
    if the merged copy doesn't fit; merged on a CPU"""
    val_kwargs: ValidationSamplingConfig = ValidationSamplingConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()
    server: ServerConfig = ServerConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def stream_options(self) -> dict[str, str]:
        """Options of a stream that only some engines have, where they aren't the default."""
        return {} if self.kv_on_update == "recompute" else {"kv_on_update": self.kv_on_update}


class TrainerConfig(LoopConfig):
    """The RL loop."""

    total_training_steps: int = Field(80, ge=1, description="Steps of RL")
    train_batch_size: int = Field(128, ge=1, description="Prompts per step")
    test_freq: int = Field(20, ge=1, description="Steps between validations")
    critic_warmup: int = Field(0, ge=0)
    """The first step that updates the policy; those before it update the critic alone"""
    mode: str = "sync"
    """Rollout source: sync, one_step_off, async, or your own: who waits for whom"""
    delta_sync: bool = Field(False, description="Send rollout processes only changed weights")
    weight_transfer: Literal["auto", "nccl", "gloo", "store"] = "auto"
    """async: how samplers get weights. nccl (not run yet), gloo: a broadcast while vLLM decodes;
    store: Ray's object store; auto: nccl if policy and samplers have whole GPUs, else store"""
    staleness: int = Field(1, ge=0, description="async: versions that a completion may be behind")
    rollout_workers: int = Field(1, ge=1)
    """one_step_off, async: processes that only decode and validate, each with a whole policy; the
    pool [sampler] of trainer.pools sets the resources of each"""
    rollout_threads: int = Field(0, ge=0)
    """Threads of one process that only decodes; 0: half of the cores"""
    rollout_silence_s: float = Field(60.0, gt=0)
    """async: a rollout worker without a heartbeat is replaced"""
    max_rollout_restarts: int = Field(3, ge=0, description="async: restarts of a rollout worker")
    save_freq: int = Field(20, ge=1, description="Steps between checkpoints, to resume from")
    resume_from: str = ""
    """Checkpoint, or folder of a run, to continue from if this run has no checkpoint yet"""
    final_model: Literal["best", "last"] = "best"
    """Which policy is handed over: of the step with the highest validation reward (the later one of
    equals; without validation the last), or of the last step"""
    save_huggingface: bool = False
    """Also write a Hugging Face folder of each checkpoint, in the background"""
    timeline_steps: int = Field(0, ge=0, description="Steps whose timeline is written (Perfetto)")
    log_rollouts_freq: int = Field(10, ge=0)
    """Steps between samples of rollouts, see docs/watching.md; 0: none"""
    log_rollouts_rows: int = Field(32, ge=1, le=1024)
    """Completions of a sample: whole groups, as far as they fit"""
    placement: Literal["", "ray", "local", "auto"] = ""
    """ray: Ray actors; local: this process; auto: Ray, laid out for the machines it has; empty:
    local where one process is enough and there is no Ray to join, else ray (docs/placement.md)"""
    gpu_kinds: dict[str, GpuKindConfig] = Field({})
    """GPUs, by Ray's name, that the planner's table lacks or describes differently"""


class RLConfig(Section):
    """Reinforcement learning from the warm start."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    debug: DebugConfig = DebugConfig()
    plugins: tuple[str, ...] = ()
    """Your modules, imported in every process before a name is looked up"""
    named_content: str = ""
    """Digest of your modules and the teacher, for the cache; workflows fill it"""

    def contradictions(self) -> Iterator[str]:
        rows = self.trainer.train_batch_size * self.rollout.n
        for role, section in (("actor", self.actor), ("critic", self.critic)):
            if (size := section.ppo_mini_batch_size) > rows:
                yield (
                    f"{role}.ppo_mini_batch_size={size} is more than the {rows} completions of a "
                    "step (trainer.train_batch_size × rollout.n); lower it, or set 0 for all"
                )
