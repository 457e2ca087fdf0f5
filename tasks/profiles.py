"""Resource profiles: the machines that a run may ask for, and what each means for Kubernetes.

Flyte 1 fixes a task's resources when it is registered: an input can't change them, `with_overrides`
reaches a node's own container but not the worker group inside a Ray job, and a dynamic workflow
would hide the choice from readers of the registered graph. So a stage is registered once per
profile (`tasks.variants`), and the workflow's input `profile` picks the branch. Each Ray job can be
read before anything runs.

Values only: `tasks.placement` applies them to the engine's settings, `tasks.ray_cluster` to Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from flytekit import PodTemplate

from engine.config import ParallelConfig

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec, V1Volume

NVIDIA = "nvidia.com/gpu"
AMD = "amd.com/gpu"
ONE_RANK = ParallelConfig()


class ProfileName(Enum):
    """What the input `profile` takes."""

    LAPTOP = "laptop"
    ONE_GPU = "one-gpu"
    A100_8 = "8xA100"
    H100_2X8 = "2x8xH100"
    MI300X = "mi300x"


@dataclass(frozen=True, slots=True)
class Profile:
    """The Ray workers of a run; a stage without Ray gets the share of one of their GPUs."""

    name: ProfileName
    cpus: int  # of a worker, e.g. 88
    memory_gib: int  # of a worker, e.g. 1000
    shared_memory_gib: int  # /dev/shm of a worker; counts as its memory
    replicas: tuple[int, int, int]  # workers: fewest, at the start, most (Ray's autoscaler)
    gpus: int = 0  # of a worker
    accelerator: str = ""  # their kind, by Ray's name; empty where it is not known before
    gpu_resource: str = NVIDIA
    node_labels: Mapping[str, str] = field(default_factory=dict)  # selects the GPU
    image: str = "default"  # kind of image, see tasks.images
    environment: Mapping[str, str] = field(default_factory=dict)
    parallel: ParallelConfig = ONE_RANK  # of the actor, unless the settings have one

    @property
    def identifier(self) -> str:
        """The end of a variant's name, e.g. `a100_8`."""
        return self.name.name.lower()

    @property
    def world(self) -> int:
        """GPUs at the start, of all workers."""
        return self.gpus * self.replicas[1]


# Both NCCL and RCCL read NCCL_*.
_COLLECTIVES = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

# Node labels are those of NVIDIA's GPU feature discovery and AMD's node labeller.
_ALL = (
    Profile(ProfileName.LAPTOP, cpus=2, memory_gib=8, shared_memory_gib=2, replicas=(1, 1, 2)),
    Profile(
        ProfileName.ONE_GPU,
        cpus=8,
        memory_gib=56,
        shared_memory_gib=8,
        replicas=(1, 1, 1),
        gpus=1,
        node_labels={"nvidia.com/gpu.present": "true"},
        image="cuda",
        environment=_COLLECTIVES,
        parallel=ParallelConfig(compute_dtype="bfloat16", activation_checkpointing=True),
    ),
    Profile(
        ProfileName.A100_8,
        cpus=88,
        memory_gib=1000,
        shared_memory_gib=128,
        replicas=(1, 1, 2),
        gpus=8,
        accelerator="A100-80G",
        node_labels={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
        image="cuda",
        environment={**_COLLECTIVES, "NCCL_P2P_LEVEL": "NVL"},
        parallel=ParallelConfig(fsdp=8, compute_dtype="bfloat16", activation_checkpointing=True),
    ),
    Profile(
        ProfileName.H100_2X8,
        cpus=176,
        memory_gib=1800,
        shared_memory_gib=256,
        replicas=(1, 2, 2),
        gpus=8,
        accelerator="H100",
        node_labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        image="cuda",
        # Pods' own network between the nodes; set NCCL_IB_HCA as well where they have InfiniBand.
        environment={**_COLLECTIVES, "NCCL_SOCKET_IFNAME": "eth0", "NCCL_CROSS_NIC": "1"},
        # HYBRID_SHARD: shards over a node's NVLink, copies over the network.
        parallel=ParallelConfig(
            dp=2, fsdp=8, compute_dtype="bfloat16", activation_checkpointing=True
        ),
    ),
    Profile(
        ProfileName.MI300X,
        cpus=176,
        memory_gib=1800,
        shared_memory_gib=256,
        replicas=(1, 1, 2),
        gpus=8,
        accelerator="AMD-Instinct-MI300X-OAM",
        gpu_resource=AMD,
        node_labels={"amd.com/gpu.device-id": "74a1"},
        image="rocm",
        # The last three as AMD's guide to tuning the MI300X has them for RCCL on all eight.
        environment={
            **_COLLECTIVES,
            "NCCL_MIN_NCHANNELS": "112",
            "HSA_NO_SCRATCH_RECLAIM": "1",
            "TORCH_NCCL_HIGH_PRIORITY": "1",
        },
        # 192 GB a GPU: layers' activations can stay.
        parallel=ParallelConfig(fsdp=8, compute_dtype="bfloat16"),
    ),
)

PROFILES: Mapping[str, Profile] = {profile.name.value: profile for profile in _ALL}


def worker_pod(profile: Profile, container: str) -> PodTemplate:
    """A Ray worker: the whole machine."""
    return _pod(profile, container, profile.cpus, profile.memory_gib, profile.gpus)


def head_pod(container: str) -> PodTemplate:
    """A Ray head: no GPU and no toleration of GPU machines' taint."""
    return _pod(PROFILES["laptop"], container, cpus=1, memory_gib=4, gpus=0)


def stage_pod(profile: Profile) -> PodTemplate | None:
    """The pod of a stage without Ray: one GPU and its share of the machine; None without GPUs."""
    if not profile.gpus:
        return None
    cpus, memory = profile.cpus // profile.gpus, profile.memory_gib // profile.gpus
    return _pod(profile, "primary", cpus, memory, 1)


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
        amounts[profile.gpu_resource] = str(gpus)
    taint = client.V1Toleration(key=profile.gpu_resource, operator="Exists", effect="NoSchedule")
    shared = profile.shared_memory_gib * max(gpus, 1) // max(profile.gpus, 1)
    variables = [client.V1EnvVar(name=k, value=v) for k, v in profile.environment.items()]
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
        volumes=[shared_memory(shared)],
    )


def shared_memory(gib: int) -> V1Volume:
    """The volume "shm": Ray's object store and torch's queues need more than the usual 64 MB."""
    from kubernetes import client

    source = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=f"{gib}Gi")
    return client.V1Volume(name="shm", empty_dir=source)
