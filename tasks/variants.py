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
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flytekit import Cache, PodTemplate, Resources, dynamic, task
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager, FlyteEntities
from flytekit.core.workflow import WorkflowBase
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from engine.config import digest
from engine.stages.profiles import LAPTOP, Profile
from tasks.flytekit_setup import Need, image, registration_environment, with_secrets
from tasks.host import IMAGE, SMALL

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


def worker_pod(profile: Profile, container: str) -> PodTemplate:
    """Return the pod of a whole machine, say a Ray worker."""
    return _LazyPodTemplate(container, profile, profile.cpus, profile.memory_gib, profile.gpus)


def head_pod(container: str) -> PodTemplate:
    """Return the pod of a Ray head: no GPU and no toleration of GPU machines' taint."""
    return _LazyPodTemplate(container, LAPTOP, 1, 4, 0)  # cores, GiB and GPUs


def stage_pod(profile: Profile) -> PodTemplate | None:
    """Return the pod of a stage without a Ray cluster: a whole machine; None without GPUs."""
    return worker_pod(profile, "primary") if profile.gpus else None


class _LazyPodTemplate(PodTemplate):
    """A pod template that builds its spec when Flyte asks for it, at registration.

    The Kubernetes client's 800 modules would slow down the start of every command.
    """

    def __init__(
        self, container: str, profile: Profile, cpus: int, memory_gib: int, gpus: int
    ) -> None:
        self.primary_container_name, self._profile = container, profile
        self._amounts = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
        self._gpus = {profile.resource: str(gpus)} if gpus else {}

    @cached_property
    def pod_spec(self) -> V1PodSpec:
        from kubernetes import client

        profile, amounts = self._profile, self._amounts | self._gpus
        # Ray's object store and torch's queues need more than the usual 64 MB.
        size = f"{profile.shared_memory_gib}Gi"
        memory = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=size)
        variables = [client.V1EnvVar(name=k, value=v) for k, v in profile.variables.items()]
        container = client.V1Container(
            name=self.primary_container_name,
            resources=client.V1ResourceRequirements(requests=amounts, limits=amounts),
            env=variables or None,
            volume_mounts=[client.V1VolumeMount(name="shm", mount_path="/dev/shm")],
        )
        taints = [
            client.V1Toleration(key=resource, operator="Exists", effect="NoSchedule")
            for resource in self._gpus
        ]
        return client.V1PodSpec(
            containers=[container],
            node_selector=dict(profile.node_labels) or None,
            tolerations=taints or None,
            volumes=[client.V1Volume(name="shm", empty_dir=memory)],
        )


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


def ray_cluster_of_gpus(profile: Profile) -> LocalRayJobConfig | None:
    """Return the same where machines have several GPUs; a pod has the only one by itself."""
    return ray_cluster(profile) if profile.max_gpus > 1 else None


PROFILE_VARIABLE = "HYBRIDFLYTE_PROFILE"  # of a stage's container: its profile as JSON

StageOn = Callable[[Profile], Any]  # makes a stage's task for these machines
# Makes an input of a stage from the profile and the stage's other inputs.
MadeInside = Callable[[Profile, Mapping[str, Any]], Any]


def on_profiles(
    *,
    retries: int,
    timeout: timedelta,
    made_inside: Mapping[str, MadeInside] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function: make it a stage whose first input is its profile.

    `made_inside` are inputs that the dynamic task makes, by further tasks on the same machines; the
    rest is as in `stages_of`.
    """

    def make(body: Callable[..., Any]) -> Any:
        stage_on = stages_of(retries=retries, timeout=timeout, **options)(body)
        return dynamic(
            _with_profile(body, stage_on, made_inside or {}),
            cache=False,
            container_image=IMAGE,
            requests=SMALL,
            retries=2,  # of its own pod: a stage that failed ends it for good
            timeout=(retries + 1) * timeout,  # holds for all attempts at the stage
            environment=registration_environment(),
        )

    return make


def stages_of(
    *,
    requests: Resources,
    task_config: Callable[[Profile], Any] | None = None,
    retries: int,
    timeout: timedelta,
    cache: Cache | bool = False,
    needs: tuple[Need, ...] = ("hub",),
    **options: Any,
) -> Callable[[Callable[..., Any]], StageOn]:
    """Decorate a function: make it a stage that dynamic tasks lay out.

    `requests` is for profiles without GPUs. `task_config(profile)` is for tasks that start a
    cluster, unless it is None. `timeout` is of an attempt. `options`: flytekit's.
    """

    def make(body: Callable[..., Any]) -> StageOn:
        @functools.wraps(body)
        def function(*arguments: Any, **inputs: Any) -> Any:
            return body(*arguments, **inputs)

        function.__name__ = function.__qualname__ = f"{body.__name__}_stage"

        def stage_on(profile: Profile) -> Any:
            cluster, secrets = task_config and task_config(profile), with_secrets(*needs)
            # In flytekit 1.16 a task's requests replace those of its pod template.
            machines: dict[str, Any] = {"requests": requests}
            if cluster is not None:
                machines = {"task_config": cluster, "requests": SMALL}
            elif pod := stage_pod(profile):
                machines = {"pod_template": pod}
            environment = {PROFILE_VARIABLE: profile.model_dump_json()}
            made = task(
                function,
                container_image=image(profile.image_kind),
                retries=retries,
                timeout=timeout,
                cache=replace(cache, salt=digest(profile)) if isinstance(cache, Cache) else cache,
                environment=environment | secrets.pop("environment", {}),
                **machines,
                **secrets,
                **options,
            )
            # flytekit 1.16 puts the running program's module before the stage's name otherwise.
            made._instantiated_in = body.__module__
            return made

        # A container finds the stage by module and name; PROFILE_VARIABLE says its profile.
        text = os.environ.get(PROFILE_VARIABLE)
        profile = Profile.model_validate_json(text) if text else LAPTOP
        setattr(sys.modules[body.__module__], function.__name__, stage_on(profile))
        return stage_on

    return make


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
