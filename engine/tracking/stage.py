"""One MLflow run while it is open: metrics, datasets, folders, figures, tables.

What lives here: `StageRun` and its buffer. What does not: when a run begins and ends
(`.tracker`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import TrackingError
from engine.redaction import redact
from engine.storage.locations import home
from engine.tracking import values
from engine.tracking.connection import Connection

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from mlflow.entities import Metric

FLUSH_SECONDS = 2.0
BATCH = 1000  # points, the most that MLflow takes in one call
MAX_DIGEST = 36  # characters, MLflow's limit

_log = logging.getLogger(__name__)


class StageRun:
    """An open run. `log_metrics` only appends to a list; a thread sends it every two seconds."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self.run_id = run_id
        self.logged: set[str] = set()  # names of the metrics so far
        self._connection = connection
        self._pending: list[Metric] = []
        self._lock = threading.Lock()  # guards _pending
        self._sending = threading.Lock()  # one sender at a time, so that points stay in order
        self._closed = threading.Event()
        self._warned = False
        self._sender = threading.Thread(target=self._send_often, name="mlflow-metrics", daemon=True)
        self._sender.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Record values at a step. Costs microseconds; a server that is away costs no step.

        Names are put into MLflow's alphabet (`pass@1` is stored as `pass_at_1`).
        """
        from mlflow.entities import Metric

        self.logged |= metrics.keys()
        now = int(time.time() * 1000)
        points = [Metric(values.name(k), float(v), now, step) for k, v in metrics.items()]
        with self._lock:
            self._pending += points

    def flush(self) -> None:
        """Send what is buffered now; on TrackingError the points stay in the buffer."""
        with self._sending:
            while True:
                with self._lock:
                    batch = self._pending[:BATCH]
                if not batch:
                    return
                with self._connection.translated("write metrics"):
                    self._connection.client.log_batch(self.run_id, metrics=batch)
                with self._lock:
                    del self._pending[: len(batch)]

    def log_dataset(
        self,
        data: pd.DataFrame | str | Path,
        name: str,
        digest: str,
        context: str = "training",
        uri: str = "",
    ) -> None:
        """Record an input: a frame, a Parquet file, or any folder or address.

        Columns and row count are recorded for frames and Parquet files. MLflow keeps 36 characters
        of the digest; the whole one is kept in the dataset's profile.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = redact(uri) or ("" if hasattr(data, "columns") else redact(str(data)))
        schema, rows = _describe(data)
        profile = {"digest": digest} | ({} if rows is None else {"num_rows": rows})
        dataset = Dataset(
            name=name[:500],
            digest=digest[:MAX_DIGEST],
            source_type="s3" if source.startswith("s3://") else "local",
            source=json.dumps({"uri": source}),
            schema=json.dumps({"mlflow_colspec": schema}) if schema else None,
            profile=json.dumps(profile),
        )
        tags = [InputTag("mlflow.data.context", context)]
        with self._connection.translated("record a dataset"):
            self._connection.client.log_inputs(self.run_id, [DatasetInput(dataset, tags)])

    def log_folder(self, path: str | Path, artifact_path: str | None = None) -> None:
        """Copy a folder's files into the run's artifacts."""
        if not Path(path).is_dir():
            raise TrackingError(f"can't log {path}: it is not a folder; give the artifact's folder")
        with self._connection.translated("upload a folder"):
            self._connection.client.log_artifacts(self.run_id, str(path), artifact_path)

    def log_file(self, path: str | Path, artifact_path: str | None = None) -> None:
        """Copy a file into the run's artifacts, replacing one of its name."""
        with self._connection.translated("upload a file"):
            self._connection.client.log_artifact(self.run_id, str(path), artifact_path)

    def log_figure(self, figure: Figure, name: str) -> None:
        """Store a matplotlib figure as `name`, e.g. `reward.png`."""
        with self._connection.translated("upload a figure"):
            self._connection.client.log_figure(self.run_id, figure, name)

    def log_table(self, frame: pd.DataFrame, name: str) -> None:
        """Store a frame as `name`, e.g. `samples.json`, which MLflow's UI shows as a table."""
        with self._connection.translated("upload a table"):
            self._connection.client.log_table(self.run_id, frame, name)

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags on the run."""
        with self._connection.translated("write tags"):
            for key, value in values.tags(tags).items():
                self._connection.client.set_tag(self.run_id, key, value)

    def close(self, status: str) -> None:
        """Send the rest and end the run as FINISHED, FAILED or KILLED.

        A store that is gone by now must not cost the work that was done: the points are then saved
        below `home()/unsent` and a warning names the file.
        """
        self._closed.set()
        self._sender.join(timeout=FLUSH_SECONDS)
        try:
            self.flush()
            with self._connection.translated("end the run"):
                self._connection.client.set_terminated(self.run_id, status)
        except TrackingError as error:
            _log.warning("%s; unsent metrics are in %s", error, self._save_unsent())

    def _send_often(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except TrackingError as error:
                if not self._warned:
                    _log.warning("%s; metrics wait in memory and are sent again", error)
                self._warned = True

    def _save_unsent(self) -> Path:
        """Write the buffered points as JSON lines."""
        path = home() / "unsent" / f"{self.run_id}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, path.open("a") as file:
            for point in self._pending:
                file.write(json.dumps(dict(point)) + "\n")
            self._pending.clear()
        return path


def _describe(data: pd.DataFrame | str | Path) -> tuple[list[dict[str, str]], int | None]:
    """Return columns and row count where they can be had without reading the data."""
    if not isinstance(data, str | Path):
        columns = [{"name": str(k), "type": str(v)} for k, v in data.dtypes.items()]
        return columns, len(data)
    if str(data).endswith(".parquet") and Path(data).is_file():
        import pyarrow.parquet as pq

        with contextlib.closing(pq.ParquetFile(data)) as file:
            columns = [{"name": f.name, "type": str(f.type)} for f in file.schema_arrow]
            return columns, file.metadata.num_rows
    return [], None
