"""A stage on the machines of a profile: its pods, its Ray cluster, and its two Flyte tasks.

Flyte 1 takes a task's resources, and the Ray cluster in it, from its template, where no input can
be. So `tasks.stages.sft` is a dynamic task, a small pod that reads the profile and writes the node
of `tasks.stages.sft_stage`, the stage itself, with pods, image and Ray cluster of these sizes. Only
the stage is cached, by profile: other hardware, in another layout, gives other results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import flytekitplugins.ray
from flytekit import Cache, PodTemplate, dynamic, task
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager, FlyteEntities
from flytekit.core.workflow import WorkflowBase
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import RayJobConfig
from flytekitplugins.ray.task import RayFunctionTask

from engine.config import digest
from engine.stages import interfaces, pods
from engine.stages.profiles import LAPTOP, Profile
from tasks.flytekit_setup import image
from tasks.host import IMAGE, SMALL, task_options

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


def stage_pod(profile: Profile) -> PodTemplate | None:
    """Return the pod of a stage without a Ray cluster: a whole machine; None without GPUs."""
    spec = partial(pods.machine_pod, "primary", profile)
    return _LazyPodTemplate("primary", spec) if profile.gpus else None


class _LazyPodTemplate(PodTemplate):
    """A pod template that loads Kubernetes' 800 modules when Flyte asks for it, to register."""

    def __init__(self, container: str, spec: Callable[[], V1PodSpec]) -> None:
        self.primary_container_name, self._spec = container, spec

    @cached_property
    def pod_spec(self) -> V1PodSpec:
        return self._spec()


@dataclass
class LocalRayJobConfig(RayJobConfig):
    """A `RayJobConfig` for `LocalRayTask`."""


class LocalRayTask(RayFunctionTask):
    """The plugin's task, which locally leaves Ray to the stage: an error there fails it."""

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return user_params
        return super().pre_execute(user_params)


TaskPlugins.register_pythontask_plugin(LocalRayJobConfig, LocalRayTask)


def ray_cluster(profile: Profile) -> LocalRayJobConfig:
    """Return the Ray cluster of one run on these machines."""
    return LocalRayJobConfig(**pods.ray_job(flytekitplugins.ray, _LazyPodTemplate, profile))


PROFILE_VARIABLE = "HYBRIDFLYTE_PROFILE"  # of a stage's container: its profile as JSON

StageOn = Callable[[Profile], Any]  # makes a stage's task for these machines
# Makes an input of a stage from the profile and the stage's other inputs.
MadeInside = Callable[[Profile, Mapping[str, Any]], Any]


def on_profiles(body: Callable[..., Any], made_inside: Mapping[str, MadeInside]) -> Any:
    """Return the dynamic task of a stage whose first input is its profile, then `body`'s.

    `made_inside` are inputs that it makes itself, by further tasks on the same machines.
    """
    options = pods.STAGES[body.__name__]
    attempts = (options.retries + 1) * options.timeout
    return dynamic_task(_with_profile(body, stages_of(body), made_inside), attempts)


def dynamic_task(function: Callable[..., Any], timeout: timedelta) -> Any:
    """Return a dynamic task in a small pod; its timeout holds for all stages that it writes."""
    return dynamic(
        function,
        cache=False,
        container_image=IMAGE,
        requests=SMALL,
        retries=2,  # of its own pod: a stage that failed ends it for good
        timeout=timeout,
        environment=pods.registration_environment(),
    )


def stages_of(body: Callable[..., Any]) -> StageOn:
    """Return what makes a stage's task on a profile, and set the module's `<stage>_stage` to it."""
    starts_ray = pods.STAGES[body.__name__].starts_ray

    @functools.wraps(body)
    def function(**inputs: Any) -> Any:
        return body(**inputs)

    function.__name__ = function.__qualname__ = f"{body.__name__}_stage"

    def stage_on(profile: Profile) -> Any:
        options = task_options(body.__name__)
        environment = options.pop("environment", {})
        # In flytekit 1.16 a task's requests replace those of its pod template.
        machines = {"requests": options["requests"]}
        if starts_ray(profile):
            machines = {"task_config": ray_cluster(profile), "requests": SMALL}
        elif pod := stage_pod(profile):
            machines = {"pod_template": pod, "requests": None}
        cache = options["cache"]
        changed = {
            "container_image": image(profile.image_kind),
            "cache": replace(cache, salt=digest(profile)) if isinstance(cache, Cache) else cache,
            "environment": {PROFILE_VARIABLE: profile.model_dump_json()} | environment,
        }
        made = task(function, **{**options, **machines, **changed})
        # flytekit 1.16 puts the running program's module before the stage's name otherwise.
        made._instantiated_in = body.__module__
        return made

    # A container finds the stage by module and name; PROFILE_VARIABLE says its profile.
    text = os.environ.get(PROFILE_VARIABLE)
    profile = Profile.model_validate_json(text) if text else LAPTOP
    setattr(sys.modules[body.__module__], function.__name__, stage_on(profile))
    return stage_on


def _with_profile(
    body: Callable[..., Any], stage_on: StageOn, made_inside: Mapping[str, MadeInside]
) -> Callable[..., Any]:
    """Return the dynamic task's function: the profile, then `body`'s inputs but those made."""

    @functools.wraps(body)
    def on_machines(profile: Profile, **inputs: Any) -> Any:
        with _unregistered(f"{body.__module__}.{body.__name__}"):
            stage = stage_on(profile)
            made = {name: make(profile, inputs) for name, make in made_inside.items()}
        return stage(**inputs, **made)

    signature, about = inspect.signature(body), body.__doc__ or ""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = inspect.Parameter("profile", kind, annotation=Profile)
    others = [input for name, input in signature.parameters.items() if name not in made_inside]
    signature = signature.replace(parameters=[first, *others])
    return interfaces.declare(on_machines, body.__name__, body.__module__, signature, about)


@contextlib.contextmanager
def _unregistered(workflow: str) -> Iterator[None]:
    """Keep from registration what a run makes: stages, and the workflow of the dynamic task."""
    entities = FlyteEntities.entities
    before = set(map(id, entities))
    try:
        yield
    finally:
        known = [entity for entity in entities if id(entity) in before]
        entities[:] = [e for e in known if not isinstance(e, WorkflowBase) or e.name != workflow]
