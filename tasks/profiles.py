"""Resource profiles: the machines that a run asks for, as values.

The input `profile` of a workflow is the name of one in `profiles.yaml`, or sizes of your own as a
YAML mapping. `plan` reads it once (`read_profile`); from there on it is a `Profile`, which
`tasks.variants` turns into the resources of each stage, `tasks.placement` into the engine's
settings, and `tasks.ray_cluster` into a Ray cluster. What it means for Kubernetes is `tasks.pods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from engine.config import ParallelConfig, Section, explain
from engine.config.base import filled_up
from engine.errors import ConfigError

ONE_RANK = ParallelConfig()
ROOMY_GPU_GIB = 128.0  # of a GPU on which layers' activations can stay

# Both NCCL and RCCL read NCCL_*.
_COLLECTIVES = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


class Replicas(Section):
    """Ray workers, between whose fewest and most Ray's autoscaler chooses."""

    fewest: int = Field(1, ge=1)
    start: int = Field(1, ge=1)
    most: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.fewest <= self.start <= self.most:
            raise ValueError(
                f"replicas fewest={self.fewest}, start={self.start}, most={self.most} are not in "
                "ascending order; give fewest <= start <= most"
            )
        return self


class Profile(Section):
    """The Ray workers of a run; a stage without a Ray cluster gets a machine like one of them."""

    name: str = Field("custom", description="In messages")
    cpus: int = Field(ge=1, description="Cores of a worker")
    memory_gib: int = Field(ge=1, description="Of a worker")
    shared_memory_gib: int = Field(
        2, ge=1, description="/dev/shm of a worker; counts as its memory"
    )
    replicas: Replicas = Replicas()
    gpus: int = Field(0, ge=0, description="Of a worker")
    accelerator: str = Field(
        "", description="Their kind, by Ray's name (engine/planner/hardware.py); empty: not known"
    )
    gpu_resource: str = Field(
        "", description="Kubernetes' name for one; empty: nvidia.com/gpu or amd.com/gpu, by kind"
    )
    node_labels: dict[str, str] = Field({}, description="What a node must be labelled with")
    image: Literal["", "default", "cuda", "rocm"] = Field(
        "", description="Kind of image (tasks/images.py); empty: by the GPU's vendor"
    )
    environment: dict[str, str] = Field({}, description="Variables of all processes")
    parallel: ParallelConfig | None = Field(
        None,
        description="The actor's layout, unless the settings have one; None: fsdp over a worker's "
        "GPUs, dp over workers, bfloat16",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.shared_memory_gib >= self.memory_gib:
            raise ValueError(
                f"shared_memory_gib={self.shared_memory_gib} leaves nothing of "
                f"memory_gib={self.memory_gib}, which it is part of; lower it"
            )
        if self.accelerator and not self.gpus:
            raise ValueError(f"accelerator={self.accelerator!r} with gpus=0; set gpus")
        return self

    @property
    def vendor(self) -> Literal["", "nvidia", "amd"]:
        """Whose GPUs they are; empty without any."""
        if not self.gpus:
            return ""
        from engine.planner.hardware import gpu

        amd = self.gpu_resource.startswith("amd.com/") or (
            not self.gpu_resource and gpu(self.accelerator).vendor == "amd"
        )
        return "amd" if amd else "nvidia"

    @property
    def resource(self) -> str:
        """Kubernetes' name for one of the GPUs, e.g. `amd.com/gpu`; empty without any."""
        return self.gpu_resource or (f"{self.vendor}.com/gpu" if self.gpus else "")

    @property
    def image_kind(self) -> str:
        """Kind of image, see `tasks.images`."""
        return self.image or {"": "default", "nvidia": "cuda", "amd": "rocm"}[self.vendor]

    @property
    def variables(self) -> dict[str, str]:
        """Variables of all processes."""
        return (_COLLECTIVES if self.gpus else {}) | self.environment

    @property
    def layout(self) -> ParallelConfig:
        """The actor's, unless the settings have one.

        With several workers it is HYBRID_SHARD: shards over a node's links, copies over the
        network.
        """
        if self.parallel is not None or not self.gpus:
            return self.parallel or ONE_RANK
        from engine.planner.hardware import gpu

        return ParallelConfig(
            dp=self.replicas.start,
            fsdp=self.gpus,
            compute_dtype="bfloat16",
            activation_checkpointing=gpu(self.accelerator).memory_gib < ROOMY_GPU_GIB,
        )

    @property
    def most_gpus(self) -> int:
        """GPUs of as many workers as there can be."""
        return self.gpus * self.replicas.most

    @property
    def several_gpus(self) -> bool:
        """Whether a model can be on several GPUs."""
        return self.most_gpus > 1

    @property
    def world(self) -> int:
        """GPUs at the start, of all workers."""
        return self.gpus * self.replicas.start


def _shipped() -> dict[str, Profile]:
    values = yaml.safe_load(Path(__file__).with_name("profiles.yaml").read_text())
    return {name: Profile(name=name, **fields) for name, fields in values.items()}


PROFILES: Mapping[str, Profile] = _shipped()
LAPTOP = PROFILES["laptop"]


def read_profile(text: str) -> Profile:
    """The profile that the input names or describes.

    `text`: a name in `profiles.yaml`, or a mapping in YAML or JSON of `Profile`'s fields, which
    with `base: NAME` replace those of that one. Raises ConfigError for anything else.
    """
    if text in PROFILES:
        return PROFILES[text]
    names = ", ".join(PROFILES)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"profile is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"profile={text!r} is none of {names}; give one of them, or sizes of your own as YAML, "
            'such as {base: 8xA100, gpus: 4}, or a file\'s content: --profile "$(cat FILE)"'
        )
    base = values.pop("base", "")
    if base and base not in PROFILES:
        raise ConfigError(f"profile base={base!r} is none of {names}")
    if base:
        values = filled_up(PROFILES[base], {"name": "custom"} | values)
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"profile: {explain(error)}") from None
