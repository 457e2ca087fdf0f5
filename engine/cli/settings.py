"""The configuration of a run from files on this machine: `RLConfig`, and what surrounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config import Loggers, LoRAConfig, Options, RLConfig, RowsConfig, Section
from engine.data.truncation import Truncation
from engine.storage.locations import home


class DataFilesConfig(RowsConfig):
    """The prompts: rows of files."""

    train_files: tuple[str, ...] = Field(
        (), description="Files to learn from: JSONL, JSON, CSV, Parquet; paths, s3://… or hf://ID"
    )
    val_files: tuple[str, ...] = Field((), description="Files to validate on; none: no validation")
    filter_overlong_prompts: bool = Field(
        False, description="Leave longer prompts out; otherwise truncation says what they are"
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error",
        description="Prompts over max_prompt_length: an error, or cut to it: left keeps the last "
        "tokens, right the first, middle both ends",
    )
    shuffle: bool = Field(True, description="A new order of the rows in each epoch")
    train_max_samples: int = Field(
        -1,
        ge=-1,
        description="Rows of train_files to learn from: the first ones, or with shuffle ones drawn "
        "by seed; -1: all",
    )
    val_max_samples: int = Field(-1, ge=-1, description="The same of val_files; -1: all")

    @property
    def cut(self) -> Truncation | None:
        """How long prompts are cut, if they are; those that are left out are not."""
        if self.truncation == "error" or self.filter_overlong_prompts:
            return None
        return Truncation(self.max_prompt_length, self.truncation)

    @model_validator(mode="after")
    def _cut_to_a_length(self) -> Self:
        if self.truncation != "error" and not self.max_prompt_length:
            raise ValueError(
                f"data.truncation={self.truncation} has no effect without data.max_prompt_length; "
                "set it, or leave truncation out"
            )
        return self


class PolicyModelConfig(Section):
    """The policy to improve."""

    path: str = Field("", description="Hugging Face causal LM folder, or hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of the weights in training and rollout; auto: bfloat16 where the hardware "
        "computes in it. bfloat16 and float16 have float32 masters in the optimizer",
    )
    lora: LoRAConfig = LoRAConfig()
    override_config: Options = Field(
        {},
        description="Other values of keys of the model's config.json, e.g. {rope_theta: "
        "1000000.0}; none that changes the weights' shapes",
    )
    trust_remote_code: bool = Field(
        False,
        description="Python code in the model's folder is never run; true is refused for a model "
        "that brings some, and changes nothing for others",
    )


class RunOutputConfig(Section):
    """What a run records, and where it leaves it."""

    resume_mode: Literal["auto", "disable"] = Field(
        "auto", description="Go on from the newest checkpoint in default_local_dir, if there is one"
    )
    default_local_dir: str = Field(
        "",
        description="Folder for models and metrics; empty: "
        "$HYBRIDFLYTE_HOME/checkpoints/<project>/<experiment>",
    )
    project_name: str = Field(
        "hybridflyte", min_length=1, description="MLflow experiment, project of Weights & Biases"
    )
    experiment_name: str = Field("ppo", min_length=1, description="Name of the run there")
    logger: Loggers = Field(
        ("console",),
        description="Where metrics go; file (or jsonl): metrics.jsonl beside the models",
    )

    def folder(self) -> Path:
        """Where the run writes: `default_local_dir`, or a folder below the home of all outputs."""
        if self.default_local_dir:
            return Path(self.default_local_dir)
        return home() / "checkpoints" / self.project_name / self.experiment_name


class OutputConfig(RunOutputConfig):
    """How long the run goes, where it computes, what it records, and what it leaves."""

    n_gpus_per_node: int | None = Field(
        None,
        ge=1,
        description="With nnodes the ranks of the policy: weights are sharded over them (fsdp), or "
        "as rl.actor.parallel says; each has a GPU where Ray has any; none: as rl.actor.parallel",
    )
    nnodes: int = Field(1, ge=1, description="Machines of n_gpus_per_node ranks each")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: GPUs where there are any; cuda: refused without; cpu: none"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(  # type: ignore[assignment]
        "auto",
        description="auto: go on from the newest checkpoint in default_local_dir, if there is one; "
        "resume_path: from rl.trainer.resume_from, whatever else is there",
    )
    rollout_data_dir: str = Field(
        "", description="Folder of the samples of rollouts; empty: default_local_dir/rollouts"
    )
    total_epochs: int | None = Field(
        None, ge=1, description="Times through the data; instead of total_training_steps"
    )
    val_only: bool = Field(
        False, description="Validate the newest checkpoint, or model.path, and train nothing"
    )
    log_val_generations: int = Field(
        0, ge=0, description="Completions of each validation that are printed"
    )
    val_before_train: bool = Field(True, description="Validate before the first step, too")
    save_freq: int = Field(-1, ge=-1, description="Steps between saves; -1: after the last only")

    @model_validator(mode="after")
    def _machines_have_ranks(self) -> Self:
        if self.nnodes > 1 and self.n_gpus_per_node is None:
            raise ValueError(
                f"run.nnodes={self.nnodes} without run.n_gpus_per_node says no number of ranks; "
                "set both"
            )
        return self


class RunConfig(Section):
    """All of it."""

    seed: int = Field(0, ge=0, description="Order of the data, and sampling")
    data: DataFilesConfig = DataFilesConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    rl: RLConfig = RLConfig()
    run: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _episodes_come_whole(self) -> Self:
        if self.data.cut is not None and self.rl.rollout.multi_turn.enable:
            raise ValueError(
                f"data.truncation={self.data.truncation} cuts tokens, and episodes "
                "(rl.rollout.multi_turn.enable) begin with whole messages; set "
                "data.filter_overlong_prompts=true instead"
            )
        return self
