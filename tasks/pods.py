"""What a profile is for Kubernetes: the pods of Ray's workers and head, and of other stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from flytekit import PodTemplate

from tasks.profiles import LAPTOP, Profile

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec, V1Volume


def worker_pod(profile: Profile, container: str) -> PodTemplate:
    """A whole machine, say a Ray worker."""
    return _pod(profile, container, profile.cpus, profile.memory_gib, profile.gpus)


def head_pod(container: str) -> PodTemplate:
    """A Ray head: no GPU and no toleration of GPU machines' taint."""
    return _pod(LAPTOP, container, cpus=1, memory_gib=4, gpus=0)


def stage_pod(profile: Profile) -> PodTemplate | None:
    """The pod of a stage without a Ray cluster: a whole machine; None without GPUs."""
    return worker_pod(profile, "primary") if profile.gpus else None


class _LazyPodTemplate(PodTemplate):
    """Builds its pod spec when Flyte asks for it, at registration.

    The Kubernetes client's 800 modules would slow down the start of every command.
    """

    def __init__(self, container: str, build: Callable[[], V1PodSpec]) -> None:
        self.primary_container_name = container
        self._build = build

    @cached_property
    def pod_spec(self) -> V1PodSpec:
        return self._build()


def _pod(profile: Profile, container: str, cpus: int, memory_gib: int, gpus: int) -> PodTemplate:
    return _LazyPodTemplate(
        container, lambda: _pod_spec(profile, container, cpus, memory_gib, gpus)
    )


def _pod_spec(profile: Profile, container: str, cpus: int, memory_gib: int, gpus: int) -> V1PodSpec:
    from kubernetes import client

    amounts = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    if gpus:
        amounts[profile.resource] = str(gpus)
    taint = client.V1Toleration(key=profile.resource, operator="Exists", effect="NoSchedule")
    variables = [client.V1EnvVar(name=k, value=v) for k, v in profile.variables.items()]
    return client.V1PodSpec(
        containers=[
            client.V1Container(
                name=container,
                resources=client.V1ResourceRequirements(requests=amounts, limits=amounts),
                env=variables or None,
                volume_mounts=[client.V1VolumeMount(name="shm", mount_path="/dev/shm")],
            )
        ],
        node_selector=dict(profile.node_labels) or None,
        tolerations=[taint] if gpus else None,
        volumes=[shared_memory(profile.shared_memory_gib)],
    )


def shared_memory(gib: int) -> V1Volume:
    """The volume "shm": Ray's object store and torch's queues need more than the usual 64 MB."""
    from kubernetes import client

    source = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{gib}Gi")
    return client.V1Volume(name="shm", empty_dir=source)
