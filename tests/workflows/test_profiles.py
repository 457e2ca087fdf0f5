"""Resource profiles: what the stages ask of Kubernetes and Ray, as an execution has it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import Place
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.plugins.ray_pb2 import RayJob
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from google.protobuf.json_format import MessageToDict, ParseDict
from protobufs import IMAGE, Registered, any_inputs, as_on

from engine.stages.profiles import LAPTOP, PROFILES, Profile, read_profile
from tasks.stages import evaluate, promote, rl, sft
from tasks.variants import head_pod, stage_pod, worker_pod

WITH_GPUS = [name for name, profile in PROFILES.items() if profile.gpus]
GPU = {"one-gpu": "nvidia.com/gpu", "8xA100": "nvidia.com/gpu", "2x8xH100": "nvidia.com/gpu"}
GPU["mi300x"] = "amd.com/gpu"
STAGES = {"sft": sft, "rl": rl, "evaluate": evaluate, "promote": promote}
OWN = """
cpus: 64
memory_gib: 500
gpus: 4
accelerator: L40S
node_labels: {gpu: l40s}
replicas: {fewest: 2, start: 3, most: 4}
"""
SEVERAL_GPUS = [*(name for name in WITH_GPUS if name != "one-gpu"), OWN]


def ray_job(profile: Profile, folder: Path, stage: Any = rl) -> RayJob:
    return ParseDict(MessageToDict(as_on(stage, profile, folder).custom), RayJob())


def pod_of(group: Any) -> dict[str, Any]:
    pod: dict[str, Any] = MessageToDict(group.k8s_pod.pod_spec)
    return pod


def only_container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in pod["containers"] if c["name"] == name]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("profile", "replicas", "gpus"),
    [
        ("laptop", (1, 1, 2), 0),
        ("one-gpu", (1, 1, 1), 1),
        ("8xA100", (1, 1, 2), 8),
        ("2x8xH100", (1, 2, 2), 8),
        ("mi300x", (1, 1, 2), 8),
        (OWN, (2, 3, 4), 4),
    ],
)
def test_the_ray_job_is_the_profile(
    tmp_path: Path, profile: str, replicas: tuple[int, int, int], gpus: int
) -> None:
    job = ray_job(read_profile(profile), tmp_path)
    assert job.shutdown_after_job_finishes
    assert job.ttl_seconds_after_finished == 600
    assert job.ray_cluster.enable_autoscaling
    (workers,) = job.ray_cluster.worker_group_spec
    assert (workers.min_replicas, workers.replicas, workers.max_replicas) == replicas
    worker = only_container(pod_of(workers), "ray-worker")["resources"]
    assert worker["requests"] == worker["limits"]
    asked = {k: int(v) for k, v in worker["limits"].items() if "gpu" in k}
    assert asked == ({GPU.get(profile, "nvidia.com/gpu"): gpus} if gpus else {})


@pytest.mark.parametrize("profile", list(PROFILES))
def test_heads_have_no_gpu_and_schedule_nothing(tmp_path: Path, profile: str) -> None:
    head = ray_job(PROFILES[profile], tmp_path).ray_cluster.head_group_spec
    assert dict(head.ray_start_params) == {"num-cpus": "0"}
    resources = only_container(pod_of(head), "ray-head")["resources"]
    assert set(resources["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize("profile", list(PROFILES))
def test_ray_pods_have_shared_memory(tmp_path: Path, profile: str) -> None:
    cluster = ray_job(PROFILES[profile], tmp_path).ray_cluster
    for group, name in (
        (cluster.head_group_spec, "ray-head"),
        (cluster.worker_group_spec[0], "ray-worker"),
    ):
        pod = pod_of(group)
        (volume,) = pod["volumes"]
        assert volume["emptyDir"]["medium"] == "Memory"
        mounts = only_container(pod, name)["volumeMounts"]
        assert {"name": volume["name"], "mountPath": "/dev/shm"} in mounts
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    assert size == PROFILES[profile].shared_memory_gib


@pytest.mark.parametrize(
    ("profile", "label", "product"),
    [
        ("8xA100", "nvidia.com/gpu.product", "A100"),
        ("2x8xH100", "nvidia.com/gpu.product", "H100"),
        ("mi300x", "amd.com/gpu.device-id", "74a1"),
        (OWN, "gpu", "l40s"),
    ],
)
def test_gpus_are_selected_and_tolerated(
    tmp_path: Path, profile: str, label: str, product: str
) -> None:
    job = ray_job(read_profile(profile), tmp_path)
    pod = pod_of(job.ray_cluster.worker_group_spec[0])
    assert product in pod["nodeSelector"][label]
    tolerated = {t["key"]: (t["operator"], t["effect"]) for t in pod["tolerations"]}
    assert tolerated == {GPU.get(profile, "nvidia.com/gpu"): ("Exists", "NoSchedule")}


def test_collectives_find_their_network(tmp_path: Path) -> None:
    def variables(profile: str) -> dict[str, str]:
        pod = pod_of(ray_job(PROFILES[profile], tmp_path).ray_cluster.worker_group_spec[0])
        listed = only_container(pod, "ray-worker").get("env", [])
        return {entry["name"]: entry["value"] for entry in listed}

    assert variables("laptop") == {}
    assert variables("8xA100")["NCCL_P2P_LEVEL"] == "NVL"
    assert variables("2x8xH100")["NCCL_SOCKET_IFNAME"] == "eth0"  # between two nodes
    assert variables("mi300x")["NCCL_MIN_NCHANNELS"] == "112"  # RCCL
    assert all(variables(name)["NCCL_DEBUG"] == "WARN" for name in WITH_GPUS)


@pytest.mark.parametrize("profile", SEVERAL_GPUS)
def test_the_warm_start_has_the_machines_of_rl(tmp_path: Path, profile: str) -> None:
    machines = read_profile(profile)
    assert ray_job(machines, tmp_path, sft) == ray_job(machines, tmp_path)


@pytest.mark.parametrize(
    ("stage", "profile"),
    [("sft", "one-gpu"), *itertools.product(("evaluate", "promote"), (*WITH_GPUS, OWN))],
)
def test_stages_without_a_ray_cluster_get_a_machine(
    tmp_path: Path, stage: str, profile: str
) -> None:
    whole = read_profile(profile)
    template = as_on(STAGES[stage], whole, tmp_path)
    pod = MessageToDict(template.k8s_pod.pod_spec)
    container = only_container(pod, "primary")
    assert container["image"] == IMAGE
    assert container["resources"]["limits"] == {
        "cpu": str(whole.cpus),
        "memory": f"{whole.memory_gib}Gi",
        whole.resource: str(whole.gpus),
    }
    assert container["args"][0] == "pyflyte-execute"
    assert f"{stage}_stage" in container["args"]
    assert pod["nodeSelector"] == whole.node_labels


def test_the_image_is_of_its_own_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.flytekit_setup import TEMPLATE, image

    for variable in ("HYBRIDFLYTE_IMAGE", "HYBRIDFLYTE_CUDA_IMAGE", "HYBRIDFLYTE_ROCM_IMAGE"):
        monkeypatch.delenv(variable, raising=False)
    assert image("cuda") == image("rocm") == image() == TEMPLATE
    monkeypatch.setenv("HYBRIDFLYTE_IMAGE", "cpu@sha256:1")
    monkeypatch.setenv("HYBRIDFLYTE_CUDA_IMAGE", "cuda@sha256:2")
    assert [image(k) for k in ("default", "cuda", "rocm")] == [
        "cpu@sha256:1",
        "cuda@sha256:2",
        "cpu@sha256:1",
    ]
    pod = MessageToDict(as_on(evaluate, PROFILES["8xA100"], tmp_path).k8s_pod.pod_spec)
    assert only_container(pod, "primary")["image"] == "cuda@sha256:2"
    assert as_on(sft, LAPTOP, tmp_path).container.image == "cpu@sha256:1"


def test_results_are_cached_by_profile(tmp_path: Path) -> None:
    machines = [LAPTOP, PROFILES["one-gpu"], read_profile("{base: one-gpu, cpus: 9}")]
    keys = [as_on(sft, one, tmp_path).metadata.discovery_version for one in machines]
    assert len(set(keys)) == 3
    assert as_on(sft, LAPTOP, tmp_path).metadata.discovery_version == keys[0]


@pytest.mark.parametrize("stage", ["sft", "rl", "evaluate"])
def test_the_graph_has_the_stage_that_reads_the_profile(registered: Registered, stage: str) -> None:
    (node,) = [n for n in registered.workflow("rlhf").nodes if n.metadata.name == stage]
    assert node.task_node.reference_id.name == f"tasks.stages.{stage}"
    (given,) = [binding for binding in node.inputs if binding.var == "profile"]
    profile = "sft_profile" if stage == "sft" else "profile"
    assert (given.binding.promise.node_id, given.binding.promise.var) == ("n0", profile)
    assert not registered.task(stage).metadata.discoverable, "the stage itself is cached"


@pytest.mark.slow
def test_the_container_writes_the_stage_of_its_input(
    place: Place, registered: Registered, tmp_path: Path
) -> None:
    """The registered command, with the inputs in a file as Flyte gives them."""
    values = {"profile": read_profile(OWN), **any_inputs(rl, tmp_path)}
    context = FlyteContextManager.current_context()
    literals = TypeEngine.dict_to_literal_map(context, values, rl.python_interface.inputs)
    (tmp_path / "inputs.pb").write_bytes(literals.to_flyte_idl().SerializeToString())
    container = registered.task("rl").container
    filled = {
        "{{.input}}": str(tmp_path / "inputs.pb"),
        "{{.outputPrefix}}": str(tmp_path / "out"),
        "{{.rawOutputDataPrefix}}": str(tmp_path / "raw"),
        "{{.checkpointOutputPrefix}}": str(tmp_path / "checkpoint"),
        "{{.prevCheckpointPrefix}}": '""',
    }
    variables = {pair.key: pair.value for pair in container.env}
    variables |= {"HYBRIDFLYTE_CUDA_IMAGE": "cuda@sha256:2", "FLYTE_INTERNAL_EXECUTION_ID": "f1"}
    variables |= {f"FLYTE_INTERNAL_TASK_{k}": "x" for k in ("PROJECT", "DOMAIN", "NAME", "VERSION")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "flytekit.bin.entrypoint"),
            *(filled.get(argument, argument) for argument in container.args),
        ],
        env=place.environment(variables) | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "futures.pb").exists(), done.stdout + done.stderr
    spec = DynamicJobSpec.FromString((tmp_path / "out" / "futures.pb").read_bytes())
    (template,) = spec.tasks
    assert isinstance(template, TaskTemplate)
    assert template.id.name == "tasks.stages.rl_stage"
    assert template.container.image == "cuda@sha256:2"
    job = ParseDict(MessageToDict(template.custom), RayJob())
    (workers,) = job.ray_cluster.worker_group_spec
    assert (workers.min_replicas, workers.replicas, workers.max_replicas) == (2, 3, 4)
    limits = only_container(pod_of(workers), "ray-worker")["resources"]["limits"]
    assert limits == {"cpu": "64", "memory": "500Gi", "nvidia.com/gpu": "4"}


def test_pods_without_gpus_are_plain() -> None:
    assert stage_pod(LAPTOP) is None
    assert worker_pod(LAPTOP, "ray-worker").pod_spec.node_selector is None
    assert head_pod("ray-head").pod_spec.tolerations is None
