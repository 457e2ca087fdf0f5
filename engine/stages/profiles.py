"""Resource profiles: the machines of a run as values, and whether settings and models fit them.

A plan reads the input `profile` once (`read_profile`) and fills in the settings (`apply_profile`);
`tasks.variants` makes the resources and the Ray cluster of each stage of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml
from pydantic import Field

from engine.config import (
    OfflineConfig,
    ParallelConfig,
    PipelineConfig,
    PoolConfig,
    RLConfig,
    Section,
    validated,
)
from engine.config.base import filled_up
from engine.console import human_time, say
from engine.errors import ConfigError
from engine.storage.filesystem import home

if TYPE_CHECKING:
    from engine.planner import Cluster
    from engine.planner.resources import Device


ONE_RANK = ParallelConfig()
ROOMY_GPU_GIB = 128.0  # of a GPU on which layers' activations can stay
# Both NCCL and RCCL read NCCL_*.
_COLLECTIVES = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


class Replicas(Section):
    """Ray workers, between whose fewest and most Ray's autoscaler chooses."""

    fewest: int = Field(1, ge=1)
    start: int = Field(1, ge=1)
    most: int = Field(1, ge=1)

    def contradictions(self) -> Iterator[str]:
        if not self.fewest <= self.start <= self.most:
            yield (
                f"replicas fewest={self.fewest}, start={self.start}, most={self.most} are not in "
                "ascending order; give fewest <= start <= most"
            )


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
        "", description="Their kind, by Ray's name (engine/planner/resources.py); empty: not known"
    )
    gpu_resource: str = Field(
        "", description="Kubernetes' name for one; empty: nvidia.com/gpu or amd.com/gpu, by kind"
    )
    node_labels: dict[str, str] = Field({}, description="What a node must be labelled with")
    image: Literal["", "default", "cuda", "rocm"] = Field(
        "", description="Kind of image (tasks/flytekit_setup.py); empty: by the GPU's vendor"
    )
    environment: dict[str, str] = Field({}, description="Variables of all processes")
    parallel: ParallelConfig | None = Field(
        None,
        description="The actor's layout, unless the settings have one; None: fsdp over a worker's "
        "GPUs, dp over workers, bfloat16",
    )

    def contradictions(self) -> Iterator[str]:
        if self.shared_memory_gib >= self.memory_gib:
            yield (
                f"shared_memory_gib={self.shared_memory_gib} leaves nothing of "
                f"memory_gib={self.memory_gib}, which it is part of; lower it"
            )
        if self.accelerator and not self.gpus:
            yield f"accelerator={self.accelerator!r} with gpus=0; set gpus"

    @property
    def vendor(self) -> Literal["", "nvidia", "amd"]:
        if not self.gpus:
            return ""
        from engine.planner.resources import gpu

        amd = self.gpu_resource.startswith("amd.com/") or (
            not self.gpu_resource and gpu(self.accelerator).vendor == "amd"
        )
        return "amd" if amd else "nvidia"

    @property
    def resource(self) -> str:
        """Kubernetes' name of a GPU, e.g. `amd.com/gpu`; empty without any."""
        return self.gpu_resource or (f"{self.vendor}.com/gpu" if self.gpus else "")

    @property
    def image_kind(self) -> str:
        return self.image or {"": "default", "nvidia": "cuda", "amd": "rocm"}[self.vendor]

    @property
    def variables(self) -> dict[str, str]:
        return (_COLLECTIVES if self.gpus else {}) | self.environment

    @property
    def layout(self) -> ParallelConfig:
        """The actor's layout: shards over a node's links, copies over the network between them."""
        if self.parallel is not None or not self.gpus:
            return self.parallel or ONE_RANK
        from engine.planner.resources import gpu

        return ParallelConfig(
            dp=self.replicas.start,
            fsdp=self.gpus,
            compute_dtype="bfloat16",
            activation_checkpointing=gpu(self.accelerator).memory_gib < ROOMY_GPU_GIB,
        )

    @property
    def max_gpus(self) -> int:
        """The GPUs of as many workers as there can be."""
        return self.gpus * self.replicas.most

    @property
    def world(self) -> int:
        """The GPUs of all workers at the start."""
        return self.gpus * self.replicas.start


_SHIPPED = yaml.safe_load(Path(__file__).with_name("profiles.yaml").read_text())
PROFILES = {name: Profile(name=name, **fields) for name, fields in _SHIPPED.items()}
LAPTOP = PROFILES["laptop"]
THIS_MACHINE = "this-machine"
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # an entry a GPU, read without importing torch


def read_profile(text: str) -> Profile:
    """Return the profile that `text` names or describes; ConfigError for anything else.

    That is a name in `profiles.yaml`, `this-machine`, or a mapping in YAML or JSON of `Profile`'s
    fields, which with `base: NAME` replace those of that one.
    """
    if text == THIS_MACHINE:
        return _this_machine()
    if text in PROFILES:
        return PROFILES[text]
    names = ", ".join(PROFILES)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"profile is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"profile={text!r} is none of {names}, {THIS_MACHINE}; give one of them, or sizes of "
            "your own as YAML, such as {base: 8xA100, gpus: 4}, or a file's content: "
            '--profile "$(cat FILE)"'
        )
    if base := values.pop("base", ""):
        if base not in PROFILES:
            raise ConfigError(f"profile base={base!r} is none of {names}")
        values = filled_up(PROFILES[base], {"name": "custom"} | values)
    return validated(Profile, values, "profile: ")


def _this_machine() -> Profile:
    """Return one worker with all cores, memory and GPUs of this machine; ConfigError in a pod.

    Without a second GPU the worker has none: the process that starts the run uses a single one.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        raise ConfigError(
            f"profile={THIS_MACHINE} is for runs on one machine, and this is a pod; name the "
            f"cluster's machines: {', '.join(PROFILES)}, or sizes of your own"
        )
    import torch

    from engine.planner.resources import GIB
    from engine.trainers.auto_placement import local_gpu

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    several = (gpus := torch.cuda.device_count()) > 1
    return LAPTOP.replaced(
        {
            "name": THIS_MACHINE,
            "cpus": os.cpu_count() or 1,
            "memory_gib": max(LAPTOP.memory_gib, memory // GIB),
            "replicas": Replicas(),
            "gpus": gpus if several else 0,
            "accelerator": local_gpu().removesuffix("GPU") if several else "",  # empty: not known
        }
    )


def suggest_gpus(profile: Profile) -> None:
    """Say that GPUs of this machine are left unused, and how to use them."""
    on_gpus = profile.gpus > 0 or "KUBERNETES_SERVICE_HOST" in os.environ
    if on_gpus or len(list(DRIVER_GPUS.glob("*"))) < 2:
        return
    import torch

    if (gpus := torch.cuda.device_count()) > 1:
        say(
            f"plan: this machine has {gpus} GPUs, and profile={profile.name} uses one at most; "
            f"--profile {THIS_MACHINE} uses all"
        )


def check_memory(config: PipelineConfig, profile: Profile, *, trains: bool = True) -> None:
    """Raise PlacementError for an evaluation that can't fit, or what it `trains` before.

    A model from scratch, and a profile that names no known kind of GPU, are let through.
    """
    path = config.model.path
    if not (profile.accelerator and path):
        return
    from engine.evaluation.decode import check_evaluation_memory
    from engine.models import text_config
    from engine.trainers import auto_placement

    machines, shape = cluster(profile, auto_placement.gpu_kinds(config.rl)), text_config(path)
    each = machines.machines[0].gpu_memory
    if not each:
        return

    sft, rl = config.sft, config.rl
    if trains and not sft.skip:
        sizes = _sizes(config, sft.parallel, has_gpus=True)
        auto_placement.check_sft_memory(sft, machines, **sizes)
    if trains:
        sizes = _sizes(config, rl.actor.parallel, has_gpus=True)
        auto_placement.check_rl_memory(rl, machines, **sizes)
    check_evaluation_memory(config.evaluate, shape, each, profile.gpus)


def _sizes(config: PipelineConfig, parallel: ParallelConfig, *, has_gpus: bool) -> dict[str, Any]:
    """Return what `auto_placement` prices a stage by, beside its settings."""
    from engine.models import resolve_dtype, resolve_lora, text_config

    model, data = config.model, config.data
    width, compute_dtype = text_config(model.path).hidden_size, parallel.compute_dtype
    prompt = data.max_prompt_length or data.max_response_length
    return {
        "model_path": model.path,
        "lora": resolve_lora(model.path, model.lora),
        "max_response_length": data.max_response_length,
        "max_model_len": prompt + data.max_response_length,
        "dtype": resolve_dtype(model.dtype, width, gpu=has_gpus, compute_dtype=compute_dtype),
    }


def rl_estimate(config: PipelineConfig, profile: Profile) -> Iterator[str]:
    """Yield lines about the memory, time and cost of RL on these machines."""
    from engine import planner
    from engine.models.loading import new_model_config
    from engine.parallel.layout import Layout
    from engine.trainers import auto_placement

    rl, steps, price = config.rl, config.rl.trainer.total_training_steps, config.tracking
    ranks = Layout.of(rl.actor.parallel).world_size
    with tempfile.TemporaryDirectory() as folder:
        if not config.model.path:  # the data may need fewer tokens
            new_model_config(config.model, config.data.vocab_size).save_pretrained(folder)
            config = config.replaced({"model.path": folder})
        sizes = _sizes(config, rl.actor.parallel, has_gpus=profile.gpus > 0)
        try:
            work = auto_placement.workload(rl, **sizes)
        except ConfigError as error:
            yield f"estimate  none: {error}"
            return
    candidate, fixed = auto_placement.rl_candidate(rl), auto_placement.fixed_settings(rl)
    if rl.trainer.placement == "auto" and profile.accelerator:
        there = cluster(profile, auto_placement.gpu_kinds(rl))
        plan = auto_placement.plan_for(rl, work, there, sizes["lora"])
        yield from planner.explain(plan).splitlines()
        chosen = plan.chosen
        work, candidate, ranks = chosen.work, chosen.candidate, chosen.allocation.ranks
    machines = ranks, min(ranks, profile.gpus or ranks), profile.accelerator
    seconds, lines = auto_placement.step_estimate(work, candidate, *machines, fixed)
    hours = steps * seconds / 3600
    yield f"estimate  of RL on {ranks} × {profile.accelerator or 'CPU'}, every row at its longest"
    yield from lines
    yield f"total     {human_time(hours * 3600)} for {steps} steps, roughly"
    cost = f"{hours * price.price_per_hour:.2f}, at {price.price_per_hour:g} an hour"
    yield f"cost      {cost if price.price_per_hour else 'not known; set tracking.price_per_hour'}"


def cluster(profile: Profile, kinds: Mapping[str, Device] | None = None) -> Cluster:
    """Return the machines at the start; `kinds`: GPUs that the table of hardware lacks."""
    from engine.planner import Cluster, Machine
    from engine.planner.resources import GIB, gpu

    each = int(gpu(profile.accelerator, kinds).memory_gib * GIB)
    size = (float(profile.cpus), profile.memory_gib * GIB, profile.gpus, each, profile.accelerator)
    numbers = range(profile.replicas.start)
    return Cluster(tuple(Machine(f"worker {n}", *size) for n in numbers), kinds or {})


C = TypeVar("C", bound=PipelineConfig)


def apply_profile(config: C, profile: Profile) -> C:
    """Return the settings with the profile's layout and GPUs where they leave both open.

    Layouts are open where they are the default of one rank, GPUs where pools are empty (of RL, and
    where rollout waits for training). With `rl.trainer.placement=auto` RL's stay open for the
    planner. Raises ConfigError for settings that the profile's machines can't take.
    """
    if not profile.gpus:
        return config
    if config.rl.trainer.placement == "local":
        raise ConfigError(
            f"rl.trainer.placement=local with profile={profile.name}: the profile's GPUs are on "
            "Ray workers; set rl.trainer.placement=ray, or profile=laptop"
        )
    placed: dict[str, object] = {"rl": _rl_on_gpus(config.rl, profile)}
    if config.evaluate.parallel is not None:
        _check_size("evaluate.parallel", config.evaluate.parallel, profile, one_machine=True)
    for section in (config.sft, config.preference, config.reward_model):
        if section is not config.sft or not config.sft.skip:
            placed[section.section] = _on_gpus(section, profile)
    return config.model_copy(update=placed)


def check_model_layouts(config: PipelineConfig) -> None:
    """Raise ConfigError for a layout that the model can't be split over; `auto` has none yet.

    A new model's is looked at where a layout isn't the default: that takes seconds of imports.
    """
    layouts = [section.parallel for section in (config.sft, config.rl.actor, config.rl.critic)]
    given = [layout for layout in (*layouts, config.evaluate.parallel) if layout is not None]
    if not config.model.path and all(layout == ONE_RANK for layout in given):
        return
    from engine.evaluation.decode import check_evaluation_layout
    from engine.models import text_config
    from engine.models.loading import new_model_config
    from engine.trainers.layout_checks import check_layouts
    from engine.trainers.offline import check_offline_layout

    start, lora = config.model, config.model.lora
    model = text_config(start.path) if start.path else None
    model = model or new_model_config(start, config.data.vocab_size)
    if not config.sft.skip:
        check_offline_layout(config.sft, lora, model)
    if config.rl.trainer.placement != "auto":
        check_layouts(config.rl, lora, model)
    check_evaluation_layout(config.evaluate, model)


def _on_gpus(config: OfflineConfig, profile: Profile) -> OfflineConfig:
    """Put training on ranks where the profile's machines have several GPUs."""
    section, several = config.section, profile.max_gpus > 1
    if several and config.placement == "local":
        raise ConfigError(
            f"{section}.placement=local with profile={profile.name}: the profile's GPUs are on Ray "
            f"workers; leave {section}.placement out, or set profile=laptop"
        )
    parallel = profile.layout if several and config.parallel == ONE_RANK else config.parallel
    _check_size(f"{section}.parallel", parallel, profile)
    if not several:
        return config
    pool = PoolConfig(roles=(section,), cpus=_cpus(profile), gpus=1.0)
    placed = {"parallel": parallel, "placement": "ray", "pools": config.pools or (pool,)}
    return config.model_copy(update=placed)


def _rl_on_gpus(rl: RLConfig, profile: Profile) -> RLConfig:
    """Fill in layout and pools; where the planner chooses them, the compute dtype alone."""
    trainer, parallel = rl.trainer, rl.actor.parallel
    apart = trainer.mode != "sync" and not trainer.pools
    if trainer.placement == "auto" or apart:
        if apart and profile.max_gpus == 1 and rl.rollout.engine != "server":
            raise ConfigError(
                f"rl.trainer.mode={trainer.mode} needs a GPU for the trainer and one for rollout, "
                f"and profile={profile.name} has one; set rl.trainer.mode=sync"
            )
        say("plan: rl.trainer.placement=auto: layout and pools are chosen at each start of rl")
        # The planner treats any layout that differs from the default as the user's choice.
        compute_dtype = parallel.compute_dtype or profile.layout.compute_dtype
        planned = {"trainer.placement": "auto", "actor.parallel.compute_dtype": compute_dtype}
        return rl.replaced(planned)
    if parallel == ONE_RANK and trainer.mode == "sync":  # what fits is chosen where the GPUs are
        layout = profile.parallel or profile.layout.replaced({"activation_checkpointing": None})
        rl = rl.replaced({"actor.parallel": layout})
    _check_size("rl.actor.parallel", rl.actor.parallel, profile)
    return rl if rl.trainer.pools else rl.replaced({"trainer.pools": _pools(rl, profile)})


def _pools(rl: RLConfig, profile: Profile) -> tuple[PoolConfig, ...]:
    """Return the policy's roles on one GPU a rank, all other roles on a core of their own."""
    from engine.registry import import_plugins
    from engine.trainers import run_spec

    import_plugins(rl.plugins)
    policy, *others = run_spec.default_pools(run_spec.run_roles(rl)[1])
    return (
        PoolConfig(roles=policy, cpus=_cpus(profile), gpus=1.0),
        PoolConfig(roles=sum(others, ()), cpus=1.0),  # the reward, at least
    )


def _cpus(profile: Profile) -> int:
    """Return the cores of a rank on one GPU; the machine's others are for roles without one."""
    return max(1, profile.cpus // profile.gpus - 1)


def _check_size(
    setting: str, parallel: ParallelConfig, profile: Profile, *, one_machine: bool = False
) -> None:
    """Raise ConfigError for a layout of more ranks than GPUs."""
    from engine.parallel.layout import Layout

    ranks, gpus = Layout.of(parallel).world_size, profile.max_gpus
    most = f"profile={profile.name} has at most"
    if one_machine:
        gpus, most = profile.gpus, f"a machine of profile={profile.name}, which evaluates, has"
    if ranks > gpus:
        raise ConfigError(
            f"{setting} is a layout of {ranks} ranks, but {most} {gpus} GPUs; choose a smaller "
            "layout, or another profile"
        )


def require_shared_home(config: PipelineConfig) -> None:
    """Raise ConfigError in a Kubernetes pod whose files ranks in other pods could not see.

    Where a volume is mounted, the stage itself asks every machine (`require_shared`).
    """
    on_ray = config.rl.trainer.placement != "local" or config.sft.placement == "ray"
    if not on_ray or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return
    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.stat().st_dev == Path("/").stat().st_dev:
        raise ConfigError(
            f"HYBRIDFLYTE_HOME={folder} is on the pod's own disk, and the pods of a Ray job share "
            "the run's files there; mount one volume (ReadWriteMany) there in all pods "
            "(docs/kubernetes.md), or set rl.trainer.placement=local"
        )
