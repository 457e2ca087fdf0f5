"""The Ray cluster of the RL task: what Flyte brings up for it, and Ray on a laptop.

Locally the Ray plugin starts Ray in this process; `LocalRayTask` starts it first, without dashboard
and with quiet logs, or joins the cluster that RAY_ADDRESS names.
"""

from __future__ import annotations

import logging
import os
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

from engine.errors import PlacementError


@dataclass
class LocalRayJobConfig(RayJobConfig):
    """`RayJobConfig` whose local start is ours."""


class LocalRayTask(RayFunctionTask):
    """The plugin's task, with a quick and quiet Ray where there is no cluster."""

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            start_local_ray()
        return super().pre_execute(user_params)


TaskPlugins.register_pythontask_plugin(LocalRayJobConfig, LocalRayTask)


def start_local_ray() -> None:
    """Start Ray in this process, or join RAY_ADDRESS; PlacementError when that can't be reached."""
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 << 20,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise PlacementError(
            f"Ray could not be started{f' at RAY_ADDRESS={address}' if address else ''}: "
            f"{str(error).splitlines()[0]}; check the address, or unset RAY_ADDRESS"
        ) from error


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
