"""Tables of artifacts as typed data frames: Flyte's console shows their columns and first rows.

    class Evaluated(NamedTuple):
        evaluation: FlyteDirectory
        rows_rl: EvaluationRows

    return Evaluated(this.publish(metrics), this.table("rows_rl.parquet"))

A table is a file that the artifact has anyway. With a shared store its address is passed on, and
locally its path; only a pod without a store uploads it. Cells keep the contract
(`engine.data.contract`, pandera), which is checked before the file is written, and by `read`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flytekit import FlyteContext, FlyteContextManager, StructuredDataset, kwtypes
from flytekit.core.context_manager import ExecutionState
from flytekit.models import literals
from flytekit.models.literals import StructuredDatasetMetadata
from flytekit.models.types import StructuredDatasetType
from flytekit.types.structured.structured_dataset import (
    PARQUET,
    StructuredDatasetDecoder,
    StructuredDatasetEncoder,
    StructuredDatasetTransformerEngine,
)

from engine.data import column_types

if TYPE_CHECKING:
    import pandas as pd
    from pandera.pandas import DataFrameSchema

SHOWN_ROWS = 10  # in a Deck
SHOWN_CHARACTERS = 200  # of a cell there

RLPrompts = Annotated[StructuredDataset, kwtypes(**column_types.RL_PROMPTS), PARQUET]
SFTPairs = Annotated[StructuredDataset, kwtypes(**column_types.SFT_PAIRS), PARQUET]
EvaluationRows = Annotated[StructuredDataset, kwtypes(**column_types.EVALUATION_ROWS), PARQUET]


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
