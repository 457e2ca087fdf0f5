"""A stage on the machines of a profile: its pods, its Ray cluster, and its two Flyte tasks.

Flyte 1 takes a task's resources, and the Ray cluster in it, from its template, where no input can
be. The template of a dynamic workflow's node, however, is written while the execution runs. So
`tasks.stages.sft` is a dynamic task, a small pod that reads the profile and writes the node of
`tasks.stages.sft_stage`, the stage itself, with pods, image and Ray cluster of these sizes. Only
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
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from flytekit import Cache, PodTemplate, dynamic, task
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager, FlyteEntities
from flytekit.core.workflow import WorkflowBase
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from engine.config import digest
from engine.stages import pods
from engine.stages.profiles import LAPTOP, Profile
from tasks.flytekit_setup import image
from tasks.host import IMAGE, SMALL, task_options

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


def worker_pod(profile: Profile, container: str) -> PodTemplate:
    """Return the pod of a whole machine, say a Ray worker."""
    return _LazyPodTemplate(container, partial(pods.machine_pod, container, profile))


def head_pod(container: str) -> PodTemplate:
    """Return the pod of a Ray head."""
    return _LazyPodTemplate(container, partial(pods.head_pod, container))


def stage_pod(profile: Profile) -> PodTemplate | None:
    """Return the pod of a stage without a Ray cluster: a whole machine; None without GPUs."""
    return worker_pod(profile, "primary") if profile.gpus else None


class _LazyPodTemplate(PodTemplate):
    """A pod template that builds its spec when Flyte asks for it, at registration.

    The Kubernetes client's 800 modules would slow down the start of every command.
    """

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
    """Return the cluster of one run on these machines, whose head schedules nothing.

    A pre-empted spot machine is replaced by the autoscaler, or the run continues with fewer.
    """
    workers = WorkerNodeConfig(
        group_name="workers",
        replicas=profile.replicas.start,
        min_replicas=profile.replicas.fewest,
        max_replicas=profile.replicas.most,
        pod_template=worker_pod(profile, "ray-worker"),
    )
    return LocalRayJobConfig(
        head_node_config=HeadNodeConfig(
            ray_start_params={"num-cpus": "0"}, pod_template=head_pod("ray-head")
        ),
        worker_node_config=[workers],
        enable_autoscaling=True,
        shutdown_after_job_finishes=True,
        ttl_seconds_after_finished=600,
    )


PROFILE_VARIABLE = "HYBRIDFLYTE_PROFILE"  # of a stage's container: its profile as JSON

StageOn = Callable[[Profile], Any]  # makes a stage's task for these machines
# Makes an input of a stage from the profile and the stage's other inputs.
MadeInside = Callable[[Profile, Mapping[str, Any]], Any]


def on_profiles(
    *, made_inside: Mapping[str, MadeInside] | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function: make it a stage whose first input is its profile.

    `made_inside` are inputs that the dynamic task makes, by further tasks on the same machines.
    """

    def make(body: Callable[..., Any]) -> Any:
        options = pods.STAGES[body.__name__]
        return dynamic(
            _with_profile(body, stages_of(body), made_inside or {}),
            cache=False,
            container_image=IMAGE,
            requests=SMALL,
            retries=2,  # of its own pod: a stage that failed ends it for good
            timeout=(options.retries + 1) * options.timeout,  # holds for all attempts at the stage
            environment=pods.registration_environment(),
        )

    return make


def stages_of(body: Callable[..., Any]) -> StageOn:
    """Decorate a function: make it a stage that dynamic tasks lay out."""
    starts_ray = pods.STAGES[body.__name__].starts_ray

    @functools.wraps(body)
    def function(*arguments: Any, **inputs: Any) -> Any:
        return body(*arguments, **inputs)

    function.__name__ = function.__qualname__ = f"{body.__name__}_stage"

    def stage_on(profile: Profile) -> Any:
        options = task_options(body.__name__)
        environment = options.pop("environment", {})
        # In flytekit 1.16 a task's requests replace those of its pod template.
        machines: dict[str, Any] = {"requests": options["requests"]}
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

    signature = inspect.signature(body)
    first = inspect.Parameter("profile", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [input for name, input in signature.parameters.items() if name not in made_inside]
    on_machines.__signature__ = signature.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    types_of = {k: v for k, v in body.__annotations__.items() if k not in made_inside}
    on_machines.__annotations__ = {"profile": Profile, **types_of}
    return on_machines


@contextlib.contextmanager
def _unregistered(workflow: str) -> Iterator[None]:
    """Keep from registration what a run makes: stages, and the workflow of the dynamic task."""
    entities = FlyteEntities.entities
    before = set(map(id, entities))
    try:
        yield
    finally:
        entities[:] = [
            entity
            for entity in entities
            if id(entity) in before
            and not (isinstance(entity, WorkflowBase) and entity.name == workflow)
        ]
