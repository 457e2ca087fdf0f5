"""The configuration of a run from files on this machine: `RLConfig`, and what surrounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from engine.config import Loggers, LoRAConfig, RLConfig, RowsConfig, Section
from engine.storage.locations import home


class DataFilesConfig(RowsConfig):
    """The prompts: rows of files."""

    train_files: tuple[str, ...] = Field(
        (), description="Files to learn from: JSONL, JSON, CSV, Parquet; paths, s3://… or hf://ID"
    )
    val_files: tuple[str, ...] = Field((), description="Files to validate on; none: no validation")
    filter_overlong_prompts: bool = Field(
        False, description="Leave longer prompts out; otherwise they are an error"
    )
    shuffle: bool = Field(True, description="A new order of the rows in each epoch")


class PolicyModelConfig(Section):
    """The policy to improve."""

    path: str = Field("", description="Hugging Face causal LM folder, or hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of the weights in training and rollout; auto: bfloat16 where the hardware "
        "computes in it. bfloat16 and float16 have float32 masters in the optimizer",
    )
    lora: LoRAConfig = LoRAConfig()


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
    """How long the run goes, what it records, and what it leaves."""

    total_epochs: int | None = Field(
        None, ge=1, description="Times through the data; instead of total_training_steps"
    )
    val_before_train: bool = Field(True, description="Validate before the first step, too")
    save_freq: int = Field(-1, ge=-1, description="Steps between saves; -1: after the last only")


class RunConfig(Section):
    """All of it."""

    seed: int = Field(0, ge=0, description="Order of the data, and sampling")
    data: DataFilesConfig = DataFilesConfig()
    model: PolicyModelConfig = PolicyModelConfig()
    rl: RLConfig = RLConfig()
    run: OutputConfig = OutputConfig()
