"""What all tasks share: the run context, resources, artifacts, errors as one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from flytekit import Resources, current_context
from flytekit.configuration import PlatformConfig
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, ConfigDict

from engine.console import quiet, say
from engine.errors import (
    EngineError,
    PlacementError,
    PreemptedError,
    StorageError,
    TrackingError,
    WorkerError,
)
from engine.redaction import redact_causes
from tasks.flytekit_setup import cache_literal_types, image, load_secrets, with_secrets

if TYPE_CHECKING:
    pass

quiet()
cache_literal_types()

IMAGE = image()

_RETRYABLE = (PlacementError, PreemptedError, StorageError, TrackingError, WorkerError)

SMALL = Resources(cpu="1", mem="2Gi")
LARGE = Resources(cpu="2", mem="6Gi")

# Options of tasks that decide or record something around the stages.
SHORT: dict[str, Any] = {
    "cache": False,
    "requests": SMALL,
    "container_image": IMAGE,
    "retries": 2,
    "timeout": timedelta(minutes=30),
    **with_secrets(),
}


class RunContext(BaseModel):
    """The pipeline run that a task belongs to. Never part of a cache key."""

    model_config = ConfigDict(frozen=True)

    run_id: str  # ours, unique, e.g. "20261121-024512-3f9a"
    mlflow_run: str  # parent run in MLflow
    experiment: str  # MLflow experiment, e.g. "hybridflyte"
    started_at: float  # seconds since the epoch
    mlflow_url: str = ""  # page of the parent run, which Flyte's console shows among the inputs
    logger: tuple[str, ...] = ("console",)  # `tracking.logger`


class StageError(click.ClickException):
    """A failure with a known cause: shown as one sentence, without a traceback."""


@contextlib.contextmanager
def user_facing_errors() -> Iterator[None]:
    """Turn engine errors into task failures that show their message alone.

    On a cluster, errors of machines and services are recoverable: Flyte retries the task.
    """
    try:
        if on_cluster():
            load_secrets()
        yield
    except EngineError as error:
        redact_causes(error)  # which Flyte shows as a traceback
        if on_cluster() and isinstance(error, _RETRYABLE):
            raise FlyteRecoverableException(str(error)) from error
        raise StageError(str(error)) from error


def on_cluster() -> bool:
    """Whether Flyte runs this task, not a person at a terminal."""
    return current_context().execution_id.name not in ("local", "")


def execution_name(run: RunContext) -> str:
    """The Flyte execution, or our own run id where Flyte has none (locally)."""
    name = current_context().execution_id.name
    return run.run_id if name in ("local", "") else name


def execution_tags(execution: str) -> dict[str, str]:
    """MLflow tags that name the Flyte execution, with a link where one is known.

    The link needs the console's address: FLYTE_PLATFORM_CONSOLE_ENDPOINT, or Flyte's own
    configuration file.
    """
    tags = {"flyte.execution": execution}
    console = PlatformConfig.auto().console_endpoint if on_cluster() else None
    if not console:
        return tags
    one = current_context().execution_id
    url = (
        f"{console.rstrip('/')}/console/projects/{one.project}/domains/{one.domain}"
        f"/executions/{one.name}"
    )
    # MLflow's page shows the note, in Markdown, as the run's description.
    return tags | {"flyte.url": url, "mlflow.note.content": f"[Flyte execution {one.name}]({url})"}


def local_artifact(artifact: FlyteDirectory) -> Path:
    """Download an artifact; StorageError where it no longer exists."""
    from engine.storage.artifacts import local_path

    source = str(artifact.remote_source or artifact.path)
    if "://" in source and not source.startswith("s3://"):
        return Path(artifact.download())
    return local_path(source)  # in parallel, and checked by the manifest


def as_output(path: Path) -> FlyteDirectory:
    """Return a published folder as a Flyte output.

    Where there is a shared store, by its address there: nothing is copied again. Elsewhere remote
    executions upload it.
    """
    from engine.storage.artifacts import share

    return FlyteDirectory(share(path))


def echo(line: str) -> None:
    """Print a line."""
    say(line)
