"""The Ray cluster of the RL task: what Flyte brings up for it, and Ray on a laptop.

On a cluster the Ray plugin connects the task. Locally `ray_session` does, inside the task's body,
so that a fault there ends the stage as any other: it joins the cluster that RAY_ADDRESS names,
or starts Ray without dashboard and with quiet logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """The plugin's task, which leaves Ray to the task's body where there is no cluster."""

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return user_params
        return super().pre_execute(user_params)


TaskPlugins.register_pythontask_plugin(LocalRayJobConfig, LocalRayTask)


@contextlib.contextmanager
def ray_session(placement: str) -> Iterator[None]:
    """Have Ray for the block where workers are placed on it; end it if it was not there before.

    Joins the cluster that RAY_ADDRESS names, or starts one; PlacementError when that fails.
    """
    import ray

    if placement != "ray" or ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    ours: dict[str, Any] = {
        "num_cpus": os.cpu_count(),
        "include_dashboard": False,
        "object_store_memory": 512 << 20,
    }
    try:
        ray.init(
            **({"address": address} if address else ours),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise PlacementError(
            f"Ray could not be started{f' at RAY_ADDRESS={address}' if address else ''}: "
            f"{str(error).splitlines()[0]}; check the address, or unset RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


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
