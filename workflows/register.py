"""Register all workflows and launch plans under one version, or package them.

    python -m workflows.register --image ghcr.io/me/hybridflyte@sha256:… [--activate]
    python -m workflows.register --image … --package flyte-package.tgz

The version is the git commit and the images' digests. Running it again changes nothing.
"""

import contextlib
import gzip
import hashlib
import io
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import rich_click as click
from click.core import ParameterSource
from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
from flytekit.configuration import Config, Image, ImageConfig, SerializationSettings
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteInvalidInputException
from flytekit.models.admin.workflow import WorkflowSpec
from flytekit.models.core.identifier import Identifier, ResourceType
from flytekit.models.core.workflow import Node
from flytekit.models.task import TaskSpec
from flytekit.remote import FlyteRemote
from flytekit.tools.module_loader import add_sys_path, just_load_modules
from flytekit.tools.repo import serialize_get_control_plane_entities
from flytekit.tools.translator import FlyteControlPlaneEntity

from engine.console import INTERRUPTED, quiet
from engine.errors import ConfigError, EngineError
from engine.stages.pods import IMAGES, NOTIFY, SECRETS
from engine.storage.digests import hash_file, project_root
from engine.storage.filesystem import write_atomically

# What is registered or goes into an image; notes and tests beside it may differ.
SOURCES = ("engine", "examples", "tasks", "workflows", "images", "Dockerfile", "pyproject.toml")
GIT_SECONDS = 30.0
SHORT = 12  # hex digits
_BY_DIGEST = re.compile(r"(?P<name>[^@\s]+)@sha256:(?P<digest>[0-9a-f]{64})")


def version_of(root: Path, images: Mapping[str, str], allow_dirty: bool = False) -> str:
    """Return `<commit>-<images>`, and `-dirty-<content>` after it for edited sources.

    `images` are references by digest, by kind. Raises ConfigError where one is not, outside a git
    checkout, and for edited sources unless they are allowed.
    """
    image = images_digest(images)
    commit = _git(root, "rev-parse", "HEAD").strip()[:SHORT]
    status = ("status", "--porcelain", "-z", "--no-renames", "-uall", "--", *SOURCES)
    edited = sorted(entry[3:] for entry in _git(root, *status).split("\0") if entry)
    if not edited:
        return f"{commit}-{image}"
    if not allow_dirty:
        shown = ", ".join(edited[:3]) + (f" and {len(edited) - 3} more" if edited[3:] else "")
        raise ConfigError(
            f"the sources differ from commit {commit}: {shown}; commit them, or register a marked "
            "version with --allow-dirty"
        )
    digest = hashlib.sha256()
    for path in edited:
        content = hash_file(root / path) if (root / path).is_file() else "deleted"
        digest.update(f"{path}\0{content}\n".encode())
    return f"{commit}-{image}-dirty-{digest.hexdigest()[:8]}"


def images_digest(images: Mapping[str, str]) -> str:
    """Return twelve hex digits: the image's, or those of a hash over several."""
    digests = {kind: image_digest(kind, images[kind]) for kind in sorted(images)}
    lines = "".join(f"{kind}={digest}\n" for kind, digest in digests.items())
    several, first = len(set(digests.values())) > 1, next(iter(digests.values()))
    return (hashlib.sha256(lines.encode()).hexdigest() if several else first)[:SHORT]


def image_digest(kind: str, reference: str) -> str:
    """Return the SHA-256 (hex) in a reference; ConfigError for one by tag, which may move."""
    match = _BY_DIGEST.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"image {kind}={reference!r} is not by digest, and a tag may point elsewhere tomorrow; "
            "give NAME@sha256:…, which `docker buildx imagetools inspect NAME:TAG` prints"
        )
    return match["digest"]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git does not answer ({error}); the version needs it") from error
    if process.returncode:
        raise ConfigError(
            f"{root} has no git commit to name the version by ({process.stderr.strip()}); register "
            "from a checkout"
        )
    return process.stdout


# What is registered, as protobufs, and as an archive that is the same byte for byte: that of
# `pyflyte package` has times and owners, and flytekit 1.16 lists predecessors in a set's order.

PYTHON = "/opt/venv/bin/python"  # in the images


def serialize(
    root: Path, image: str, project: str = "", domain: str = "", version: str = ""
) -> tuple[list[FlyteControlPlaneEntity], SerializationSettings]:
    """Load the modules of `workflows/` and return what is to be registered, with the settings used.

    `flytectl register files` fills in project, domain and version that are not given here.
    """
    default = Image.look_up_image_info("default", image)
    settings = SerializationSettings(
        image_config=ImageConfig(default_image=default, images=[default]),
        project=project or None,
        domain=domain or None,
        version=version or None,
        python_interpreter=PYTHON,
    )
    modules = sorted((root / "workflows").glob("[!_]*.py"))  # what is Flyte 2's lies below
    with add_sys_path(root):
        just_load_modules([f"workflows.{path.stem}" for path in modules])
    # Without the root, which dynamic tasks would carry: an archive is the same in any folder.
    entities = serialize_get_control_plane_entities(settings)
    for entity in entities:
        if isinstance(entity, WorkflowSpec):
            for template in (entity.template, *entity.sub_workflows):
                _sort_predecessors(template.nodes)
    return entities, settings


def _sort_predecessors(nodes: Iterable[Node]) -> None:
    for node in nodes:
        node._upstream_node_ids = sorted(node.upstream_node_ids)
        if node.branch_node is not None:
            block = node.branch_node.if_else
            cases = [case.then_node for case in (block.case, *(block.other or ()))]
            _sort_predecessors([*cases, block.else_node] if block.else_node else cases)


def kind_of(entity: FlyteControlPlaneEntity) -> tuple[str, str, int]:
    """Return an entity's kind in words, its name, and the kind's number in Flyte's file names."""
    if isinstance(entity, TaskSpec):
        return "task", str(entity.template.id.name), 1
    if isinstance(entity, WorkflowSpec):
        return "workflow", str(entity.template.id.name), 2
    return "launch plan", str(entity.id.name), 3


def write_package(entities: Sequence[FlyteControlPlaneEntity], path: Path) -> None:
    """Write the archive that `flytectl register files --archive` reads, whole or not at all."""
    digits = len(str(len(entities)))
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for index, entity in enumerate(entities):
            _, name, number = kind_of(entity)
            # With maps in order.
            content = entity.to_flyte_idl().SerializeToString(deterministic=True)
            entry = tarfile.TarInfo(f"{index:0{digits}}_{name}_{number}.pb")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    write_atomically(path, [buffer.getvalue()])


# The command line.

CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0


class RegistrationError(EngineError):
    """An error: Flyte can't be reached, or refused what was sent."""


@click.command(help=__doc__)
@click.option("--image", required=True, help="Image of CPU tasks: NAME@sha256:…")
@click.option("--cuda-image", default="", help="Image of NVIDIA profiles; without it, --image")
@click.option("--rocm-image", default="", help="Image of AMD profiles; without it, --image")
@click.option("--project", default="hybridflyte", show_default=True)
@click.option("--domain", default="development", show_default=True)
@click.option("--config", default="", help="Flyte's config.yaml; without it as pyflyte finds it")
@click.option("--notify", default="", help=f"Addresses for mails; without it, ${NOTIFY}")
@click.option(
    "--secret", "secrets", multiple=True, help=f"VARIABLE=GROUP/KEY; without any, ${SECRETS}"
)
@click.option("--activate", is_flag=True, help="Switch schedules to this version")
@click.option("--allow-dirty", is_flag=True, help="Register edited sources under a marked version")
@click.option("--package", "archive", default="", help="Write this archive, register nothing")
@click.option("--dry-run", is_flag=True, help="Show what would be registered")
@click.pass_context
def main(
    context: click.Context,
    image: str,
    cuda_image: str,
    rocm_image: str,
    project: str,
    domain: str,
    config: str,
    notify: str,
    secrets: tuple[str, ...],
    activate: bool,
    allow_dirty: bool,
    archive: str,
    dry_run: bool,
) -> None:
    quiet()
    os.environ.setdefault("FLYTE_SDK_LOGGING_LEVEL", "40")  # read when flytekit is imported
    images = {"default": image, "cuda": cuda_image or image, "rocm": rocm_image or image}
    root = project_root()
    with _sentences():
        for name in ("activate", "dry_run", "project", "domain", "config") if archive else ():
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                option = f"--{name.replace('_', '-')}"
                raise RegistrationError(
                    f"{option} has no effect with --package, which writes an archive and asks no "
                    "Flyte; leave one of the two out, and name project and domain to flytectl"
                )
        version = version_of(root, images, allow_dirty)
        _set_variables(images, notify, secrets)
        if archive:
            entities, _ = serialize(root, image)
            write_package(entities, Path(archive).absolute())
            click.echo(f"{len(entities)} entities in {archive}")
            click.echo(f"flytectl register files --archive {archive} --version {version}")
        else:
            remote = None if dry_run else _connect(config, project, domain)
            entities, settings = serialize(root, image, project, domain, version)
            if remote is not None:
                _send(remote, entities, settings, version)
                if activate:
                    _activate(remote, project, domain, version)
            else:
                for kind, name, _ in map(kind_of, entities):
                    click.echo(f"{kind:12} {name}")
    click.echo(version)


def _set_variables(images: dict[str, str], notify: str, secrets: tuple[str, ...]) -> None:
    """Set what tasks and launch plans read while they are loaded, before they are."""
    loaded = [name for name in ("tasks.host", "workflows.launching") if name in sys.modules]
    if loaded:
        raise RegistrationError(
            f"{loaded[0]} is loaded already, with other images; register in a process of its own"
        )
    for kind, reference in images.items():
        os.environ[IMAGES[kind]] = reference
    if notify:
        os.environ[NOTIFY] = notify
    if secrets:
        os.environ[SECRETS] = ",".join(secrets)


def _connect(config: str, project: str, domain: str) -> FlyteRemote:
    if config and not Path(config).is_file():
        raise RegistrationError(f"--config {config} does not exist; give Flyte's config.yaml")
    settings = Config.auto(config_file=config or None)
    endpoint = settings.platform.endpoint
    if not endpoint:
        raise RegistrationError(
            "no Flyte endpoint is configured; give --config, or set FLYTE_PLATFORM_URL or "
            "FLYTECTL_CONFIG"
        )
    address = endpoint.removeprefix("dns:///")
    host, _, port = address.partition(":")
    try:
        with socket.create_connection((host, int(port or 443)), timeout=CONNECT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise RegistrationError(
            f"Flyte at {endpoint} can't be reached ({error}); check the address and the network"
        ) from error
    return FlyteRemote(settings, default_project=project, default_domain=domain)


def _send(
    remote: FlyteRemote,
    entities: Sequence[FlyteControlPlaneEntity],
    settings: SerializationSettings,
    version: str,
) -> None:
    """Register in order: tasks before the workflows that name them, then launch plans."""
    for entity in sorted(entities, key=lambda entity: kind_of(entity)[2]):
        kind, name, _ = kind_of(entity)
        with _call(f"{kind} {name} of version {version}", "registered"):
            remote.raw_register(entity, settings, version, create_default_launchplan=False)
    click.echo(f"{len(entities)} entities registered in {settings.project}/{settings.domain}")


def _activate(remote: FlyteRemote, project: str, domain: str, version: str) -> None:
    """Make this version the one that schedules and callers by name use."""
    from workflows.launching import LAUNCH_PLANS

    for name in LAUNCH_PLANS:
        with _call(f"launch plan {name}", "activated"):
            remote.activate_launchplan(
                Identifier(ResourceType.LAUNCH_PLAN, project, domain, name, version)
            )
    click.echo(f"active: {', '.join(LAUNCH_PLANS)}")


@contextlib.contextmanager
def _call(entity: str, done: str) -> Iterator[None]:
    """Call Flyte, for at most `CALL_SECONDS`; RegistrationError with the server's message."""
    try:
        with scoped_grpc_deadline(CALL_SECONDS):
            yield
    except FlyteException as error:
        details = getattr(error.__cause__, "details", None)  # where flytekit keeps it
        text = details() if callable(details) else ""
        hint = "run again, what is done stays"
        if isinstance(error, FlyteInvalidInputException):
            hint = (
                "where it is there already with other content (other --notify, say), register "
                "another commit"
            )
        raise RegistrationError(
            f"{entity} could not be {done}: {text or error or type(error).__name__}; {hint}"
        ) from error


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
