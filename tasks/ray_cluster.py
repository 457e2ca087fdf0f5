"""The Ray cluster of tasks with ranks: the one that Flyte starts for a profile, and a local one.

On a cluster the Ray plugin connects the task. Locally the task body does (`ray_session`), so that
an error there fails the stage like any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from engine.config import PipelineConfig
from engine.errors import ConfigError
from engine.storage.locations import home
from tasks.pods import head_pod, worker_pod
from tasks.profiles import Profile

LOCAL_OBJECT_STORE_BYTES = 512 << 20  # object store of a Ray that is started locally


@dataclass
class LocalRayJobConfig(RayJobConfig):
    """A `RayJobConfig` for `LocalRayTask`."""


class LocalRayTask(RayFunctionTask):
    """The plugin's task, which leaves Ray to the task body in local runs."""

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return user_params
        return super().pre_execute(user_params)


TaskPlugins.register_pythontask_plugin(LocalRayJobConfig, LocalRayTask)


def ray_cluster(profile: Profile) -> LocalRayJobConfig:
    """The cluster of one run on these machines.

    Ray's autoscaler keeps the workers between the profile's minimum and maximum: a pre-empted spot
    machine is replaced, or the run continues with fewer. The head schedules nothing.
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
    """The same where the machines have several GPUs; a pod has the only one by itself."""
    return ray_cluster(profile) if profile.several_gpus else None


def require_shared_home(config: PipelineConfig) -> None:
    """Raise ConfigError where ranks in other pods could not see the run's files.

    In a Kubernetes pod whose $HYBRIDFLYTE_HOME is on the container's own disk. Of a volume that is
    mounted there the stage itself asks every machine (`require_shared`).
    """
    on_ray = config.rl.trainer.placement != "local" or config.sft.placement == "ray"
    if not on_ray or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return
    folder = home()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if there.stat().st_dev == Path("/").stat().st_dev:
        raise ConfigError(
            f"HYBRIDFLYTE_HOME={folder} is on the pod's own disk, and the pods of a Ray job share "
            "the run's files there; mount one volume (ReadWriteMany) there in all pods "
            "(docs/kubernetes.md), or set rl.trainer.placement=local"
        )
