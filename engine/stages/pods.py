"""Stages on a cluster of any workflow engine: retries, deadlines, images, credentials, pods.

`STAGES` lists them all. A front (`tasks/` for flytekit 1, `workflows/flyte2/` for Flyte 2) makes
its engine's tasks of these, and of the functions of the other modules here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine import errors
from engine.stages.profiles import LAPTOP, Profile

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

Need = Literal["hub", "loggers"]  # credentials that not every stage gets


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What a stage asks of a cluster."""

    retries: int = 2
    timeout: timedelta = timedelta(minutes=30)  # of an attempt
    cpus: int = 1  # without GPUs, and of the submitter of a Ray job
    memory_gib: int = 2
    cached: bool = False
    interruptible: bool = False  # goes on elsewhere where a spot machine is taken away
    needs: tuple[Need, ...] = ()
    shows: Literal["", "pages", "settings"] = ""  # a report; one of settings has no outputs in it
    on_profile: bool = False  # on the machines of the run's profile
    ray: Literal["never", "gpus", "always"] = "never"  # a cluster; "gpus": for several of them

    def starts_ray(self, profile: Profile) -> bool:
        """Tell whether the stage gets a Ray cluster of its own on these machines."""
        return self.ray == "always" or (self.ray == "gpus" and profile.max_gpus > 1)


_SHORT = PodOptions()
_SHOWS = replace(_SHORT, shows="pages")
_DATA = PodOptions(3, timedelta(hours=2), interruptible=True, needs=("hub",), shows="pages")
_COMPUTES = replace(
    _DATA, timeout=timedelta(hours=6), cpus=2, memory_gib=6, cached=True, on_profile=True
)
_TRAINS = replace(_COMPUTES, timeout=timedelta(hours=12), needs=("hub", "loggers"), ray="gpus")
# Moves of an alias are not interruptible; running one again changes nothing. They are on the
# profile's machine, as they may have to evaluate the champion.
_PROMOTES = replace(_COMPUTES, retries=2, cached=False, interruptible=False)

STAGES: Mapping[str, PodOptions] = {
    "plan": replace(_SHORT, needs=("hub",), shows="settings"),
    "plan_promotion": _SHORT,
    "trigger_retraining": PodOptions(2, timedelta(hours=2), needs=("hub",), shows="settings"),
    "preprocess": replace(_DATA, cached=True),
    "ingest": replace(_DATA, cached=True),
    "fetch": _DATA,  # not cached: an alias may point to another version tomorrow
    "reward_audit": _COMPUTES,
    "sft": _TRAINS,
    # Its pod is the submitter's, which is small.
    "rl": replace(
        _TRAINS, retries=5, timeout=timedelta(days=3), cpus=1, memory_gib=2, ray="always"
    ),
    "pairs": _COMPUTES,
    "reference_log_probs": replace(_TRAINS, timeout=timedelta(hours=6)),
    "preference_training": _TRAINS,
    "reward_model_training": _TRAINS,
    "reward_model_promotion": _PROMOTES,
    "evaluate_part": replace(_COMPUTES, shows=""),
    "evaluate": _COMPUTES,
    "promote": _PROMOTES,
    "waits_for_approval": _SHORT,
    "keep_promotion": _SHORT,
    "approval_request": _SHORT,
    "rollback": replace(_SHOWS, timeout=timedelta(hours=1)),
    "report": _SHOWS,
    "finalize": _SHOWS,
    "finalize_skipped": _SHOWS,
    "record_failure": _SHORT,
    "review": replace(_SHOWS, timeout=timedelta(hours=6)),
}


# Faults of machines and services, after which a stage is tried again on a cluster.
RETRYABLE = (
    errors.PlacementError,
    errors.PreemptedError,
    errors.StorageError,
    errors.TrackingError,
    errors.WorkerError,
)


# Images. Registration sets the variables to references by digest before it loads the tasks, so that
# cache keys contain the images.

IMAGES = {
    "default": "HYBRIDFLYTE_IMAGE",
    "cuda": "HYBRIDFLYTE_CUDA_IMAGE",
    "rocm": "HYBRIDFLYTE_ROCM_IMAGE",
}


def image(kind: str = "default") -> str:
    """Return the image of a kind; without one, the default; empty where none is named."""
    return os.environ.get(IMAGES[kind]) or os.environ.get(IMAGES["default"]) or ""


# Credentials of pods, by the cluster's secrets: variable, then group and key of the secret, e.g.
# HF_TOKEN=hybridflyte/hub. They are part of a task's template, and read when it is registered.

SECRETS = "HYBRIDFLYTE_SECRETS"

# Variables that only stages with that need get; all others are every stage's.
_OF: Mapping[Need, re.Pattern[str]] = {
    "hub": re.compile(r"HF_|HUGGING_?FACE_"),
    "loggers": re.compile(r"WANDB_"),
}
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENTRY = re.compile(rf"([A-Z_][A-Z0-9_]*)=({_WORD})/({_WORD})")


class SecretName(NamedTuple):
    """Where a variable's value is kept."""

    group: str
    key: str


def read_secrets(text: str) -> dict[str, SecretName]:
    """Return the secrets by variable; ConfigError for what is none."""
    secrets: dict[str, SecretName] = {}
    for entry in (part.strip() for part in text.split(",") if part.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise errors.ConfigError(
                f"{SECRETS}: {entry!r} is no VARIABLE=GROUP/KEY; give the variable and the "
                "secret's name, never its value, such as HF_TOKEN=hybridflyte/hub"
            )
        variable, group, key = match.groups()
        if variable in secrets:
            raise errors.ConfigError(f"{SECRETS} names {variable} twice; leave one out")
        secrets[variable] = SecretName(group, key)
    return secrets


def secrets_of(*needs: Need) -> dict[str, SecretName]:
    """Return the secrets, by variable, of a stage with these needs."""
    return {
        variable: secret
        for variable, secret in read_secrets(os.environ.get(SECRETS, "")).items()
        if all(need in needs or not names.match(variable) for need, names in _OF.items())
    }


def registration_environment() -> dict[str, str]:
    """Return variables of a pod that writes templates of tasks, which read them on load."""
    return {v: os.environ[v] for v in (*IMAGES.values(), SECRETS) if v in os.environ}


# Who is told how executions end.

NOTIFY = "HYBRIDFLYTE_NOTIFY"  # addresses, separated by commas
_SLACK = "slack:"  # before the mail address of a Slack channel


def recipients(*, slack: bool) -> list[str]:
    """Return the mail addresses of people, or those of Slack channels; ConfigError for none."""
    text = os.environ.get(NOTIFY, "")
    found = []
    for entry in filter(None, map(str.strip, text.split(","))):
        address = entry.removeprefix(_SLACK)
        name, _, host = address.partition("@")
        if not (name and host):
            raise errors.ConfigError(
                f"{NOTIFY}={text!r}: {address!r} is no e-mail address; separate several by commas, "
                f"and write {_SLACK}ADDRESS for a Slack channel's"
            )
        if (entry != address) == slack:
            found.append(address)
    return found


# Machines.


def machine_pod(container: str, profile: Profile) -> V1PodSpec:
    """Return the pod of a whole machine, say a Ray worker; `container` is its only one."""
    gpus = {profile.resource: str(profile.gpus)} if profile.gpus else {}
    return _pod(container, profile, profile.cpus, profile.memory_gib, gpus)


def _pod(
    container: str, profile: Profile, cpus: int, memory_gib: int, gpus: dict[str, str]
) -> V1PodSpec:
    from kubernetes import client  # 800 modules

    amounts = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"} | gpus
    # Ray's object store and torch's queues need more than the usual 64 MB.
    size = f"{profile.shared_memory_gib}Gi"
    memory = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=size)
    variables = [client.V1EnvVar(name=k, value=v) for k, v in profile.variables.items()]
    main = client.V1Container(
        name=container,
        resources=client.V1ResourceRequirements(requests=amounts, limits=amounts),
        env=variables or None,
        volume_mounts=[client.V1VolumeMount(name="shm", mount_path="/dev/shm")],
    )
    taints = [
        client.V1Toleration(key=resource, operator="Exists", effect="NoSchedule")
        for resource in gpus
    ]
    return client.V1PodSpec(
        containers=[main],
        node_selector=dict(profile.node_labels) or None,
        tolerations=taints or None,
        volumes=[client.V1Volume(name="shm", empty_dir=memory)],
    )


def ray_job(
    plugin: Any, pod: Callable[[str, Callable[[], V1PodSpec]], Any], profile: Profile
) -> dict[str, Any]:
    """Return the options of a plugin's RayJobConfig, of a cluster whose head schedules nothing.

    A pre-empted spot machine is replaced by the autoscaler, or the run continues with fewer.
    plugin: flytekit's or Flyte 2's module for Ray. pod: makes its template of a pod, of the name of
    the container and what builds the specification.
    """
    head, worker = "ray-head", "ray-worker"
    # Cores, GiB, and no GPU, whose machines' taint it does not tolerate.
    head_pod = partial(_pod, head, LAPTOP, 1, 4, {})
    return {
        "head_node_config": plugin.HeadNodeConfig(
            ray_start_params={"num-cpus": "0"}, pod_template=pod(head, head_pod)
        ),
        "worker_node_config": [
            plugin.WorkerNodeConfig(
                group_name="workers",
                replicas=profile.replicas.start,
                min_replicas=profile.replicas.fewest,
                max_replicas=profile.replicas.most,
                pod_template=pod(worker, partial(machine_pod, worker, profile)),
            )
        ],
        "enable_autoscaling": True,
        "shutdown_after_job_finishes": True,
        "ttl_seconds_after_finished": 600,
    }
