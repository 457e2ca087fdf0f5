"""The Ray cluster of the RL task: what Flyte brings up for it, and Ray on a laptop.

On a cluster the Ray plugin connects the task. Locally the task's body does (`ray_session`), so that
a fault there ends the stage as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from flytekit import PodTemplate
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask
from kubernetes.client import (
    V1Container,
    V1EmptyDirVolumeSource,
    V1PodSpec,
    V1ResourceRequirements,
    V1Volume,
    V1VolumeMount,
)

LAPTOP_STORE = 512 << 20  # bytes of the object store of a Ray that is started here


@dataclass
class LocalRayJobConfig(RayJobConfig):
    """`RayJobConfig` whose local start is ours."""


class LocalRayTask(RayFunctionTask):
    """The plugin's task, which leaves Ray to the task's body where there is no cluster."""

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return user_params
        return super().pre_execute(user_params)


TaskPlugins.register_pythontask_plugin(LocalRayJobConfig, LocalRayTask)


def _pod(container: str, cpu: str, memory: str) -> PodTemplate:
    """One Ray pod: its resources, and shared memory for the object store."""
    return PodTemplate(
        primary_container_name=container,
        pod_spec=V1PodSpec(
            containers=[
                V1Container(
                    name=container,
                    resources=V1ResourceRequirements(
                        requests={"cpu": cpu, "memory": memory},
                        limits={"cpu": cpu, "memory": memory},
                    ),
                    volume_mounts=[V1VolumeMount(name="shm", mount_path="/dev/shm")],
                )
            ],
            volumes=[
                V1Volume(
                    name="shm", empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit="2Gi")
                )
            ],
        ),
    )


RAY_CLUSTER = LocalRayJobConfig(
    head_node_config=HeadNodeConfig(
        ray_start_params={"num-cpus": "0"}, pod_template=_pod("ray-head", "1", "4Gi")
    ),
    worker_node_config=[
        WorkerNodeConfig(
            group_name="workers",
            replicas=1,
            min_replicas=1,
            max_replicas=2,
            pod_template=_pod("ray-worker", "2", "8Gi"),
        )
    ],
    enable_autoscaling=True,
    shutdown_after_job_finishes=True,
    ttl_seconds_after_finished=600,
)
