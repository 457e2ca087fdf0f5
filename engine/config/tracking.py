"""Where runs are recorded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engine.config.base import Section


def _names(value: object) -> object:
    """One name or several; `jsonl` is verl's for the file."""
    names = value if isinstance(value, list | tuple) else [value]
    return tuple("file" if name == "jsonl" else name for name in names)


Loggers = Annotated[
    tuple[Literal["console", "file", "mlflow", "tensorboard", "wandb"], ...],
    BeforeValidator(_names),
]


class TrackingConfig(Section):
    """Where runs are recorded."""

    experiment: str = Field(
        "hybridflyte", min_length=1, description="MLflow experiment, project of Weights & Biases"
    )
    logger: Loggers = Field(
        ("console",),
        description="Where the steps of the warm start and RL go besides MLflow, which has them "
        "all: console, file (or jsonl), tensorboard, wandb",
    )
