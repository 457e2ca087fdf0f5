"""Registration and packaging."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from admin_server import Cluster, running, tasks_in
from click.testing import CliRunner
from flyte_runs import PYFLYTE, REPOSITORY, WORKFLOW, Place
from flyteidl.core.identifier_pb2 import Identifier
from flyteidl.core.literals_pb2 import KeyValuePair
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from flytekit.configuration import SERIALIZED_CONTEXT_ENV_VAR
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from protobufs import IMAGE, Registered
from registration import CUDA, MESSAGES, git, pack, read_archive, register, run

from engine.data.rows import EVALUATION_ROWS, RL_PROMPTS, SFT_PAIRS
from engine.errors import ConfigError
from engine.stages.dataset import SPLITS
from workflows import register as packaging
from workflows.register import (
    SOURCES,
    RegistrationError,
    _connect,
    _send,
    _sentences,
    image_digest,
    images_digest,
    kind_of,
    main,
    version_of,
)

DIGEST = "a" * 64


IMAGES = {"default": IMAGE, "cuda": IMAGE, "rocm": IMAGE}


WHERE = ("hybridflyte", "development")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A committed checkout of next to nothing."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("a = 1\n")
    (tmp_path / "notes.md").write_text("notes\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def test_the_version_is_commit_and_image(small: Path) -> None:
    assert version_of(small, IMAGES) == f"{git(small, 'rev-parse', 'HEAD')[:12]}-{'a' * 12}"


def test_several_images_are_one_digest() -> None:
    several = images_digest({"default": IMAGE, "cuda": CUDA})
    assert several == images_digest({"cuda": CUDA, "default": IMAGE})
    assert several not in (images_digest({"default": IMAGE}), images_digest({"default": CUDA}))
    assert len(several) == 12


@pytest.mark.parametrize("reference", ["x/y:1", "x/y", "x/y@sha256:abc", f"@sha256:{DIGEST}"])
def test_an_image_by_tag_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"is not by digest.*give NAME@sha256"):
        image_digest("default", reference)


@pytest.mark.parametrize("change", ["edited", "new", "deleted", "staged"])
def test_edited_sources_are_refused_or_marked(small: Path, change: str) -> None:
    file = small / "engine" / ("b.py" if change == "new" else "a.py")
    file.unlink() if change == "deleted" else file.write_text("a = 2\n")
    if change == "staged":
        git(small, "add", "-A")
    with pytest.raises(ConfigError, match=rf"{file.name}; commit them, or .* --allow-dirty"):
        version_of(small, IMAGES)
    clean = f"{git(small, 'rev-parse', 'HEAD')[:12]}-{'a' * 12}"
    marked = version_of(small, IMAGES, allow_dirty=True)
    assert marked.startswith(f"{clean}-dirty-")
    assert marked == version_of(small, IMAGES, allow_dirty=True)
    (small / "engine" / "c.py").write_text("c = 1\n")
    assert version_of(small, IMAGES, allow_dirty=True) != marked


def test_what_goes_into_no_image_may_differ(small: Path) -> None:
    (small / "notes.md").write_text("other notes\n")
    assert "dirty" not in version_of(small, IMAGES)
    assert {"engine", "examples", "tasks", "workflows"} <= set(SOURCES)


def test_without_git_there_is_no_version(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no git commit"):
        version_of(tmp_path, IMAGES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def version(checkout: Path, cluster: Cluster) -> str:
    """Everything registered by our command; the version that it printed."""
    config = cluster.config(checkout.parent)
    done = register(
        checkout,
        *("--config", str(config), "--activate"),
        *("--notify", "team@example.com"),
        PYTHONHASHSEED="1",
        HYBRIDFLYTE_NOTIFY="night@example.com",  # the option counts
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.strip().splitlines()[-1]


def test_one_command_registers_everything(cluster: Cluster, version: str, checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    images = {"default": IMAGE, "cuda": CUDA, "rocm": IMAGE}
    assert version == f"{head[:12]}-{images_digest(images)}"
    admin = cluster.admin
    ours = [key for key in admin.created if key[3] == version]
    assert {key[:2] for key in ours} == {("hybridflyte", "development")}
    workflows = {key[2] for key in ours if key in admin.workflows}
    assert {"workflows.rlhf.rlhf", "workflows.evaluate_only.evaluate_only"} <= workflows
    plans = {key[2] for key in ours if key in admin.launch_plans}
    assert {"rlhf_smoke", "rlhf_full", "evaluate_only", "promote"} <= plans
    assert set(admin.active) == {name for name in plans if "." not in name}
    assert all(key[3] == version for key in admin.active.values())


def task(cluster: Cluster, version: str, name: str) -> Any:
    return cluster.admin.tasks["hybridflyte", "development", name, version].template


def test_what_lays_a_stage_out_knows_the_images(cluster: Cluster, version: str) -> None:
    """By digest, in its container's variables: they go into the stages that it writes."""
    for name in ("stages.sft", "stages.rl", "stages.evaluate", "stages.promote"):
        container = task(cluster, version, f"tasks.{name}").container
        assert container.image == IMAGE
        variables = {pair.key: pair.value for pair in container.env}
        assert variables["HYBRIDFLYTE_IMAGE"] == IMAGE
        assert variables["HYBRIDFLYTE_CUDA_IMAGE"] == CUDA
        assert variables["HYBRIDFLYTE_ROCM_IMAGE"] == IMAGE  # none was given


def test_tasks_ask_for_the_secrets_that_they_need(cluster: Cluster, version: str) -> None:
    def asked(name: str) -> dict[str, tuple[str, str]]:
        found = task(cluster, version, f"tasks.{name}").security_context.secrets
        return {one.env_var: (one.group, one.key) for one in found}

    tracking = {"MLFLOW_TRACKING_TOKEN": ("team", "mlflow")}
    both = tracking | {"WANDB_API_KEY": ("team", "wandb")}
    assert asked("stages.rl_stage") == asked("stages.sft_stage") == both
    for name in ("stages.plan", "stages.report", "failure.rlhf_failed", "stages.evaluate_stage"):
        assert asked(name) == tracking, name
    assert asked("stages.rl") == {}, "the pod that lays it out needs none, and passes on the names"
    for name, names in (("stages.rl", both), ("stages.report", tracking)):
        variables = {
            one.key: one.value for one in task(cluster, version, f"tasks.{name}").container.env
        }
        assert variables["HYBRIDFLYTE_SECRETS"].count("=") == len(names)


def test_those_to_be_told_are_registered(cluster: Cluster, version: str) -> None:
    key = ("hybridflyte", "development", "rlhf_full", version)
    (notification,) = cluster.admin.launch_plans[key].entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["team@example.com"]
    assert len(notification.phases) == 4


def test_a_client_fetches_and_launches(
    cluster: Cluster, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flytekit.configuration import Config
    from flytekit.remote import FlyteRemote

    monkeypatch.setenv("HOME", str(tmp_path))
    config = Config.auto(config_file=str(cluster.config(tmp_path)))
    remote = FlyteRemote(config, "hybridflyte", "development")
    plan = remote.fetch_launch_plan(name="rlhf_smoke", version=version)
    assert plan.id.version == version
    fetched = remote.fetch_workflow(name="workflows.rlhf.rlhf", version=version)
    assert [node.metadata.name for node in fetched.nodes][2:5] == ["sft", "reward_audit", "rl"]
    given = {"seed": 3, "model": "Qwen/Qwen2.5-7B-Instruct", "profile": "2x8xH100"}
    plan = remote.fetch_launch_plan(name="rlhf_full")  # the newest
    started = remote.execute(plan, inputs=given)
    request = cluster.admin.executions[started.id.name]
    assert request.spec.launch_plan.version == version
    sent = {k: v.scalar.primitive for k, v in request.inputs.literals.items()}
    assert set(sent) == set(given)
    assert sent["seed"].integer == 3
    assert sent["profile"].string_value == "2x8xH100"
    assert remote.fetch_execution(name=started.id.name).spec.launch_plan.name == "rlhf_full"


def of_workflow(entities: list[Any], name: str) -> list[Any]:
    """A workflow's entities: its tasks, itself and its launch plan."""
    (workflow,) = [one for one in entities if kind_of(one)[:2] == ("workflow", name)]
    names = {name} | {ident.name for ident in tasks_in(workflow.to_flyte_idl())}
    found = [one for one in entities if kind_of(one)[1] in names]
    assert {kind_of(one)[0] for one in found} == {"task", "workflow", "launch plan"}
    return found


@dataclass(frozen=True)
class DryRun:
    """What it prints, and what it has serialised."""

    printed: str
    entities: list[Any]
    settings: Any


@pytest.fixture(scope="module")
def dry_run() -> DryRun:
    """A dry run, which is refused the network."""
    serialised: list[Any] = []
    serialize = packaging.serialize

    def keep(*given: Any) -> Any:
        serialised.extend(serialize(*given))
        return serialised

    def refuse(*given: object) -> None:
        raise AssertionError(f"a dry run asked the network: {given}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLYTE_SDK_LOGGING_LEVEL", "40")  # the command sets it for good
        patch.setattr(packaging, "version_of", lambda *given: "v1")
        patch.setattr(packaging, "_set_variables", lambda *given: None)  # tasks are loaded here
        patch.setattr(packaging, "serialize", keep)
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        done = CliRunner().invoke(main, ["--image", IMAGE, "--dry-run"])
    assert done.exit_code == 0, done.stderr
    return DryRun(done.stdout, *serialised)


def test_a_dry_run_touches_no_network(dry_run: DryRun) -> None:
    assert "launch plan  rlhf_smoke" in dry_run.printed


def test_registering_again_changes_nothing_and_other_content_is_refused(
    dry_run: DryRun, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    remote = _connect(str(cluster.config(tmp_path)), *WHERE)
    few = of_workflow(dry_run.entities, "workflows.rollback.rollback")
    _send(remote, few, dry_run.settings, "v1")
    known = list(cluster.admin.created)
    assert {key[3] for key in known} >= {"v1"}
    _send(remote, few, dry_run.settings, "v1")
    assert cluster.admin.created == known
    (other,) = [copy.deepcopy(one) for one in few if kind_of(one)[1] == "tasks.stages.rollback"]
    other.template.container._image = CUDA
    with pytest.raises(RegistrationError, match=r"different structure.*register another commit"):
        _send(remote, [other], dry_run.settings, "v1")


def test_a_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_SDK_LOGGING_LEVEL", "40")  # the command sets it for good
    done = CliRunner().invoke(main, ["--image", "ghcr.io/x/y:1"])
    assert done.exit_code == 1
    assert done.stderr.count("─ Error ─") == 1
    assert "is not by digest" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("admin:\n  endpoint: 127.0.0.1:9\n  insecure: true\n", "can't be reached"),
        (None, "does not exist"),
    ],
)
def test_a_flyte_that_is_not_there(tmp_path: Path, text: str | None, words: str) -> None:
    config = tmp_path / "flyte.yaml"
    if text is not None:
        config.write_text(text)
    started = time.monotonic()
    with pytest.raises(RegistrationError, match=words):
        _connect(str(config), "hybridflyte", "development")
    assert time.monotonic() - started < 100


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--activate"], ["--project", "p"], ["--domain", "d"]]
)
def test_an_archive_refuses_what_it_would_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("FLYTE_SDK_LOGGING_LEVEL", "40")  # the command sets it for good
    target = tmp_path / "refused.tgz"
    done = CliRunner().invoke(main, ["--image", IMAGE, "--package", str(target), *options])
    assert done.exit_code == 1
    said = " ".join(done.stderr.replace("│", "").split())
    assert f"{options[0]} has no effect with --package" in said
    assert not target.exists()


def test_ctrl_c_ends_with_130() -> None:
    with pytest.raises(SystemExit) as stop, _sentences():
        raise KeyboardInterrupt
    assert stop.value.code == 130


def test_the_address_of_the_environment_is_told_where_no_other_is_given(package: Path) -> None:
    plan = read_archive(package).launch_plan("rlhf_full")
    (notification,) = plan.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["night@example.com"]


def test_a_package_holds_what_is_registered(package: Path, cluster: Cluster, version: str) -> None:
    """In the same order and byte for byte, though made in another folder under another hash seed.

    Only who is told differs, and the package leaves open where and as which version it will be.
    """
    admin = cluster.admin
    tables: dict[int, Any] = {1: admin.tasks, 2: admin.workflows, 3: admin.launch_plans}
    registered = [key for key in admin.created if key[3] == version]
    with tarfile.open(package) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name[-4])
        for member, key in zip(members, registered, strict=True):
            number = int(member.name[-4])
            assert member.name.partition("_")[2] == f"{key[2]}_{number}.pb"
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
            packed = MESSAGES[number].FromString(content)
            assert content == packed.SerializeToString(deterministic=True), "its maps are in order"
            specification = packed.spec if number == 3 else packed
            assert plain(specification) == plain(tables[number][key]), key[2]


def plain(message: Any) -> bytes:
    """A specification's bytes without those to be told, project, domain and version."""
    message = copy.deepcopy(message)
    if "entity_metadata" in message.DESCRIPTOR.fields_by_name:
        message.entity_metadata.ClearField("notifications")
    for part in parts(message):
        if isinstance(part, Identifier):
            for field in ("project", "domain", "version"):
                part.ClearField(field)
        elif isinstance(part, KeyValuePair) and part.key == SERIALIZED_CONTEXT_ENV_VAR:
            part.ClearField("value")
    content: bytes = message.SerializeToString(deterministic=True)
    return content


def parts(message: Message) -> Iterator[Message]:
    """The messages in a message, at every depth, but not those of JSON."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        several = value if field.is_repeated else [value]
        for part in several.values() if isinstance(several, Mapping) else several:
            if isinstance(part, Message) and not isinstance(part, Struct):
                yield from parts(part)


def test_an_archive_holds_no_time_and_no_user(package: Path) -> None:
    with tarfile.open(package) as archive:
        assert {
            (m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in archive.getmembers()
        } == {(0, 0, 0, "", "", 0o644)}
    assert package.read_bytes()[3:8] == bytes(5), "gzip's flags and time"


@pytest.mark.slow
def test_a_package_is_the_same_byte_for_byte(package: Path, checkout: Path, tmp_path: Path) -> None:
    """Packed in another folder, at another time, by another user's habits and hash seed."""
    copied = tmp_path / "copy"
    shutil.copytree(checkout, copied)
    for file in copied.rglob("*.py"):
        os.utime(file, (1e9, 1e9))
    assert pack(copied, tmp_path / "package.tgz", seed=2, umask=0o022) == package.read_bytes()


def test_cache_keys_hold_code_and_image(checkout: Path, cluster: Cluster, version: str) -> None:
    """Another image, or an edit in the engine, is another key of each stage."""
    edited = checkout.parent / "edited"
    shutil.copytree(checkout, edited)
    source = edited / "engine" / "algorithms" / "masked.py"
    source.write_text(source.read_text() + "# edited\n")
    others = cache_keys((edited, IMAGE), (checkout, CUDA))
    assert len(others[0]) == 4
    for name in others[0]:
        key = task(cluster, version, name).metadata.discovery_version
        assert len({key, *(other[name] for other in others)}) == 3, name


KEYS = """
import json, os, sys
import flytekit, flytekitplugins.ray, kubernetes, pandas
for checkout, image in json.loads(sys.argv[1]):
    if os.fork() == 0:  # images are read, and sources hashed, once in a process
        os.environ["HYBRIDFLYTE_IMAGE"] = image
        sys.path.insert(0, checkout)
        from tasks.stages import evaluate_stage, preprocess, rl_stage, sft_stage
        stages = preprocess, sft_stage, rl_stage, evaluate_stage
        assert all(sys.modules[stage.__module__].__file__.startswith(checkout) for stage in stages)
        keys = {stage.name: stage.metadata.cache_version for stage in stages}
        print(json.dumps(keys), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def cache_keys(*cases: tuple[Path, str]) -> list[dict[str, str]]:
    """The cache versions of stages, by task, for each checkout and image."""
    given = json.dumps([(str(folder), image) for folder, image in cases])
    done = run(cases[0][0].parent, ["-P", "-c", KEYS, given], PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def pyflyte(folder: Path, config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        folder,
        ["-c", PYFLYTE, "--config", str(config), *arguments],
        FLYTE_SDK_LOGGING_LEVEL="40",
    )


@pytest.mark.slow  # `pyflyte package` and `pyflyte run --remote` serialise and register as well
def test_pyflyte_register(checkout: Path, cluster: Cluster) -> None:
    config = cluster.config(checkout.parent)
    where = ("-p", "hybridflyte", "-d", "development")
    done = pyflyte(
        *(checkout, config, "register", *where, "--version", "by-hand", "--copy", "none"),
        *("--image", IMAGE, "workflows"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_hand = [key for key in cluster.admin.created if key[3] == "by-hand"]
    assert ("hybridflyte", "development", "rlhf_full", "by-hand") in by_hand


def test_pyflyte_run_remote_uploads_the_code(checkout: Path, cluster: Cluster) -> None:
    config = cluster.config(checkout.parent)
    before = set(cluster.admin.executions)
    done = pyflyte(
        *(checkout, config, "run", "--remote", "-p", "hybridflyte", "-d", "development"),
        *("--image", IMAGE, "--copy", "all"),
        *("workflows/launch_plans.py", "rlhf_smoke", "--seed", "4"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (name,) = set(cluster.admin.executions) - before
    request = cluster.admin.executions[name]
    assert request.spec.launch_plan.name == "rlhf_smoke"
    # What the launch plan fixes was not sent; the server would have refused it.
    assert set(request.inputs.literals) <= {"config", "seed"}
    assert request.inputs.literals["seed"].scalar.primitive.integer == 4
    container = task(cluster, request.spec.launch_plan.version, "tasks.stages.rl").container
    arguments = list(container.args)
    assert arguments[0] == "pyflyte-fast-execute"
    uri = arguments[arguments.index("--additional-distribution") + 1]
    with tarfile.open(fileobj=io.BytesIO(cluster.download(uri))) as archive:
        names = {name.removeprefix("./") for name in archive.getnames()}
    assert {"workflows/rlhf.py", "engine/trainers/rl.py"} <= names


ON_PREFERENCES = ("pairs", "reference_log_probs", "preference_training", "reward_model_training")


# These write the stage of a profile.
ON_MACHINES = {"sft", "reward_audit", "rl", "evaluate", "promote", "reward_model_promotion"}
ON_MACHINES |= set(ON_PREFERENCES)


STAGES = {f"{name}_stage" for name in ON_MACHINES} | {"evaluate_part_stage"}


DECIDE = {"promote_stage", "reward_model_promotion_stage"}


CACHED = {"preprocess", "ingest", *STAGES} - DECIDE


OF_PREFERENCES = ("preference", "reward_model", "classic_rlhf", "make_pairs")  # workflows


HANDLERS = {"rlhf_failed", "evaluate_only_failed", "promote_only_failed", "retraining_failed"}


HANDLERS |= {"agents_failed"}


HANDLERS |= {f"{name}_failed" for name in OF_PREFERENCES}


AROUND = {
    *("plan", "report", "fetch", "plan_promotion", "finalize", "trigger_retraining"),
    "learn_in_rounds",
    *(
        "finalize_skipped",
        "keep_promotion",
        "approval_request",
        "waits_for_approval",
        "review",
        "rollback",
    ),
}


ALL = CACHED | HANDLERS | AROUND | ON_MACHINES | DECIDE


def package_by_pyflyte(place: Place) -> Registered:
    """Package the workflows without a network."""
    target = place.root / "package.tgz"
    place.variables  # noqa: B018 (makes the folders)
    outcome = place.pyflyte(
        "--pkgs", "workflows", "package", "--image", f"default={IMAGE}", "--output", str(target),
        "-f", "--source", str(REPOSITORY),
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    return read_archive(target)


# They differ in what turns entities into an archive, which tests/workflows/test_register.py is on.
@pytest.fixture(scope="module", params=["ours", pytest.param("pyflyte", marks=pytest.mark.slow)])
def packaged(request: pytest.FixtureRequest) -> Registered:
    if request.param == "ours":
        found: Registered = request.getfixturevalue("registered")
        return found
    return package_by_pyflyte(request.getfixturevalue("new_place")())


@pytest.fixture(scope="module")
def tasks(packaged: Registered) -> dict[str, TaskTemplate]:
    """All tasks of ours, by short name."""
    templates = [m.template for (number, _), m in packaged.messages.items() if number == 1]
    ours = [template for template in templates if template.id.name.startswith("tasks.")]
    return {template.id.name.rsplit(".", 1)[-1]: template for template in ours}


def memory(resources: Resources) -> dict[int, str]:
    return {entry.name: entry.value for entry in resources.requests}


def test_every_stage_is_registered(tasks: dict[str, TaskTemplate]) -> None:
    assert set(tasks) == ALL


def test_stages_are_cached_by_content_code_and_image(tasks: dict[str, TaskTemplate]) -> None:
    for name, template in tasks.items():
        meta = template.metadata
        assert meta.discoverable == (name in CACHED), name
        assert meta.cache_serializable == (name in CACHED), name
        assert list(meta.cache_ignore_input_vars) == (["run"] if name in CACHED else []), name
        assert bool(meta.discovery_version) == (name in CACHED), name


def test_images_and_resources(tasks: dict[str, TaskTemplate]) -> None:
    cpu, mem = Resources.ResourceName.CPU, Resources.ResourceName.MEMORY
    for name, template in tasks.items():
        assert template.container.image == IMAGE, name
        asked = memory(template.container.resources)
        large = name in STAGES - {"rl_stage"}
        assert asked == ({cpu: "2", mem: "6Gi"} if large else {cpu: "1", mem: "2Gi"}), name


def test_retries_deadlines_and_spot_machines(tasks: dict[str, TaskTemplate]) -> None:
    """Long stages may lose their machine and try again; what writes to the registry may not."""
    for name, template in tasks.items():
        meta = template.metadata
        assert meta.retries.retries >= 2, name
        whole = tasks[f"{name}_stage"].metadata if name in ON_MACHINES else None
        longest = whole.timeout.seconds * (whole.retries.retries + 1) if whole else 3 * 86400
        longest = 18 * 86400 if name == "learn_in_rounds" else longest  # all stages of all rounds
        assert 0 < meta.timeout.seconds <= longest, name
        assert meta.interruptible == (name in CACHED | {"fetch"}), name
    assert tasks["rl_stage"].metadata.retries.retries == 5
    assert tasks["rl_stage"].metadata.timeout.seconds == 3 * 86400
    assert tasks["rl"].metadata.timeout.seconds == 18 * 86400, "all attempts at the stage"


def test_the_deck_is_registered(tasks: dict[str, TaskTemplate]) -> None:
    """Of every stage; not of the pods around it that decide or record nothing of their own."""
    with_deck = {name for name, one in tasks.items() if one.metadata.generates_deck.value}
    around = {"plan", "trigger_retraining", "fetch", "report", "review"}
    around |= {"finalize", "finalize_skipped", "rollback"}
    assert with_deck == around | {"preprocess", "ingest", *STAGES} - {"evaluate_part_stage"}


def test_tables_are_typed(tasks: dict[str, TaskTemplate]) -> None:
    """Flyte's console shows columns of the dataset's splits and of both models' rows."""
    splits = tasks["preprocess"].interface.outputs.variables
    assert set(splits) == {"dataset", *SPLITS}
    assert tasks["ingest"].interface.outputs.variables == splits
    for name, columns in (("train", RL_PROMPTS), ("sft_train", SFT_PAIRS)):
        kind = splits[name].type.structured_dataset_type
        assert [one.name for one in kind.columns] == list(columns)
        assert kind.format == "parquet"
    for stage in ("evaluate", "evaluate_stage"):
        rows = tasks[stage].interface.outputs.variables
        assert set(rows) == {"evaluation", "rows_warm_start", "rows_rl"}
        kind = rows["rows_rl"].type.structured_dataset_type
        assert [one.name for one in kind.columns] == list(EVALUATION_ROWS)


def test_the_interface_of_the_workflow(packaged: Registered) -> None:
    workflow = packaged.workflow("rlhf")
    inputs = workflow.interface.inputs.variables
    assert set(inputs) == {"config", "source", "path", "model", "seed", "profile"}
    assert all(variable.description for variable in inputs.values())
    assert [node.metadata.name for node in workflow.nodes] == [
        *("plan", "preprocess", "sft", "reward_audit", "rl", "evaluate", "promotion", "report")
    ]
    assert workflow.failure_node.task_node.reference_id.name == "tasks.failure.rlhf_failed"
    defaults = packaged.launch_plan("workflows.rlhf.rlhf").default_inputs.parameters
    assert not any(parameter.required for parameter in defaults.values())


def test_agents_has_the_stages_of_rlhf(packaged: Registered) -> None:
    both = [packaged.workflow(name) for name in ("agents", "rlhf")]
    nodes = [[node.metadata.name for node in one.nodes] for one in both]
    assert nodes[0] == nodes[1]
    assert all(one.description for one in both[0].interface.inputs.variables.values())
    handler = both[0].failure_node.task_node.reference_id.name
    assert handler == "tasks.failure.agents_failed"


def test_the_workflows_of_preferences(packaged: Registered) -> None:
    nodes = {
        name: [node.metadata.name for node in packaged.workflow(name).nodes]
        for name in OF_PREFERENCES
    }
    first, last = ["plan", "preprocess", "sft"], ["evaluate", "promotion", "report"]
    scorer = ["pairs", "reward_model_training", "reward_model_promotion"]
    assert nodes["preference"] == [*first, "reward_audit", "learn_in_rounds", *last]
    assert nodes["reward_model"] == [*first, *scorer, "finalize"]
    assert nodes["classic_rlhf"] == [*first, "reward_audit", *scorer, "rl", *last]
    assert nodes["make_pairs"] == ["plan", "fetch", "preprocess", "pairs", "finalize"]
    for name in OF_PREFERENCES:
        template = packaged.workflow(name)
        assert all(one.description for one in template.interface.inputs.variables.values())
        handler = template.failure_node.task_node.reference_id.name
        assert handler == f"tasks.failure.{name}_failed"


def test_ppo_of_classic_rlhf_gets_the_reward_model(packaged: Registered) -> None:
    template = packaged.workflow("classic_rlhf")
    (ppo,) = [node for node in template.nodes if node.metadata.name == "rl"]
    (given,) = [one for one in ppo.inputs if one.var == "reward_model"]
    by_node = {node.id: node.metadata.name for node in template.nodes}
    assert by_node[given.binding.promise.node_id] == "reward_model_training"


def test_help_without_a_workflow(place: Place) -> None:
    outcome = place.invoke("run", str(WORKFLOW))
    assert outcome.code == 2
    assert "rlhf" in outcome.text
    assert "Warm-start a model" in outcome.text


def test_help_documents_the_inputs(place: Place) -> None:
    outcome = place.run("--help")
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    for words in (
        "config: Settings: a YAML or JSON file",
        "source: Data source, arithmetic, gsm8k, math or files",
        "model: Hugging Face model folder to start from",
        "seed: Seed of data, weights and sampling",
    ):
        assert words in said
