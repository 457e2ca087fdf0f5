"""Resource profiles: what each asks of Kubernetes and Ray, and what it means for the engine."""

from __future__ import annotations

from typing import Any

import pytest
from flyteidl.plugins.ray_pb2 import RayJob
from google.protobuf.json_format import MessageToDict, ParseDict
from protobufs import IMAGE, Registered

from engine.config import ParallelConfig
from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.trainers.auto_placement import fixed_settings
from engine.trainers.layouts import check_layouts
from engine.trainers.rl_checks import check_config
from tasks.content_pinning import pin_named_content
from tasks.inputs import RLHFConfig
from tasks.placement import apply_profile
from tasks.profiles import PROFILES, ProfileName, head_pod, stage_pod, worker_pod

WITH_GPUS = [name for name, profile in PROFILES.items() if profile.gpus]
GPU = {"one-gpu": "nvidia.com/gpu", "8xA100": "nvidia.com/gpu", "2x8xH100": "nvidia.com/gpu"}
GPU["mi300x"] = "amd.com/gpu"


def settings(**rl: Any) -> RLHFConfig:
    """As a plan has them."""
    return pin_named_content(RLHFConfig.model_validate({"rl": rl}))


def ray_job(registered: Registered, profile: str) -> RayJob:
    custom = registered.task(f"rl_{PROFILES[profile].identifier}").custom
    return ParseDict(MessageToDict(custom), RayJob())


def pod_of(group: Any) -> dict[str, Any]:
    pod: dict[str, Any] = MessageToDict(group.k8s_pod.pod_spec)
    return pod


def only_container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for c in pod["containers"] if c["name"] == name]
    assert isinstance(found, dict)
    return found


def test_every_name_has_a_profile() -> None:
    assert set(PROFILES) == {name.value for name in ProfileName}
    assert list(PROFILES) == ["laptop", "one-gpu", "8xA100", "2x8xH100", "mi300x"]


@pytest.mark.parametrize(
    ("profile", "replicas", "gpus"),
    [
        ("laptop", (1, 1, 2), 0),
        ("one-gpu", (1, 1, 1), 1),
        ("8xA100", (1, 1, 2), 8),
        ("2x8xH100", (1, 2, 2), 8),
        ("mi300x", (1, 1, 2), 8),
    ],
)
def test_the_registered_ray_job_is_the_profile(
    registered: Registered, profile: str, replicas: tuple[int, int, int], gpus: int
) -> None:
    job = ray_job(registered, profile)
    assert job.shutdown_after_job_finishes
    assert job.ttl_seconds_after_finished == 600
    assert job.ray_cluster.enable_autoscaling
    (workers,) = job.ray_cluster.worker_group_spec
    assert (workers.min_replicas, workers.replicas, workers.max_replicas) == replicas
    worker = only_container(pod_of(workers), "ray-worker")["resources"]
    assert worker["requests"] == worker["limits"]
    asked = {k: int(v) for k, v in worker["limits"].items() if "gpu" in k}
    assert asked == ({GPU[profile]: gpus} if gpus else {})


@pytest.mark.parametrize("profile", list(PROFILES))
def test_heads_have_no_gpu_and_schedule_nothing(registered: Registered, profile: str) -> None:
    head = ray_job(registered, profile).ray_cluster.head_group_spec
    assert dict(head.ray_start_params) == {"num-cpus": "0"}
    resources = only_container(pod_of(head), "ray-head")["resources"]
    assert set(resources["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize("profile", list(PROFILES))
def test_ray_pods_have_shared_memory(registered: Registered, profile: str) -> None:
    cluster = ray_job(registered, profile).ray_cluster
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
    assert size < PROFILES[profile].memory_gib  # it counts as the container's memory


@pytest.mark.parametrize(
    ("profile", "label", "product"),
    [
        ("8xA100", "nvidia.com/gpu.product", "A100"),
        ("2x8xH100", "nvidia.com/gpu.product", "H100"),
        ("mi300x", "amd.com/gpu.device-id", "74a1"),
    ],
)
def test_gpus_are_selected_and_tolerated(
    registered: Registered, profile: str, label: str, product: str
) -> None:
    pod = pod_of(ray_job(registered, profile).ray_cluster.worker_group_spec[0])
    assert product in pod["nodeSelector"][label]
    tolerated = {t["key"]: (t["operator"], t["effect"]) for t in pod["tolerations"]}
    assert tolerated == {GPU[profile]: ("Exists", "NoSchedule")}


def test_collectives_find_their_network(registered: Registered) -> None:
    def variables(profile: str) -> dict[str, str]:
        pod = pod_of(ray_job(registered, profile).ray_cluster.worker_group_spec[0])
        listed = only_container(pod, "ray-worker").get("env", [])
        return {entry["name"]: entry["value"] for entry in listed}

    assert variables("laptop") == {}
    assert variables("8xA100")["NCCL_P2P_LEVEL"] == "NVL"
    assert variables("2x8xH100")["NCCL_SOCKET_IFNAME"] == "eth0"  # between two nodes
    assert variables("mi300x")["NCCL_MIN_NCHANNELS"] == "112"  # RCCL


@pytest.mark.parametrize("profile", WITH_GPUS)
@pytest.mark.parametrize("stage", ["sft", "evaluate", "promote"])
def test_stages_without_ray_get_one_gpu_and_its_share(
    registered: Registered, stage: str, profile: str
) -> None:
    whole = PROFILES[profile]
    template = registered.task(f"{stage}_{whole.identifier}")
    pod = MessageToDict(template.k8s_pod.pod_spec)
    container = only_container(pod, "primary")
    assert container["image"] == IMAGE
    assert container["resources"]["limits"] == {
        "cpu": str(whole.cpus // whole.gpus),
        "memory": f"{whole.memory_gib // whole.gpus}Gi",
        whole.gpu_resource: "1",
    }
    assert container["args"][0] == "pyflyte-execute"
    assert f"{stage}_{whole.identifier}" in container["args"]
    assert pod["nodeSelector"] == dict(whole.node_labels)


def test_an_image_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.images import TEMPLATE, image

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


@pytest.mark.parametrize("stage", ["sft", "rl", "evaluate"])
def test_the_input_picks_the_branch(registered: Registered, stage: str) -> None:
    (node,) = [n for n in registered.workflow("rlhf").nodes if n.metadata.name == stage]
    block = node.branch_node.if_else
    picked = {
        case.condition.comparison.right_value.primitive.string_value: (
            case.then_node.task_node.reference_id.name
        )
        for case in (block.case, *block.other)
    }
    assert picked == {
        name: f"tasks.{stage}.{stage}_{profile.identifier}" for name, profile in PROFILES.items()
    }
    assert "profile is none of laptop" in block.error.message
    profile = registered.workflow("rlhf").interface.inputs.variables["profile"]
    assert list(profile.type.enum_type.values) == list(PROFILES)


@pytest.mark.parametrize("profile", WITH_GPUS)
def test_a_layout_fits_its_machines(profile: str) -> None:
    fitted = apply_profile(settings(), profile)
    layout = Layout.of(fitted.rl.actor.parallel)
    assert layout.world_size == PROFILES[profile].world
    assert fitted.rl.actor.parallel.compute_dtype == "bfloat16"
    check_config(fitted.rl)  # its pools place each role once
    check_layouts(fitted.rl, fitted.model.lora)
    policy, beside = fitted.rl.trainer.pools
    assert policy.roles == ("actor", "rollout", "reference")
    assert policy.gpus == 1
    assert (beside.roles, beside.gpus) == (("reward",), 0)
    # All of it fits one machine's cores.
    whole = PROFILES[profile]
    assert policy.cpus * whole.gpus + beside.cpus <= whole.cpus


def test_two_nodes_shard_inside_and_copy_between() -> None:
    parallel = apply_profile(settings(), "2x8xH100").rl.actor.parallel
    assert (parallel.dp, parallel.fsdp) == (2, 8)


def test_a_critic_is_placed_with_the_policy() -> None:
    ppo = settings(algorithm={"adv_estimator": "gae"}, rollout={"n": 1})
    fitted = apply_profile(ppo, "8xA100")
    check_config(fitted.rl)
    assert fitted.rl.trainer.pools[0].roles == ("actor", "rollout", "reference", "critic")


def test_without_gpus_nothing_is_filled_in() -> None:
    assert apply_profile(settings(), "laptop") == settings()


def test_what_the_settings_say_stays() -> None:
    own = settings(
        actor={"parallel": {"fsdp": 4, "tp": 2}},
        trainer={"pools": [{"roles": ["actor", "rollout", "reference"]}, {"roles": ["reward"]}]},
    )
    assert apply_profile(own, "8xA100") == own


def test_rollout_apart_keeps_its_own_placement(capsys: pytest.CaptureFixture[str]) -> None:
    apart = settings(trainer={"mode": "one_step_off"})
    assert apply_profile(apart, "8xA100") == apart
    assert "rl.trainer.mode=one_step_off" in capsys.readouterr().out


@pytest.mark.parametrize("profile", WITH_GPUS)
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_the_planner_finds_layout_and_pools_open(
    profile: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = settings(trainer={"placement": "auto", "mode": mode})
    fitted = apply_profile(auto, profile)
    assert fitted.rl.actor.parallel == ParallelConfig(compute_dtype="bfloat16")
    assert fitted.rl.trainer == auto.rl.trainer
    pins = fixed_settings(fitted.rl)
    assert pins.axes == {}
    assert pins == fixed_settings(auto.rl)
    assert "chosen at each start" in capsys.readouterr().out


def test_the_planner_keeps_what_the_settings_say() -> None:
    own = settings(
        actor={"parallel": {"tp": 2, "compute_dtype": "float32"}}, trainer={"placement": "auto"}
    )
    assert apply_profile(own, "8xA100") == own
    assert fixed_settings(apply_profile(own, "8xA100").rl).axes == {"tp": 2}


def test_a_layout_that_is_too_large() -> None:
    with pytest.raises(ConfigError, match=r"32 ranks, but profile=8xA100 has at most 16 GPUs"):
        apply_profile(settings(actor={"parallel": {"fsdp": 32}}), "8xA100")


def test_gpus_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"placement=local with profile=one-gpu"):
        apply_profile(settings(trainer={"placement": "local"}), "one-gpu")


def test_pods_without_gpus_are_plain() -> None:
    laptop = PROFILES["laptop"]
    assert stage_pod(laptop) is None
    assert worker_pod(laptop, "ray-worker").pod_spec.node_selector is None
    assert head_pod("ray-head").pod_spec.tolerations is None
    assert PROFILES["laptop"].parallel == ParallelConfig()
