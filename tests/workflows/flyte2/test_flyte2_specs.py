"""What would be deployed to Flyte 2: each stage's specification is that of flytekit 1."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flyte._internal.image_cache import ImageCache
from flyte._internal.resolvers.default import DefaultTaskResolver
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte._internal.runtime.trigger_serde import to_task_trigger
from flyte._internal.runtime.types_serde import transform_native_to_typed_interface
from flyte.models import SerializationContext
from flyteidl.core.tasks_pb2 import TaskTemplate as Template1
from flyteidl2.core.tasks_pb2 import TaskTemplate as Template2
from google.protobuf.json_format import MessageToDict
from protobufs import as_on

import tasks.stages
from engine.stages import pods
from engine.stages.profiles import LAPTOP, Profile, read_profile
from workflows import pipelines
from workflows.flyte2 import (
    agents,
    environments,
    evaluate_only,
    preference,
    retraining,
    rlhf,
    stages,
)
from workflows.flyte2.environments import DRIVER, MACHINES, task_on

REPOSITORY = Path(__file__).parents[3]
IMAGE = "registry.example/hf@sha256:1"
SECRETS = "MLFLOW_TRACKING_TOKEN=team/mlflow,HF_TOKEN=team/hub,WANDB_API_KEY=team/wandb"
OWN = "{cpus: 64, memory_gib: 500, gpus: 4, accelerator: L40S, environment: {NCCL_DEBUG: INFO}}"
ITS_OWN = ("FLYTE", "HYBRID")
ON_MACHINES = [name for name, options in pods.STAGES.items() if options.on_profile]
SMALL = ["plan", "trigger_retraining", "preprocess", "ingest", "fetch", "report", "finalize"]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pods.SECRETS, SECRETS)


def specification(stage: str, profile: Profile = LAPTOP) -> Template2:
    """What Flyte 2 gets of a stage on these machines."""
    images = ImageCache(image_lookup=dict.fromkeys((DRIVER.name, *of_kinds()), IMAGE))
    context = SerializationContext(version="v", root_dir=REPOSITORY, image_cache=images)
    return translate_task_to_wire(task_on(stages, stage, profile), context).task_template


def of_kinds() -> list[str]:
    return [environment.name for environment in MACHINES.values()]


def facts(template: Template1 | Template2) -> dict[str, Any]:
    """What both kinds of specification say in the same words."""
    meta, pod = template.metadata, MessageToDict(template.k8s_pod.pod_spec)
    container = template.container
    for one in pod.get("containers", ()):
        one.pop("args", None), one.pop("command", None)
        # flytekit adds variables of its own, and the profile, which its container is made by.
        one["env"] = [
            e for e in one.get("env", ()) if not e["name"].startswith(("FLYTE", "HYBRID"))
        ]
    return {
        "type": template.type.removeprefix("python-task").removeprefix("python"),
        "image": container.image,
        "requests": {(e.name, e.value) for e in container.resources.requests},
        "pod": pod,
        "ray": MessageToDict(template.custom).get("rayCluster"),
        "cached": (meta.discoverable, meta.cache_serializable, list(meta.cache_ignore_input_vars)),
        "retries": meta.retries.retries,
        "seconds": meta.timeout.seconds,
        "interruptible": meta.interruptible,
        "report": meta.generates_deck.value,
        "secrets": {
            s.env_var: (s.group, s.key, s.mount_requirement)
            for s in template.security_context.secrets
        },
    }


@pytest.mark.parametrize("profile", ["laptop", "one-gpu", "8xA100", "2x8xH100", "mi300x", OWN])
@pytest.mark.parametrize("stage", [name for name in ON_MACHINES if name != "evaluate_part"])
def test_a_stage_asks_for_the_same_machines(stage: str, profile: str, tmp_path: Path) -> None:
    machines = read_profile(profile)
    one = facts(as_on(getattr(tasks.stages, stage), machines, tmp_path))
    two = facts(specification(stage, machines))
    for found in (one, two):  # flytekit's image of a pod is its own test's subject
        for container in found["pod"].get("containers", ()):
            container.pop("image")
        found.pop("image")
    assert two == one


def test_small_stages_ask_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from flytekit.configuration import Image, ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    image = Image.look_up_image_info("default", "registry.example/hf:v")
    settings = SerializationSettings(ImageConfig(image, [image]), "p", "d", version="v")
    for stage in SMALL:
        registered: Any = get_serializable({}, settings, getattr(tasks.stages, stage))
        one, two = facts(registered.template.to_flyte_idl()), facts(specification(stage))
        for found in (one, two):
            # flytekit reads images and credentials when it is loaded.
            found.pop("image"), found.pop("secrets")
        assert two == one, stage


@pytest.mark.parametrize(
    ("stage", "variables"),
    [
        ("report", {"MLFLOW_TRACKING_TOKEN"}),
        ("preprocess", {"MLFLOW_TRACKING_TOKEN", "HF_TOKEN"}),
        ("rl", {"MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "WANDB_API_KEY"}),
    ],
)
def test_a_stage_gets_the_credentials_that_it_needs(stage: str, variables: set[str]) -> None:
    assert set(facts(specification(stage))["secrets"]) == variables


def test_a_pod_finds_its_task_and_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage, profile in (
        ("sft", "laptop"),
        ("sft", "8xA100"),
        ("sft", "mi300x"),
        ("plan", "laptop"),
    ):
        machines = read_profile(profile)
        template = specification(stage, machines)
        args = list(template.container.args)
        if template.HasField("k8s_pod"):
            args = MessageToDict(template.k8s_pod.pod_spec)["containers"][0]["args"]
        found = DefaultTaskResolver().load_task(args[args.index("mod") :])
        assert found.name == template.id.name
        kind = machines.image_kind
        assert found.parent_env_name == (
            DRIVER.name if stage == "plan" else f"{DRIVER.name}-{kind}"
        )
    assert DRIVER.depends_on == list(MACHINES.values())  # or their images would not be known
    monkeypatch.setenv("HYBRIDFLYTE_IMAGE", "cpu@sha256:1")
    monkeypatch.setenv("HYBRIDFLYTE_CUDA_IMAGE", "cuda@sha256:2")
    named = {kind: environments.image(kind).uri for kind in pods.IMAGES}
    assert named == {"default": "cpu@sha256:1", "cuda": "cuda@sha256:2", "rocm": "cpu@sha256:1"}


def version(stage: str, profile: str = "laptop") -> str:
    return specification(stage, read_profile(profile)).metadata.discovery_version


def test_a_changed_source_image_library_or_profile_never_hits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = version("sft")
    assert version("sft") == base
    keys = {base, version("sft", "one-gpu"), version("sft", "{base: one-gpu, cpus: 9}")}
    for name, other in (("sources_digest", "edited"), ("library_versions", "torch==9")):
        with monkeypatch.context() as patched:
            patched.setattr(f"workflows.flyte2.host.{name}", lambda other=other: other)
            keys.add(version("sft"))
    with monkeypatch.context() as patched:
        patched.setenv("HYBRIDFLYTE_IMAGE", "cpu@sha256:other")
        keys.add(version("sft"))
    with monkeypatch.context() as patched:
        (tmp_path / "stages.py").write_text("# other wrappers\n")
        patched.setattr("workflows.flyte2.host.__file__", str(tmp_path / "host.py"))
        keys.add(version("sft"))
    assert len(keys) == 7


def triggers(task: Any) -> dict[str, Any]:
    """Its triggers as Flyte 2 gets them, by name."""
    interface = transform_native_to_typed_interface(task.interface)
    made = [
        asyncio.run(to_task_trigger(one, task.name, interface.inputs, [])) for one in task.triggers
    ]
    return {trigger.name: trigger for trigger in made}


def test_launch_plans_are_triggers() -> None:
    found = {
        name
        for module in (rlhf, agents, preference, evaluate_only, retraining)
        for task in vars(module).values()
        if hasattr(task, "triggers")
        for name in triggers(task)
    }
    ours = {"retraining_on_arrival"}  # flytekit 1 has no artifacts to wait for
    import workflows.launch_plans  # noqa: F401
    from workflows.launching import LAUNCH_PLANS

    assert found - ours == set(LAUNCH_PLANS) - {"promote", "rollback"}


def test_a_night_starts_at_two_and_knows_when_it_is() -> None:
    spec = triggers(retraining.retraining)["nightly_retraining"]
    schedule = spec.automation_spec.schedule
    assert (schedule.cron.expression, schedule.cron.timezone) == ("0 2 * * *", "UTC")
    assert schedule.kickoff_time_input_arg == "kickoff"
    given = {one.name: one.value.scalar.primitive.string_value for one in spec.spec.inputs.literals}
    assert given["profile"] == "8xA100"
    from engine.config import load_config, parse_config
    from engine.config.text import read_settings

    assert parse_config(read_settings(given["config"])) == load_config("preset:nightly")


def test_published_data_start_a_run() -> None:
    spec = triggers(retraining.retraining_on_arrival)["retraining_on_arrival"]
    assert "hybridflyte-problems" in str(spec.automation_spec)
    assert "arrived" in str(spec)


def test_those_to_be_told_are_told_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    from workflows.flyte2 import entry

    assert entry.trigger("quiet").notifications is None
    monkeypatch.setenv(pods.NOTIFY, "me@example.com, slack:room@team.slack.com")
    (mail,) = entry.trigger("loud").notifications
    assert mail.recipients == ("me@example.com", "room@team.slack.com")
    assert {phase.name for phase in mail.on_phase} == {"FAILED", "ABORTED", "TIMED_OUT"}
    (mail,) = entry.trigger("loud", ends=True).notifications
    assert "SUCCEEDED" in {phase.name for phase in mail.on_phase}


def flyte_cli(*arguments: str) -> str:
    from flyte.cli.main import main

    with contextlib.chdir(REPOSITORY):
        done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("scheme", "driver", "options"),
    [
        ("s3", "s3fs", {}),
        ("gs", "gcsfs", {"token": "anon"}),
        ("abfs", "adlfs", {"account_name": "us", "anon": True}),
    ],
)
def test_storage_keeps_its_driver_beside_flyte_2s(
    scheme: str, driver: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flyte 2 makes obstore fsspec's driver of clouds, with options of its own."""
    import flyte.storage  # noqa: F401 (which registers it)
    import fsspec
    from obstore.fsspec import FsspecStore

    from engine.storage.filesystem import Files

    monkeypatch.setitem(fsspec.config.conf, scheme, options)
    assert issubclass(fsspec.get_filesystem_class(scheme), FsspecStore)
    files = Files(f"{scheme}://bucket/artifacts")
    assert type(files.fs).__module__.partition(".")[0] == driver
    assert files.path_of("a.json") == "bucket/artifacts/a.json"


def test_help_is_readable() -> None:
    text = flyte_cli("run", "--local", "workflows/flyte2/rlhf.py", "rlhf", "--help")
    assert "Warm-start a model" in text
    assert "properties" not in text  # of a JSON schema
    for name in ("config", *pipelines.INPUTS):
        assert (f"--{name}" in text) == (name != "preferences")
    assert "Settings: a YAML or JSON file, preset:NAME, or JSON text." in " ".join(text.split())


def test_everything_deploys_without_a_network() -> None:
    text = flyte_cli(
        *("--endpoint", "dns:///127.0.0.1:9", "--insecure", "deploy", "--project", "p"),
        *("--domain", "d", "--dry-run", "--version", "v", "--copy-style", "none"),
        *("--image", f"default={IMAGE}", "--all", "workflows/flyte2"),
    )
    for name in ("rlhf", "preference", "agents", "evaluate_only", "retraining", "plan"):
        assert f"{DRIVER.name}.{name}" in text
    for stage in ON_MACHINES:
        assert f"{DRIVER.name}-cuda.{stage}_cuda" in text


def test_every_stage_has_a_task_in_both_fronts() -> None:
    elsewhere = {"plan_promotion", "waits_for_approval", "keep_promotion", "rollback", "review"}
    for stage in set(pods.STAGES) - {"record_failure"}:
        assert hasattr(tasks.stages, stage)
        assert hasattr(stages, stage) == (stage not in elsewhere), stage


def test_retraining_is_described_alike_in_both_fronts() -> None:
    from workflows import retraining as flytekit_front

    ours, theirs = retraining.retraining.func, flytekit_front.retraining._workflow_function
    assert "path: Folder or s3://" in ours.__doc__
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
