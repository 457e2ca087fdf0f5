"""Optimizer, sharding over ranks, and training on rows of a dataset."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from engine.config.algorithm import PreferenceConfig
from engine.config.base import Section


class ParallelConfig(Section):
    """A layout of ranks, and what each of them stores. The default is one rank.

    The world size is dp · fsdp · sp · tp · pp. `dp` and `fsdp` together are HYBRID_SHARD: shards
    inside a group of `fsdp` ranks, copies over `dp` groups.
    """

    dp: int = Field(1, ge=1, description="Copies of the model, each on its own rows")
    fsdp: int = Field(1, ge=1)
    """Ranks that weights, gradients and moments are sharded over (FSDP2)"""
    sp: int = Field(1, ge=1, description="Ranks that each sequence is split over (Ulysses)")
    tp: int = Field(1, ge=1, description="Ranks that each matrix is split over")
    pp: int = Field(1, ge=1, description="Stages of layers, run in a pipeline (1F1B)")
    sequence_parallel: bool = Field(True, description="With tp: norms on a part of the tokens")
    compute_dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of forward and backward; empty: the weights'. Masters stay float32"""
    packing: bool | Literal["auto"] = "auto"
    """Rows as one sequence without padding, a shared prompt computed once; auto: where that saves a
    twentieth of the positions"""
    offload_params: bool = False
    """With fsdp: keep the weights in CPU memory while they aren't used, such as during rollout"""
    offload_policy: bool = False
    """With fsdp: weights, gradients and moments stay in CPU memory, where Adam runs; a layer is
    copied to the device for each use (FSDP2's CPUOffloadPolicy)"""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in CPU memory between updates"""
    activation_checkpointing: bool | Literal["selective"] | None = None
    """true: keep layers' inputs only and recompute the rest in backward; selective: also keep the
    outputs of attention and every second matrix product; null: RL on a GPU chooses by the GPU's
    memory, all else keeps everything"""
    activation_offload: bool = False
    """Checkpoint activations, and keep the layers' inputs in pinned CPU memory until backward: for
    rows of very many tokens on a GPU"""


class PoolConfig(Section):
    """Roles that share one process, and what that process takes."""

    roles: tuple[str, ...] = Field(min_length=1, description="e.g. [actor, rollout]")
    cpus: float = Field(1.0, ge=0, description="Cores of each process")
    gpus: float = Field(0.0, ge=0, description="GPUs of each process")
    resources: dict[str, float] = Field({}, description="Other Ray resources")
    labels: dict[str, str] = Field({}, description="Labels of the node, as Ray's selectors")


class OptimConfig(Section):
    """The optimizer, with a warm-up and a schedule."""

    optimizer: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """Update rule, by torch's name; SGD has the momentum below"""
    lr: float = Field(1e-3, gt=0, description="Peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="Of matrices: AdamW's decoupled, else L2")
    momentum: float = Field(0.0, ge=0, lt=1, description="For SGD only")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the gradient's mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the gradient's square")
    warmup_ratio: float = Field(0.05, ge=0, lt=1, description="Share of the steps spent warming up")
    warmup_steps: int | None = Field(None, ge=0)
    """Steps of the run spent warming up; none: by warmup_ratio"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up; wsd: stable, then a cosine's decay"""
    num_cycles: float = Field(0.5, gt=0, description="Waves of a cosine; 0.5 goes down once")
    stable_ratio: float = Field(0.9, ge=0, le=1)
    """wsd: share of the steps after the warm-up at full lr"""
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="lr at the schedule's end, over lr")
    grad_clip: float = Field(1.0, gt=0, description="Largest global gradient norm")

    def contradictions(self) -> Iterator[str]:
        optimizer, schedule, way_out = self.optimizer, self.schedule, "leave one of them out"
        if self.momentum and optimizer != "SGD":
            yield f"optim.momentum={self.momentum} is SGD's, and {optimizer=!s}; {way_out}"
        if self.num_cycles != 0.5 and schedule not in ("cosine", "wsd"):
            yield f"optim.num_cycles={self.num_cycles} is a cosine's, and {schedule=!s}; {way_out}"
        if self.stable_ratio != 0.9 and schedule != "wsd":
            yield f"optim.stable_ratio={self.stable_ratio} is wsd's, and {schedule=!s}; {way_out}"


class LoopConfig(Section):
    """Checkpoints, failures and processes of a training loop."""

    max_checkpoints_to_keep: int = Field(2, ge=1, description="Newest to keep; in RL also the best")
    on_damaged_checkpoints: Literal["stop", "restart"] = "stop"
    """If every checkpoint is damaged: stop, or replace them from step 1"""
    max_attempts: int = Field(3, ge=1)
    """Attempts that may fail in a row without reaching a new checkpoint"""
    preemption_grace_s: float = Field(20.0, gt=0)
    """Deadline after SIGTERM to finish the step and save it"""
    pools: tuple[PoolConfig, ...] = ()
    """Which roles share a process, and what it takes: each with roles, cpus, gpus, resources and
    labels; none: a process for the policy's roles and one for each other role, without GPUs"""
    threads: int = Field(0, ge=0, description="CPU threads of a process; 0: all cores")
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the ranks to start")
    step_timeout_s: float = Field(1800.0, gt=0, description="Deadline for one call to a rank")


class OfflineConfig(LoopConfig):
    """Training on rows of a dataset, in this process or on ranks of a layout."""

    section: ClassVar[str] = "offline"  # its name in messages, metrics and checkpoints

    epochs: float = Field(1.0, gt=0, description="Passes over the training rows")
    max_steps: int = Field(0, ge=0, description="Stop after this many steps; 0: by epochs")
    train_batch_size: int = Field(32, ge=1, description="Rows per optimizer step")
    max_tokens_per_micro_batch: int = Field(8192, ge=64)
    """Tokens of one forward and backward pass"""
    validate_every: int = Field(200, ge=1, description="Steps between validation losses")
    optim: OptimConfig = OptimConfig()
    packing: bool | Literal["auto"] = "auto"
    """Rows as one sequence without padding, a shared prompt computed once; auto: where that saves a
    twentieth of the positions"""
    save_freq: int = Field(50, ge=1, description="Steps between checkpoints, to resume from")
    parallel: ParallelConfig = ParallelConfig()
    placement: Literal["ray", "local"] | None = None
    """Ray actors, or this process; None: Ray for a layout of several ranks"""

    def contradictions(self) -> Iterator[str]:
        if self.parallel.packing != "auto":
            yield f"{self.section}.parallel.packing is {self.section}.packing here; set that"


class SFTConfig(OfflineConfig):
    """The warm start: supervised fine-tuning on prompt/response rows."""

    section: ClassVar[str] = "sft"

    skip: bool = False
    """No warm start: RL begins with model.path as it is, e.g. an instruct one"""
    train_on: Literal["all", "last"] = "all"
    """Turns of the assistant to learn in conversations (`messages`): all except those of weight 0,
    or the last; with a prompt and a response it is always the response"""
    epochs: float = Field(5.0, gt=0, description="Passes over the training rows")
    optim: OptimConfig = OptimConfig(lr=2e-3, schedule="cosine")


class PreferenceTrainingConfig(PreferenceConfig, OfflineConfig):
    """Preference learning on pairs (DPO and its relatives), or on single rows with labels (KTO)."""

    section: ClassVar[str] = "preference"

    loss: str = "sigmoid"
    """pairs: sigmoid (DPO), ipo, hinge, robust, simpo, orpo, package.module:name; labels: kto"""
    optim: OptimConfig = OptimConfig(lr=5e-5, schedule="linear", warmup_ratio=0.1)
    reference: Literal["precomputed", "live"] = "precomputed"
    """The reference's log-probs: once before the first step, or in each step by a frozen copy of
    the start model. With adapters the reference is the model without them"""
    reference_cache: str = ""
    """Folder or s3://… that keeps precomputed ones, by model and data; empty: the checkpoints'"""
    desirable_weight: float = Field(1.0, ge=0, description="KTO: weight of rows with a good label")
    undesirable_weight: float = Field(1.0, ge=0, description="KTO: weight of rows with a bad label")


class RewardModelTrainingConfig(OfflineConfig):
    """A reward model's training: on pairs by Bradley-Terry's loss, or on steps that are right or
    wrong."""

    section: ClassVar[str] = "reward_model"

    head: Literal["sequence", "token", "likelihood"] = "sequence"
    """sequence: a score of a conversation, from pairs; token: of each step of a response (process
    rewards), from rows with steps and labels; likelihood: no head, a response's log-prob is its
    score, from pairs"""
    step_separator: str = Field("\n", min_length=1)
    """head=token: what stands between two steps of a response"""

    optim: OptimConfig = OptimConfig(lr=3e-4, schedule="linear", warmup_ratio=0.1)
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of (chosen + rejected)², which keeps scores around 0"""
    sft_weight: float = Field(1.0, ge=0)
    """head=likelihood: weight of the language model's loss of the chosen response"""

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head != "sequence" and self.center_rewards_coefficient:
            yield (
                f"center_rewards_coefficient={self.center_rewards_coefficient} is of a score's "
                f"loss; leave it out with head={self.head}"
            )
        if self.head != "likelihood" and self.sft_weight != 1.0:
            yield f"sft_weight={self.sft_weight} needs head=likelihood"
        if self.head != "token" and self.step_separator != "\n":
            yield f"step_separator={self.step_separator!r} needs head=token"
