"""Launch plans, profiles and shipped configurations."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flyte_runs import REPOSITORY, STAGES, Outcome, Place
from flyteidl.admin.launch_plan_pb2 import CONCURRENCY_LIMIT_BEHAVIOR_SKIP
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.execution_pb2 import WorkflowExecution
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.plugins.ray_pb2 import RayJob
from flytekit import CronSchedule, LaunchPlan
from flytekit.core.context_manager import FlyteContextManager, FlyteEntities
from flytekit.core.type_engine import TypeEngine
from google.protobuf.json_format import MessageToDict, ParseDict
from mlflow import MlflowClient
from protobufs import IMAGE, Registered, any_inputs, as_on

from engine.config import PipelineConfig, digest, load_config
from engine.errors import ConfigError
from engine.stages.plan import pin_named_content
from engine.stages.pods import NOTIFY
from engine.stages.profiles import LAPTOP, PROFILES, Profile, read_profile
from engine.trainers.run_plan import check_config
from tasks.inputs import RLHFConfig
from tasks.stages import evaluate, promote, rl, sft
from tasks.variants import ray_cluster, stage_pod
from workflows import launch_plans
from workflows.launching import LAUNCH_PLANS, Launch, launch_plan, settings
from workflows.rlhf import rlhf

FILE = str(REPOSITORY / "workflows" / "launch_plans.py")


ON_PREFERENCES = ("preference_full", "reward_model_full", "classic_rlhf_full")


OF_AGENTS = {
    "agents_guessing": "guessing",
    "agents_calculator": "products",
    "agents_python": "python_tasks",
}


OURS = (
    "rlhf_smoke",
    "rlhf_full",
    *OF_AGENTS,
    *ON_PREFERENCES,
    "nightly_retraining",
    "evaluate_only",
    "promote",
    "rollback",
)


WORKFLOW = {
    "rlhf_smoke": "workflows.rlhf.rlhf",
    "rlhf_full": "workflows.rlhf.rlhf",
    "evaluate_only": "workflows.evaluate_only.evaluate_only",
    "promote": "workflows.promote_only.promote_only",
    "nightly_retraining": "workflows.retraining.retraining",
    "rollback": "workflows.rollback.rollback",
    **dict.fromkeys(OF_AGENTS, "workflows.agents.agents"),
    **{name: f"workflows.preference.{name.removesuffix('_full')}" for name in ON_PREFERENCES},
}


def native(literal: Any, kind: type) -> Any:
    """A registered literal as the Python value that a task would get."""
    from flytekit.models.literals import Literal

    context = FlyteContextManager.current_context()
    return TypeEngine.to_python_value(context, Literal.from_flyte_idl(literal), kind)


needs_plans = pytest.mark.usefixtures("without_drawings")


@needs_plans
def test_all_are_registered(registered: Registered) -> None:
    assert set(OURS) <= set(LAUNCH_PLANS)
    for name, workflow in WORKFLOW.items():
        assert registered.launch_plan(name).workflow_id.name == workflow


@needs_plans
@pytest.mark.parametrize("name", OURS)
def test_all_are_labelled_and_only_what_promotes_runs_one_at_a_time(
    registered: Registered, name: str
) -> None:
    spec = registered.launch_plan(name)
    assert spec.HasField("concurrency_policy") is (name in ("promote", "nightly_retraining"))
    if spec.HasField("concurrency_policy"):
        assert spec.concurrency_policy.max == 1
        assert spec.concurrency_policy.behavior == CONCURRENCY_LIMIT_BEHAVIOR_SKIP
    assert spec.max_parallelism == 8
    assert dict(spec.labels.values) == {"app": "hybridflyte", "launch-plan": name}


@needs_plans
def test_the_smoke_run_fixes_what_it_is(registered: Registered) -> None:
    spec = registered.launch_plan("rlhf_smoke")
    fixed = {k: native(v, str) for k, v in spec.fixed_inputs.literals.items()}
    assert fixed == {"source": "arithmetic", "path": "", "model": "", "profile": "laptop"}
    assert set(spec.default_inputs.parameters) == {"config", "seed"}
    config = native(spec.default_inputs.parameters["config"].default, RLHFConfig)
    assert config == settings("smoke")
    assert config.promote.model_name != settings("full").promote.model_name
    assert native(spec.default_inputs.parameters["seed"].default, int) == 0


@needs_plans
@pytest.mark.parametrize("name", ["rlhf_full", *ON_PREFERENCES])
def test_the_full_run_can_be_changed_but_for_its_source(registered: Registered, name: str) -> None:
    spec = registered.launch_plan(name)
    assert list(spec.fixed_inputs.literals) == ["source"]
    defaults = spec.default_inputs.parameters
    free = {"config", "path", "model", "seed", "profile"}
    assert set(defaults) == free | ({"preferences"} if name in ON_PREFERENCES else set())
    assert native(defaults["profile"].default, str) == "8xA100"
    assert native(defaults["path"].default, str) == "openai/gsm8k"
    assert not any(parameter.required for parameter in defaults.values())


@needs_plans
@pytest.mark.parametrize(("name", "source"), OF_AGENTS.items())
def test_a_plan_of_agents_is_a_recipe(registered: Registered, name: str, source: str) -> None:
    spec = registered.launch_plan(name)
    assert native(spec.fixed_inputs.literals["source"], str) == source
    config = native(spec.default_inputs.parameters["config"].default, RLHFConfig)
    assert config == settings(f"{name.removeprefix('agents_')}_agent")
    assert config.data.source == source
    assert config.rl.rollout.multi_turn.enable


@needs_plans
def test_promotion_needs_its_artifacts(registered: Registered) -> None:
    parameters = registered.launch_plan("promote").default_inputs.parameters
    required = {name for name, parameter in parameters.items() if parameter.required}
    assert required == {"dataset", "policy", "evaluation"}


@needs_plans
def test_a_night_starts_at_two_and_knows_when_it_is(registered: Registered) -> None:
    spec = registered.launch_plan("nightly_retraining")
    schedule = spec.entity_metadata.schedule
    assert schedule.cron_schedule.schedule == "0 2 * * *"
    assert schedule.kickoff_time_input_arg == "kickoff"
    # The scheduler gives nothing but the kick-off.
    required = {n for n, p in spec.default_inputs.parameters.items() if p.required}
    assert required == {"kickoff"}
    config = native(spec.default_inputs.parameters["config"].default, RLHFConfig)
    assert config.retrain.path.startswith("s3://")


@needs_plans
def test_a_rollback_needs_a_reason(registered: Registered) -> None:
    parameters = registered.launch_plan("rollback").default_inputs.parameters
    assert {name for name, parameter in parameters.items() if parameter.required} == {"reason"}


@pytest.fixture
def made() -> Iterator[Callable[..., Launch]]:
    """Make launch plans that are forgotten after the test."""
    names = []
    before = len(FlyteEntities.entities)

    def make(name: str, **options: Any) -> Launch:
        names.append(name)
        return launch_plan(rlhf, name, **options)

    yield make
    del FlyteEntities.entities[before:]
    for name in names:
        LaunchPlan.CACHE.pop(name, None)
        LAUNCH_PLANS.pop(name, None)


def specification(launch: Launch) -> Any:
    from collections import OrderedDict

    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    image = Image.look_up_image_info("default", "x:1")
    config = SerializationSettings(
        project="p", domain="d", version="v", image_config=ImageConfig(image, [image])
    )
    return get_serializable(OrderedDict(), config, launch).to_flyte_idl().spec


@needs_plans
def test_a_schedule_and_those_who_are_told(
    made: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTIFY, "night@example.com, day@example.com")
    nightly = made(
        "nightly",
        schedule=CronSchedule(schedule="0 2 * * *"),
        notify_on=launch_plans.TERMINAL_PHASES,
    )
    spec = specification(nightly)
    assert spec.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    (notification,) = spec.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["night@example.com", "day@example.com"]
    assert set(notification.phases) == {
        WorkflowExecution.FAILED,
        WorkflowExecution.ABORTED,
        WorkflowExecution.TIMED_OUT,
        WorkflowExecution.SUCCEEDED,
    }
    assert spec.labels.values["launch-plan"] == "nightly"
    assert LAUNCH_PLANS["nightly"] is nightly


@needs_plans
def test_nobody_is_told_unless_asked(made: Callable[..., Launch]) -> None:
    assert not specification(made("quiet")).entity_metadata.notifications


@needs_plans
def test_a_slack_channel_is_told_as_well(
    made: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTIFY, "night@example.com,slack:runs@example.slack.com")
    mail, slack = specification(made("channel")).entity_metadata.notifications
    assert list(mail.email.recipients_email) == ["night@example.com"]
    assert list(slack.slack.recipients_email) == ["runs@example.slack.com"]
    assert WorkflowExecution.FAILED in slack.phases


@needs_plans
def test_what_is_no_address(made: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTIFY, "a@example.com;b")
    assert made("semicolon")  # one address, odd as it is
    monkeypatch.setenv(NOTIFY, "team")
    with pytest.raises(ConfigError, match="'team' is no e-mail address"):
        made("nameless")


@needs_plans
def test_a_fixed_input_can_not_be_given() -> None:
    with pytest.raises(ConfigError, match=r"rlhf_smoke fixes profile=.*leave it out"):
        launch_plans.rlhf_smoke(profile="one-gpu")


@needs_plans
def test_the_command_line_offers_what_is_left_to_choose(place: Place) -> None:
    outcome = place.invoke("run", FILE, "rlhf_smoke", "--source", "gsm8k")
    assert outcome.code == 2
    assert "no such option" in outcome.text.lower()
    shown = place.invoke("run", FILE, "rlhf_full", "--help").out
    assert "Qwen/Qwen2.5-1.5B-Instruct" in shown
    assert "--profile" in shown


@needs_plans
def test_click_warns_of_no_flag_that_is_there_twice(place: Place) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", "The parameter", UserWarning)
        shown = place.invoke("run", FILE, "rollback", "--help").out
    assert "--forced" in shown
    assert [str(warning.message) for warning in warned] == []


def in_this_process(seed: int = 0, source: str = "arithmetic") -> RLHFConfig:
    """The settings of the smoke run without Ray, which takes longer to start than all the rest."""
    values = settings("smoke").model_dump()
    values["rl"]["trainer"]["placement"] = "local"
    values["data"]["source"], values["seed"] = source, seed
    return RLHFConfig.model_validate(values)


@pytest.fixture(scope="module")
def smoke(new_place: Callable[[], Place]) -> tuple[Place, Outcome]:
    """`rlhf_smoke` run here, with settings that say otherwise than the launch plan."""
    place, config = new_place(), in_this_process(seed=5, source="gsm8k")
    return place, place.invoke("run", FILE, "rlhf_smoke", "--config", config.model_dump_json())


@needs_plans
def test_a_local_run_has_the_launch_plan_s_inputs(smoke: tuple[Place, Outcome]) -> None:
    _, outcome = smoke
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)
    summary = outcome.summary
    # Its source, which is fixed, and its seed, which is a default, won over the settings'.
    assert summary["config_digest"] == digest(pin_named_content(in_this_process()))
    assert summary["mlflow"]["experiment"] == "hybridflyte-smoke"
    assert summary["promotion"]["model_name"] == "hybridflyte-smoke"


@needs_plans
def test_without_settings_it_has_its_own() -> None:
    free = launch_plans.rlhf_smoke.python_interface.inputs_with_defaults
    assert {name: default for name, (_, default) in free.items()} == {
        "config": settings("smoke"),
        "seed": 0,
    }


def artifact(outcome: Outcome, stage: str) -> str:
    return str(outcome.summary["artifacts"][stage])


def run_evaluate_only(place: Place, baseline: str, candidate: str) -> Outcome:
    return place.invoke(
        *("run", FILE, "evaluate_only"),
        *("--config", in_this_process().model_dump_json(), "--profile", "laptop"),
        *("--source", "arithmetic", "--path", "", "--model", ""),
        *("--baseline", baseline, "--candidate", candidate),
    )


@needs_plans
def test_evaluation_alone_asks_the_same_problems(smoke: tuple[Place, Outcome]) -> None:
    place, first = smoke
    outcome = run_evaluate_only(place, artifact(first, "sft"), "models:/hybridflyte-smoke@champion")
    assert outcome.code == 0, outcome.text
    # The same two models on the same problems: the evaluation of the run itself.
    assert outcome.stages == []
    assert artifact(first, "evaluation") in outcome.out
    runs = MlflowClient(place.tracking_uri, place.tracking_uri)
    experiment = runs.get_experiment_by_name("hybridflyte-smoke")
    assert experiment is not None
    (run,) = [
        run
        for run in runs.search_runs([experiment.experiment_id])
        if run.info.run_name.startswith("evaluate_only-")
    ]
    assert run.info.status == "FINISHED"
    assert "gain" in run.data.metrics


@needs_plans
def test_a_model_without_a_manifest_can_be_evaluated(
    smoke: tuple[Place, Outcome], tmp_path: Path
) -> None:
    import shutil

    place, first = smoke
    model = tmp_path / "model"
    ignored = shutil.ignore_patterns("manifest.json", "metrics.parquet")
    shutil.copytree(artifact(first, "rl"), model, ignore=ignored)
    outcome = run_evaluate_only(place, artifact(first, "sft"), str(model))
    assert outcome.code == 0, outcome.text
    assert outcome.stages == ["evaluation"]


@needs_plans
def test_an_unknown_model_ends_in_a_sentence(smoke: tuple[Place, Outcome]) -> None:
    place, first = smoke
    outcome = run_evaluate_only(place, artifact(first, "sft"), "models:/hybridflyte-smoke@nobody")
    assert outcome.code == 1
    assert "has no models:/hybridflyte-smoke@nobody" in outcome.error
    missing = run_evaluate_only(place, artifact(first, "sft"), "/nowhere/model")
    assert "candidate='/nowhere/model' does not exist" in missing.error


def run_promote(place: Place, dataset: str, policy: str, evaluation: str) -> Outcome:
    return place.invoke(
        *("run", FILE, "promote"),
        *("--config", in_this_process().model_dump_json()),
        *("--dataset", dataset, "--policy", policy, "--evaluation", evaluation),
    )


@needs_plans
def test_promotion_alone_changes_nothing_the_second_time(smoke: tuple[Place, Outcome]) -> None:
    place, first = smoke
    stages = [artifact(first, stage) for stage in ("dataset", "rl", "evaluation")]
    outcome = run_promote(place, *stages)
    assert outcome.code == 0, outcome.text
    assert outcome.stages == ["promotion"]
    assert "is the champion already" in outcome.out


@needs_plans
def test_evidence_of_another_model_promotes_nothing(smoke: tuple[Place, Outcome]) -> None:
    place, first = smoke
    stages = [artifact(first, stage) for stage in ("dataset", "sft", "evaluation")]
    outcome = run_promote(place, *stages)
    assert outcome.code == 1
    assert outcome.stages == []
    assert "the evaluation" in outcome.error
    assert "give the artifacts of one run" in outcome.error


@needs_plans
def test_a_first_champion_can_t_be_rolled_back(smoke: tuple[Place, Outcome]) -> None:
    place, first = smoke
    name = str(first.summary["promotion"]["model_name"])
    command = ("run", FILE, "rollback", "--model_name", name, "--reason", "wrong in use")
    outcome = place.invoke(*command)
    assert outcome.code == 1
    assert "is the first champion" in outcome.error
    unreasoned = place.invoke("run", FILE, "rollback", "--model_name", name)
    assert unreasoned.code == 2
    assert "launch plan rollback needs --reason" in unreasoned.text


@needs_plans
def test_rolled_back_is_the_champion_before(smoke: tuple[Place, Outcome]) -> None:
    from engine.promotion.champions import Champions
    from engine.tracking import Tracker

    place, first = smoke
    tracker = Tracker(place.tracking_uri)
    run = tracker.start_pipeline("two models")
    champions = Champions(tracker, "taken-back")
    versions = [
        tracker.register_model(artifact(first, stage), "taken-back", run) for stage in ("sft", "rl")
    ]
    for before, version in zip((None, versions[0]), versions, strict=True):
        champions.promote(version, before, "better", request=version)
    outcome = place.invoke(
        *("run", FILE, "rollback", "--model_name", "taken-back", "--reason", "wrong in use")
    )
    assert outcome.code == 0, outcome.text
    move = champions.history()[-1]
    assert (move.version, move.replaced, move.reason) == (*versions, "wrong in use")


SHIPPED = sorted((REPOSITORY / "engine" / "config" / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_valid(path: Path) -> None:
    config = load_config(path)
    check_config(config.rl)
    assert config != PipelineConfig()


def test_the_named_ones_are_shipped() -> None:
    assert {"gsm8k_smoke", "ppo"} <= {path.stem for path in SHIPPED}


WITH_GPUS = [name for name, profile in PROFILES.items() if profile.gpus]


GPU = {"one-gpu": "nvidia.com/gpu", "8xA100": "nvidia.com/gpu", "2x8xH100": "nvidia.com/gpu"}


GPU["mi300x"] = "amd.com/gpu"


STAGE_TASKS = {"sft": sft, "rl": rl, "evaluate": evaluate, "promote": promote}


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
    template = as_on(STAGE_TASKS[stage], whole, tmp_path)
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
    cluster = ray_cluster(LAPTOP)
    assert cluster.worker_node_config[0].pod_template.pod_spec.node_selector is None
    assert cluster.head_node_config.pod_template.pod_spec.tolerations is None
