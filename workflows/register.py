"""Register all workflows and launch plans under one version, or package them.

    python -m workflows.register --image ghcr.io/me/hybridflyte@sha256:… [--activate]
    python -m workflows.register --image … --package flyte-package.tgz

The version is the git commit and the images' digests (`workflows.versioning`). Running it again
changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from click.core import ParameterSource

from engine.console import INTERRUPTED, quiet
from engine.errors import EngineError
from engine.storage.code_version import project_root
from tasks.images import VARIABLES
from workflows.versioning import version_of

if TYPE_CHECKING:
    from flytekit.configuration import SerializationSettings
    from flytekit.remote import FlyteRemote

    from workflows.packaging import FlyteControlPlaneEntity

NOTIFY_VARIABLE = "HYBRIDFLYTE_NOTIFY"  # of workflows.launching, which must not be loaded yet
SECRETS = "HYBRIDFLYTE_SECRETS"  # of tasks.credentials, the same
CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0


class RegistrationError(EngineError):
    """Flyte can't be reached, or refused what was sent."""


@click.command(help=__doc__)
@click.option("--image", required=True, help="Image of CPU tasks: NAME@sha256:…")
@click.option("--cuda-image", default="", help="Image of NVIDIA profiles; without it, --image")
@click.option("--rocm-image", default="", help="Image of AMD profiles; without it, --image")
@click.option("--project", default="hybridflyte", show_default=True)
@click.option("--domain", default="development", show_default=True)
@click.option("--config", default="", help="Flyte's config.yaml; without it as pyflyte finds it")
@click.option("--notify", default="", help=f"Addresses for mails; without it, ${NOTIFY_VARIABLE}")
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
        if archive:
            _check_package_options(context)
        version = version_of(root, images, allow_dirty)
        _set_variables(images, notify, secrets)
        if archive:
            _package(root, image, version, archive)
        else:
            remote = None if dry_run else _connect(config, project, domain)
            _register(remote, root, image, version, (project, domain), activate)
    click.echo(version)


def _check_package_options(context: click.Context) -> None:
    """Raise RegistrationError for options that an archive would leave out."""
    for name in ("activate", "dry_run", "project", "domain", "config"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise RegistrationError(
                f"{option} has no effect with --package, which writes an archive and asks no "
                "Flyte; leave one of the two out, and name project and domain to flytectl"
            )


def _package(root: Path, image: str, version: str, archive: str) -> None:
    from workflows.packaging import serialize, write_package

    entities, _ = serialize(root, image)
    write_package(entities, Path(archive).absolute())
    click.echo(f"{len(entities)} entities in {archive}")
    click.echo(f"flytectl register files --archive {archive} --version {version}")


def _register(
    remote: FlyteRemote | None,
    root: Path,
    image: str,
    version: str,
    where: tuple[str, str],
    activate: bool,
) -> None:
    """Send all of it to the project and domain `where`; without `remote`, only list it."""
    from workflows.packaging import kind_of, serialize

    entities, settings = serialize(root, image, *where, version)
    if remote is None:
        for entity in entities:
            kind, name, _ = kind_of(entity)
            click.echo(f"{kind:12} {name}")
        return
    _send(remote, entities, settings, version)
    if activate:
        _activate(remote, *where, version)


def _set_variables(images: dict[str, str], notify: str, secrets: tuple[str, ...]) -> None:
    """What tasks and launch plans read while they are loaded, which must not have happened yet."""
    loaded = [name for name in ("tasks.context", "workflows.launching") if name in sys.modules]
    if loaded:
        raise RegistrationError(
            f"{loaded[0]} is loaded already, with other images; register in a process of its own"
        )
    for kind, reference in images.items():
        os.environ[VARIABLES[kind]] = reference
    if notify:
        os.environ[NOTIFY_VARIABLE] = notify
    if secrets:
        os.environ[SECRETS] = ",".join(secrets)


def _connect(config: str, project: str, domain: str) -> FlyteRemote:
    from flytekit.configuration import Config
    from flytekit.remote import FlyteRemote

    if config and not Path(config).is_file():
        raise RegistrationError(f"--config {config} does not exist; give Flyte's config.yaml")
    found = Config.auto(config_file=config or None)
    endpoint = found.platform.endpoint
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
    return FlyteRemote(found, default_project=project, default_domain=domain)


def _send(
    remote: FlyteRemote,
    entities: Sequence[FlyteControlPlaneEntity],
    settings: SerializationSettings,
    version: str,
) -> None:
    """Register in order: tasks before the workflows that name them, then launch plans."""
    from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
    from flytekit.exceptions.base import FlyteException
    from flytekit.exceptions.user import FlyteInvalidInputException

    from workflows.packaging import kind_of

    ordered = sorted(entities, key=lambda entity: kind_of(entity)[2])
    for entity in ordered:
        kind, name, _ = kind_of(entity)
        try:
            with scoped_grpc_deadline(CALL_SECONDS):
                remote.raw_register(entity, settings, version, create_default_launchplan=False)
        except FlyteInvalidInputException as error:
            raise RegistrationError(
                f"Flyte refused {kind} {name} of version {version}: {_detail(error)}; where it is "
                "there already with other content (other --notify, say), register another commit"
            ) from error
        except FlyteException as error:
            raise RegistrationError(
                f"{kind} {name} could not be registered: {_detail(error)}; run again, what is "
                "registered stays"
            ) from error
    click.echo(f"{len(ordered)} entities registered in {settings.project}/{settings.domain}")


def _activate(remote: FlyteRemote, project: str, domain: str, version: str) -> None:
    """Make this version the one that schedules and callers by name use."""
    from flytekit.clients.grpc_utils.deadline_interceptor import scoped_grpc_deadline
    from flytekit.exceptions.base import FlyteException
    from flytekit.models.core.identifier import Identifier, ResourceType

    from workflows.launching import LAUNCH_PLANS

    for name in LAUNCH_PLANS:
        ident = Identifier(ResourceType.LAUNCH_PLAN, project, domain, name, version)
        try:
            with scoped_grpc_deadline(CALL_SECONDS):
                remote.activate_launchplan(ident)
        except FlyteException as error:
            raise RegistrationError(
                f"launch plan {name} could not be activated: {_detail(error)}; run again"
            ) from error
    click.echo(f"active: {', '.join(LAUNCH_PLANS)}")


def _detail(error: Exception) -> str:
    """What the server said, which flytekit keeps as the cause."""
    details = getattr(error.__cause__, "details", None)
    said = details() if callable(details) else ""
    return str(said or error or type(error).__name__)


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
