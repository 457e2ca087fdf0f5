"""Machines of Flyte 2's tasks: an environment a kind of image, sizes by a profile at each call.

A call can't take a task with another image (`override`). So each stage that runs on a profile's
machines is a task in three environments, of the kinds of `engine.stages.pods.IMAGES`; all others
are in `DRIVER`, with the pipelines themselves.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import flyte

from engine.config import digest
from engine.stages import pods
from engine.stages.pods import PodOptions
from engine.stages.profiles import LAPTOP, Profile
from workflows.flyte2.host import cache

NAME = "hybridflyte"


def image(kind: str) -> flyte.Image:
    """Return the named image of a kind; without one, that of `--image`, `default=…` for all."""
    reference = pods.image(kind)
    return flyte.Image.from_base(reference) if reference else flyte.Image.from_ref_name("default")


def resources(options: PodOptions) -> flyte.Resources:
    """Return what a stage's pod asks for without GPUs."""
    return flyte.Resources(cpu=str(options.cpus), memory=f"{options.memory_gib}Gi")


def secrets(*needs: pods.Need) -> list[str | flyte.Secret] | None:
    """Return the secrets of a stage, as variables of its pod."""
    named = pods.secrets_of(*needs).items()
    return [flyte.Secret(s.key, s.group, as_env_var=name) for name, s in named] or None


MACHINES = {
    kind: flyte.TaskEnvironment(
        f"{NAME}-{kind}",
        image=image(kind),
        resources=resources(pods.STAGES["evaluate"]),
        secrets=secrets(),
        description=f"Stages on machines of the image {kind}",
    )
    for kind in pods.IMAGES
}
DRIVER = flyte.TaskEnvironment(
    NAME,
    image=image("default"),
    resources=resources(pods.STAGES["plan"]),
    secrets=secrets(),
    env_vars=pods.registration_environment(),  # it writes the templates of what it calls
    depends_on=list(MACHINES.values()),
    description="Pipelines, and stages on small machines",
)


def stage_task(body: Callable[..., Any]) -> Any:
    """Return the task of the stage of `body`'s name in `engine.stages.pods`.

    On a profile's machines it is three, `sft`, `sft_cuda` and `sft_rocm`: a pod finds its own by
    module and name.
    """
    options = pods.STAGES[body.__name__]
    decorate: dict[str, Any] = {
        "cache": cache(pods.image()) if options.cached else "disable",
        "retries": options.retries,
        "timeout": options.timeout,
        "interruptible": options.interruptible,
        "report": bool(options.shows),
        "docs": flyte.Documentation(body.__doc__ or ""),
    }
    if not options.on_profile:
        return DRIVER.task(**decorate)(body)
    for kind in ("cuda", "rocm"):
        named = functools.update_wrapper(lambda **inputs: body(**inputs), body)
        named.__name__ = named.__qualname__ = task_name(body.__name__, kind)
        task = MACHINES[kind].task(**decorate)(named)
        setattr(sys.modules[body.__module__], named.__name__, task)
    return MACHINES["default"].task(**decorate)(body)


def task_name(stage: str, kind: str) -> str:
    """Return the name of a stage's task with an image of this kind."""
    return stage if kind == "default" else f"{stage}_{kind}"


def task_on(stages: Any, stage: str, profile: Profile = LAPTOP, *, cluster: bool = True) -> Any:
    """Return a stage's task of the module `stages` as it runs on these machines.

    cluster: whether it gets pods and a Ray cluster; a local run starts Ray itself.
    """
    options = pods.STAGES[stage]
    kind = profile.image_kind if options.on_profile else "default"
    task = getattr(stages, task_name(stage, kind))
    changed: dict[str, Any] = {"resources": resources(options), "secrets": secrets(*options.needs)}
    if options.cached and options.on_profile:  # other hardware gives other results
        changed["cache"] = cache(pods.image(kind), digest(profile))
    if cluster and options.starts_ray(profile):
        small = resources(pods.STAGES["plan"])
        changed |= {"plugin_config": ray_cluster(profile), "resources": small}
    elif cluster and options.on_profile and profile.gpus:
        pod = flyte.PodTemplate(pods.machine_pod("primary", profile), "primary")
        changed |= {"pod_template": pod, "resources": flyte.Resources()}
    return task.override(**changed)


def ray_cluster(profile: Profile) -> Any:
    """Return the Ray cluster of one run on these machines."""
    from flyteplugins import ray

    options = pods.ray_job(ray, lambda name, spec: flyte.PodTemplate(spec(), name), profile)
    return ray.RayJobConfig(**options)
