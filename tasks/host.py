"""The Flyte side of a stage: its types, errors, decks, checkpoints, tables and caching."""

import contextlib
import hashlib
import html
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import pandas as pd
import pyarrow.parquet as pq
import rich_click as click
from flytekit import (
    Cache,
    Deck,
    FlyteContext,
    FlyteContextManager,
    Resources,
    StructuredDataset,
    current_context,
    kwtypes,
)
from flytekit.configuration import PlatformConfig
from flytekit.core.cache import CachePolicy, VersionParameters
from flytekit.core.context_manager import ExecutionState
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.deck import DeckField
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models import literals
from flytekit.models.literals import StructuredDatasetMetadata
from flytekit.models.types import StructuredDatasetType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekit.types.structured.structured_dataset import (
    PARQUET,
    StructuredDatasetDecoder,
    StructuredDatasetEncoder,
    StructuredDatasetTransformerEngine,
)
from pandera.pandas import DataFrameSchema

from engine import errors
from engine.console import quiet
from engine.data import rows
from engine.data.contract import check
from engine.redaction import redact_causes
from engine.stages import pods
from engine.stages.stage import (
    Artifact,
    CheckpointPaths,
    Host,
    hosted,
    is_dry_run,
    library_versions,
)
from engine.storage.digests import sources_digest
from tasks import flytekit_setup

quiet()

IMAGE = flytekit_setup.image()


class SourcesPolicy(CachePolicy):
    """Cache version: the sources of `engine/` and `tasks/`, the image and the libraries in it."""

    def get_version(self, salt: str, params: VersionParameters) -> str:
        image = f"{params.container_image or ''}\0{library_versions()}"
        return hashlib.sha256(f"{salt}\0{sources_digest()}\0{image}".encode()).hexdigest()


# By the inputs' content (without the run), the sources and the image.
STAGE_CACHE = Cache(policies=[SourcesPolicy()], ignored_inputs=("run",), serialize=True)

SMALL = Resources(cpu="1", mem="2Gi")

# The tabs of a Deck. flytekit 1.16's others are left out: sources and packages take seconds to
# make, and inputs, which the console shows anyway, would show credentials in settings.
DECKS: dict[str, dict[str, Any]] = {
    "": {},
    "pages": {"enable_deck": True, "deck_fields": (DeckField.TIMELINE, DeckField.OUTPUT)},
    "settings": {"enable_deck": True, "deck_fields": (DeckField.TIMELINE,)},
}


def task_options(stage: str) -> dict[str, Any]:
    """Return flytekit's options of a stage of `engine.stages.pods`, without its machines."""
    options = pods.STAGES[stage]
    return {
        "cache": STAGE_CACHE if options.cached else False,
        "interruptible": options.interruptible or None,
        "requests": Resources(cpu=str(options.cpus), mem=f"{options.memory_gib}Gi"),
        "container_image": IMAGE,
        "retries": options.retries,
        "timeout": options.timeout,
        **flytekit_setup.with_secrets(*options.needs),
        **DECKS[options.shows],
    }


class StageError(click.ClickException):
    """A failure with a known cause: shown as one sentence, without a traceback."""


def on_cluster() -> bool:
    """Tell whether Flyte runs this task, not a person at a terminal."""
    return current_context().execution_id.name not in ("local", "")


class FlyteHost(Host):
    """The running Flyte task, on a cluster or here."""

    def __init__(self) -> None:
        self.execution = current_context().execution_id.name if on_cluster() else ""
        self.dry_run = is_dry_run()

    def execution_link(self) -> str:
        # FLYTE_PLATFORM_CONSOLE_ENDPOINT, or in Flyte's own configuration file.
        console = PlatformConfig.auto().console_endpoint if self.execution else None
        if not console:
            return ""
        run = current_context().execution_id
        where = f"projects/{run.project}/domains/{run.domain}/executions/{run.name}"
        return f"{console.rstrip('/')}/console/{where}"

    def show(self, tab: str, page: str) -> None:
        Deck(tab, page)

    def live_page(self, tab: str) -> Callable[[str], None]:
        return LiveDeck(tab).show

    def publish_pages(self) -> None:
        Deck.publish()

    def checkpoint_paths(self) -> CheckpointPaths | None:
        # The engine writes there itself, sharded and in the background; flytekit's `save` would
        # copy one local folder and block the task. flytekit 1.16 has no public name for these.
        if not self.execution:
            return None
        checkpoint = current_context().checkpoint
        return CheckpointPaths(str(checkpoint._checkpoint_dest), checkpoint._checkpoint_src)


@contextlib.contextmanager
def flyte_host() -> Iterator[None]:
    """Run the block's stages as this Flyte task, which fails with an engine error's message alone.

    On a cluster, errors of machines and services are recoverable: Flyte retries the task.
    """
    try:
        with hosted(FlyteHost()):
            if on_cluster():
                flytekit_setup.load_secrets()
            yield
    except errors.EngineError as error:
        redact_causes(error)  # which Flyte shows as a traceback
        if on_cluster() and isinstance(error, pods.RETRYABLE):
            raise FlyteRecoverableException(str(error)) from error
        raise StageError(str(error)) from error


def artifact(folder: FlyteDirectory) -> Artifact:
    """Return an input of a task as a stage takes it."""
    return Artifact(str(folder.remote_source or folder.path))


def run_body(body: Callable[..., Any], **inputs: Any) -> Any:
    """Call a stage's body with a task's inputs, by name."""
    with flyte_host():
        return body(
            **{k: artifact(v) if isinstance(v, FlyteDirectory) else v for k, v in inputs.items()}
        )


def directory(body: Callable[..., Artifact], **inputs: Any) -> FlyteDirectory:
    """Call a stage's body; return its artifact, which Flyte uploads unless a store has it."""
    return FlyteDirectory(run_body(body, **inputs).uri)


def file(body: Callable[..., Path], **inputs: Any) -> FlyteFile:
    """Call a stage's body; return its file as an output."""
    return FlyteFile(str(run_body(body, **inputs)))


PUBLISH_SECONDS = 60.0  # between two uploads; a Deck has a few megabytes


class LiveDeck(Deck):
    """A tab whose page is replaced while the task runs; made in the task's own thread.

    flytekit 1.16 keeps its context by thread and leaves each published copy in the task's sandbox;
    here it is published from a thread of the engine's, through a sandbox that is removed.
    """

    def __init__(self, name: str) -> None:
        self._page = ""
        self._context = FlyteContextManager.current_context()
        self._live = on_cluster()  # elsewhere the page's own file can be opened
        self._due = 0.0  # of time.monotonic
        super().__init__(name)

    @property
    def html(self) -> str:
        return self._page

    def show(self, page: str) -> None:
        """Replace the page, and upload the Decks where that is due; from any thread."""
        self._page = page
        if not self._live or time.monotonic() < self._due:
            return
        FlyteContextManager.current_context()  # makes this thread a stack of contexts
        access = self._context.file_access
        with tempfile.TemporaryDirectory(prefix="deck-") as folder:
            sandbox = FileAccessProvider(folder, access.raw_output_prefix, access.data_config)
            with FlyteContextManager.with_context(self._context.with_file_access(sandbox)):
                Deck.publish()  # logs what goes wrong, and raises nothing
        self._due = time.monotonic() + PUBLISH_SECONDS


# Tables of artifacts as typed data frames: Flyte's console shows their columns and first rows. With
# a shared store a table's address is passed on, locally its path; only a pod without one uploads.

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
    def write(cls, frame: pd.DataFrame) -> Self:
        """Write a file of no artifact, which one task leaves for the next."""
        access = FlyteContextManager.current_context().file_access
        path = Path(access.get_random_local_path()).with_suffix(".parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path, index=False)
        return cls(path)

    def read(self, schema: DataFrameSchema, name: str) -> pd.DataFrame:
        """Read all columns; DataError, one sentence with `name`, where they break the contract."""
        try:
            frame = pd.read_parquet(self.path)
        except (OSError, ValueError) as error:  # pyarrow's are one or the other
            words = errors.first_line(error)
            raise errors.StorageError(
                f"{name}: the table {self.path} can't be read ({words}); run again with "
                "--overwrite-cache"
            ) from error
        check(frame, schema, name)
        return frame


def as_table(file: TableFile) -> StructuredDataset:
    """Return the file as a task's output."""
    return StructuredDataset(dataframe=file, file_format=PARQUET)


def tables(artifact: Artifact, *names: str) -> list[StructuredDataset]:
    """Return Parquet files of a published artifact as outputs of the task."""
    folder, uri = artifact.local(), artifact.uri
    files = (f"{name}.parquet" for name in names)
    return [as_table(TableFile(folder / f, f"{uri}/{f}" if "://" in uri else "")) for f in files]


class _Encoder(StructuredDatasetEncoder):
    """An encoder that passes on the address of a table."""

    def __init__(self) -> None:
        super().__init__(TableFile, None, PARQUET)

    def encode(
        self,
        ctx: FlyteContext,
        structured_dataset: StructuredDataset,
        structured_dataset_type: StructuredDatasetType,
    ) -> literals.StructuredDataset:
        file = structured_dataset.dataframe
        state, uri = ctx.execution_state, file.uri or str(file.path)
        if not file.uri and state and state.mode == ExecutionState.Mode.TASK_EXECUTION:
            uri = str(ctx.file_access.put_raw_data(uri))
        metadata = StructuredDatasetMetadata(structured_dataset_type)
        return literals.StructuredDataset(uri=uri, metadata=metadata)


class _Decoder(StructuredDatasetDecoder):
    """A decoder that brings a table to this machine."""

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
    """The first rows of a table in a Deck, with shortened texts."""

    def to_html(self, df: TableFile) -> str:
        def shortened(cell: object) -> str:
            text = str(cell)
            return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"

        batch = next(pq.ParquetFile(df.path).iter_batches(batch_size=SHOWN_ROWS), None)
        frame = pd.DataFrame() if batch is None else batch.to_pandas()
        rows = frame.map(shortened).to_html(index=False, border=0)
        return f"<p>{html.escape(df.path.name)}, its first rows</p>{rows}"


StructuredDatasetTransformerEngine.register(_Encoder())
StructuredDatasetTransformerEngine.register(_Decoder())
StructuredDatasetTransformerEngine.register_renderer(TableFile, _Renderer())
