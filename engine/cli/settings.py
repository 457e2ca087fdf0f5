"""The configurations of runs from files on this machine, and the ranks that a run is split over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from engine.config.base import Options, Section
from engine.config.data import ColumnsConfig, RowsConfig, WeightsConfig
from engine.config.pipeline import Loggers
from engine.config.rl import RLConfig
from engine.config.training import (
    OfflineConfig,
    ParallelConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)
from engine.data.rows import Truncation
from engine.errors import ConfigError
from engine.parallel.layout import AXES, Layout
from engine.storage.filesystem import home


class DataFilesConfig(RowsConfig):
    """The prompts: rows of files."""

    train_files: tuple[str, ...] = ()
    """Files to learn from: JSONL, JSON, CSV, Parquet; paths, s3://… or hf://ID"""
    val_files: tuple[str, ...] = Field((), description="Files to validate on; none: no validation")
    filter_overlong_prompts: bool = False
    """Leave longer prompts out; otherwise truncation says what they are"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Prompts over max_prompt_length: an error, or cut to it: left keeps the last tokens, right the
    first, middle both ends"""
    shuffle: bool = Field(True, description="A new order of the rows in each epoch")
    train_max_samples: int = Field(-1, ge=-1)
    """Rows of train_files to learn from: the first, or with shuffle some drawn by seed; -1: all"""
    val_max_samples: int = Field(-1, ge=-1, description="The same of val_files; -1: all")

    @property
    def cut(self) -> Truncation | None:
        """How long prompts are cut, if they are; those that are left out are not."""
        if self.truncation == "error" or self.filter_overlong_prompts:
            return None
        return Truncation(self.max_prompt_length, self.truncation)

    def contradictions(self) -> Iterator[str]:
        if self.truncation != "error" and not self.max_prompt_length:
            yield f"data.truncation={self.truncation} has no effect without data.max_prompt_length"


class PolicyModelConfig(WeightsConfig):
    """The policy to improve."""

    path: str = Field("", description="Hugging Face causal LM folder, or hub id")
    override_config: Options = Field({})
    """Other values of keys of the model's config.json, e.g. {rope_theta: 1000000.0}; none that
    changes the weights' shapes"""
    trust_remote_code: bool = False
    """Python code in the model's folder is never run; true is refused for a model that brings some,
    and changes nothing for others"""


class RunOutputConfig(Section):
    """What a run records, and where it leaves it."""

    resume_mode: Literal["auto", "disable"] = "auto"
    """Go on from the newest checkpoint in default_local_dir, if there is one"""
    default_local_dir: str = ""
    """Folder for models and metrics; empty: $HYBRIDFLYTE_HOME/checkpoints/<project>/<experiment>"""
    project_name: str = Field("hybridflyte", min_length=1)
    """MLflow experiment, project of Weights & Biases"""
    experiment_name: str = Field("ppo", min_length=1, description="Name of the run there")
    logger: Loggers = ("console",)
    """Where metrics go; file (or jsonl): metrics.jsonl beside the models"""
    price_per_hour: float = Field(0.0, ge=0)
    """What all machines of the run cost in an hour, in any currency; --dry-run says what the run
    would cost"""

    def folder(self) -> Path:
        """Return where the run writes: `default_local_dir`, or a folder below the home."""
        if self.default_local_dir:
            return Path(self.default_local_dir)
        return home() / "checkpoints" / self.project_name / self.experiment_name


class OutputConfig(RunOutputConfig):
    """How long the run goes, where it computes, what it records, and what it leaves."""

    n_gpus_per_node: int | None = Field(None, ge=1)
    """With nnodes the ranks of the policy: weights are sharded over them (fsdp), or as
    rl.actor.parallel says; each has a GPU if Ray has any; none: as rl.actor.parallel. In
    one_step_off and async samplers get half of them, or what rollout_workers above 1 need"""
    nnodes: int = Field(1, ge=1, description="Machines of n_gpus_per_node ranks each")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPUs where there are any; cuda: refused without; cpu: none"""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"  # type: ignore[assignment]
    """auto: go on from the newest checkpoint in default_local_dir, if there is one; resume_path:
    from rl.trainer.resume_from, whatever else is there"""
    rollout_data_dir: str = ""
    """Folder of the samples of rollouts; empty: default_local_dir/rollouts"""
    total_epochs: int | None = Field(None, ge=1)
    """Times through the data; instead of total_training_steps"""
    val_only: bool = False
    """Validate the newest checkpoint or model.path; no training"""
    log_val_generations: int = Field(0, ge=0, description="Completions of a validation to print")
    val_before_train: bool = Field(True, description="Validate before the first step, too")
    save_freq: int = Field(-1, ge=-1)
    """Steps between model folders, step_N; -1: after the last only"""

    @property
    def ranks(self) -> int | None:
        """The ranks of policy and samplers; None where the layouts say them."""
        return None if self.n_gpus_per_node is None else self.n_gpus_per_node * self.nnodes

    def contradictions(self) -> Iterator[str]:
        if self.nnodes > 1 and self.n_gpus_per_node is None:
            yield f"run.nnodes={self.nnodes} needs run.n_gpus_per_node, too; set both"


class RunConfig(Section):
    """The run of `main_ppo`."""

    seed: int = Field(0, ge=0, description="Order of the data, and sampling")
    data: DataFilesConfig = DataFilesConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    rl: RLConfig = RLConfig()
    run: OutputConfig = OutputConfig()

    def contradictions(self) -> Iterator[str]:
        if self.data.cut is not None and self.rl.rollout.multi_turn.enable:
            yield (
                f"data.truncation={self.data.truncation} cuts tokens, and episodes "
                "(rl.rollout.multi_turn.enable) begin with whole messages; set "
                "data.filter_overlong_prompts=true instead"
            )


# Training on rows of files: supervised fine-tuning, preferences, reward models.


class PreferenceFilesConfig(ColumnsConfig):
    """The preferences: rows of files."""

    train_files: tuple[str, ...] = ()
    """Files to learn from: JSONL, JSON, CSV, Parquet; paths, s3://… or hf://ID"""
    val_files: tuple[str, ...] = Field((), description="Files of held-out rows")
    val_size: int = Field(0, ge=0)
    """Training rows to hold out without val_files, all those of a prompt together"""
    columns: dict[str, str] = Field({})
    """Our column (prompt, chosen, rejected, margin; completion, label; completions, labels): the
    files' column, e.g. {chosen: better}; info.answer is the field answer of the column info"""
    max_length: int = Field(0, ge=0)
    """Longest example in tokens; 0: the model's context"""
    too_long: Literal["fail", "drop"] = "fail"
    """Longer ones: refuse, or leave out"""

    def rows(self) -> RowsConfig:
        """Return how rows of files become prompts and responses."""
        return RowsConfig(**{name: getattr(self, name) for name in ColumnsConfig.model_fields})


class OfflineRunConfig(Section):
    """A run from files on this machine."""

    seed: int = Field(0, ge=0, description="Order of the rows, new adapters, dropout")
    data: PreferenceFilesConfig = PreferenceFilesConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    run: RunOutputConfig = RunOutputConfig()

    @property
    def training(self) -> OfflineConfig:
        """The section of the training itself."""
        return next(v for v in vars(self).values() if isinstance(v, OfflineConfig))


class PreferenceRunConfig(OfflineRunConfig):
    """The run of `main_preference`."""

    preference: PreferenceTrainingConfig = PreferenceTrainingConfig()
    run: RunOutputConfig = RunOutputConfig(experiment_name="preference")


class SFTRunConfig(OfflineRunConfig):
    """The run of `main_sft`."""

    sft: SFTConfig = SFTConfig()
    run: RunOutputConfig = RunOutputConfig(experiment_name="sft")


class RewardModelRunConfig(OfflineRunConfig):
    """The run of `main_reward_model`."""

    reward_model: RewardModelTrainingConfig = RewardModelTrainingConfig()
    run: RunOutputConfig = RunOutputConfig(experiment_name="reward_model")


_AHEAD = ("one_step_off", "async")  # whose samplers have GPUs of their own

# Over how many ranks a run is split: `trainer.n_gpus_per_node` and `nnodes`, as verl counts them.
# A layout by hand is `rl.actor.parallel`, one by estimate `rl.trainer.placement=auto`.


def fill_layouts(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the layouts that it leaves open, and notices about them.

    Sizes that are given stay; of the rest `fsdp` takes all, or `dp` where `fsdp` is given.
    """
    ranks, rl, notices = config.run.ranks, config.rl, list[str]()
    actor, critic, reference = rl.actor.parallel, rl.critic.parallel, rl.reference
    samplers: dict[str, object] = {}
    if ranks is not None:
        if ranks > 1 and rl.trainer.mode in _AHEAD and not rl.trainer.pools:
            count, samplers = _samplers(rl, ranks)
            ranks -= count * rl.rollout.tensor_parallel_size
            notices.append(
                f"trainer.mode={rl.trainer.mode}: the policy has {ranks} of {config.run.ranks} "
                f"ranks, {count} samplers the others"
            )
        actor = _filled("actor", actor, ranks)
    alone = actor.fsdp * actor.sp == 1
    for name in ("offload_params", "offload_policy"):
        if getattr(actor, name) and alone and ranks is not None:
            actor = actor.replaced({name: False})
            notices.append(f"actor.parallel.{name} has no effect on one rank: weights stay")
    if critic is not None:
        if not critic.model_fields_set.intersection(AXES):  # only other settings were given
            critic = critic.replaced({axis: getattr(actor, axis) for axis in AXES})
        elif ranks is not None:
            critic = _filled("critic", critic, ranks)
        if critic.fsdp * critic.sp == 1:
            critic = critic.replaced({"offload_params": False, "offload_policy": False})
    if reference.offload_params and alone:
        reference = reference.replaced({"offload_params": False})
        notices.append("reference.offload_params has no effect on one rank: its weights stay")
    layouts = {"rl.actor.parallel": actor, "rl.critic.parallel": critic, "rl.reference": reference}
    return config.replaced(layouts | samplers), notices


def _samplers(rl: RLConfig, ranks: int) -> tuple[int, dict[str, object]]:
    """Return how many samplers decode on their part of `ranks`, and the settings that say so."""
    tp, trainer = rl.rollout.tensor_parallel_size, rl.trainer
    if rl.rollout.engine == "server":
        return 0, {}
    count = trainer.rollout_workers
    if count == 1:  # the default
        count = max(1, ranks // 2 // tp)
    if count * tp >= ranks:
        raise ConfigError(
            f"trainer.rollout_workers={count} with rollout.tensor_parallel_size={tp} and "
            f"trainer.mode={trainer.mode} leave the trainer none of the {ranks} GPUs of "
            "run.n_gpus_per_node × run.nnodes; lower one of them"
        )
    settings: dict[str, object] = {"rl.trainer.rollout_workers": count}
    if tp > 1 and rl.rollout.engine == "vllm":
        settings["rl.rollout.vllm.in_process"] = False
    return count, settings


def _filled(role: str, parallel: ParallelConfig, ranks: int) -> ParallelConfig:
    layout = Layout.of(parallel)
    if layout.world_size == ranks:
        return parallel
    rest, left_over = divmod(ranks, layout.world_size)
    free = "fsdp" if layout.fsdp == 1 else "dp"
    if left_over or layout.dp > 1:
        sizes = ", ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
        raise ConfigError(
            f"{role}.parallel ({sizes}) does not make the {ranks} ranks of run.n_gpus_per_node × "
            "run.nnodes; change one of them"
        )
    return parallel.replaced({free: rest})
