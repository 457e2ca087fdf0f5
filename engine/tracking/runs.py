"""MLflow runs: one parent run a pipeline, and one nested run a stage.

Retries: a stage is known by its parent run, its name and an attempt key. When it is opened again (a
Flyte retry), the runs of earlier attempts are moved to MLflow's trash and a new one begins, so that
each step's metrics are there once, and a lost attempt can't write any more. A run that holds the
files of a registered version stays: `mlflow gc` would delete them with it.

A command line's run has no parent, and is opened again by its id when its checkpoints are resumed.
MLflow can't take back a point, so a step that is done again keeps the values that it had.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import TrackingError
from engine.redaction import redact
from engine.storage.filesystem import home
from engine.tracking.connection import Connection, parameters
from engine.tracking.connection import name as metric_name
from engine.tracking.connection import tags as tag_texts
from engine.tracking.model_versions import ModelRegistry, tolerated

if TYPE_CHECKING:
    from mlflow.entities import Metric


FLUSH_SECONDS = 2.0
BATCH = 1000  # points, the most that MLflow takes in one call
MAX_DIGEST = 36  # characters, MLflow's limit

_log = logging.getLogger(__name__)


class StageRun:
    """An open run. `log_metrics` only appends to a list; a thread sends it every two seconds."""

    def __init__(self, connection: Connection, run_id: str, reopened: bool = False) -> None:
        """`reopened`: the run has points of an earlier process, which are not sent again."""
        self.run_id = run_id
        self.logged: set[str] = set()  # names of the metrics so far
        self._connection = connection
        self._reopened = reopened
        self._last_steps: dict[str, int] = {}  # of an earlier process, by metric
        self._pending: list[Metric] = []
        self._lock = threading.Lock()  # guards _pending
        self._sending = threading.Lock()  # one sender at a time, so that points stay in order
        self._closed = threading.Event()
        self._warned = False
        self._sender = threading.Thread(target=self._send_often, name="mlflow-metrics", daemon=True)
        self._sender.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Record values at a step, in microseconds; `pass@1` is stored as `pass_at_1`."""
        from mlflow.entities import Metric

        self.logged |= metrics.keys()
        now = int(time.time() * 1000)
        points = [Metric(metric_name(k), float(v), now, step) for k, v in metrics.items()]
        with self._lock:
            self._pending += points

    def flush(self) -> None:
        """Send what is buffered now; on TrackingError the points stay in the buffer."""
        with self._sending:
            while batch := self._pending[:BATCH]:
                with self._connection.translated("write metrics"):
                    points = [point for point in batch if not self._is_known(point)]
                    self._connection.client.log_batch(self.run_id, metrics=points)
                with self._lock:
                    del self._pending[: len(batch)]

    def _is_known(self, point: Metric) -> bool:
        """Tell whether an earlier process has logged this metric at this step."""
        if not self._reopened:
            return False
        if point.key not in self._last_steps:
            history = self._connection.client.get_metric_history(self.run_id, point.key)
            self._last_steps[point.key] = max((logged.step for logged in history), default=-1)
        return point.step <= self._last_steps[point.key]

    def log_dataset(self, file: Path, name: str, digest: str, uri: str) -> None:
        """Record a Parquet file with the digest of its content as an input; `uri`: its source."""
        import pyarrow.parquet as pq
        from mlflow.entities import Dataset, DatasetInput, InputTag

        with contextlib.closing(pq.ParquetFile(file)) as parquet:
            columns = [{"name": c.name, "type": str(c.type)} for c in parquet.schema_arrow]
            profile = {"digest": digest, "num_rows": parquet.metadata.num_rows}
        source = redact(uri)
        dataset = Dataset(
            name=name[:500],
            digest=digest[:MAX_DIGEST],
            source_type="s3" if source.startswith("s3://") else "local",
            source=json.dumps({"uri": source}),
            schema=json.dumps({"mlflow_colspec": columns}),
            profile=json.dumps(profile),
        )
        inputs = [DatasetInput(dataset, [InputTag("mlflow.data.context", name)])]
        with self._connection.translated("record a dataset"):
            self._connection.client.log_inputs(self.run_id, inputs)

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

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags on the run."""
        with self._connection.translated("write tags"):
            for key, value in tag_texts(tags).items():
                self._connection.client.set_tag(self.run_id, key, value)

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED; what can't be sent is in `home()/unsent`."""
        self._closed.set()
        self._sender.join(timeout=FLUSH_SECONDS)
        try:
            self.flush()
            with self._connection.translated("end the run"):
                self._connection.client.set_terminated(self.run_id, status)
        except TrackingError as error:
            path = home() / "unsent" / f"{self.run_id}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, path.open("a") as file:
                file.writelines(json.dumps(dict(point)) + "\n" for point in self._pending)
                self._pending.clear()
            _log.warning("%s; unsent metrics are in %s", error, path)

    def _send_often(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except TrackingError as error:
                if not self._warned:
                    _log.warning("%s; metrics wait in memory and are sent again", error)
                self._warned = True


STATUSES = ("FINISHED", "FAILED", "KILLED")
PARENT_TAG = "mlflow.parentRunId"
NAME_TAG = "mlflow.runName"
SOURCE_TAG = "mlflow.source.name"
KIND_TAG = "hybridflyte.kind"
STAGE_TAG = "hybridflyte.stage"
KEY_TAG = "hybridflyte.key"
RUN_TAG = "hybridflyte.run"  # a workflow's run id, as it prints it
ERROR_TAG = "hybridflyte.error"
CHANGED_TAG = "hybridflyte.changed_settings"  # of a resumed run: MLflow's parameters are for ever
PARAMETERS_A_CALL = 100


class Tracker(ModelRegistry):
    """Pipelines and stages in one experiment of one MLflow store."""

    def start_pipeline(
        self,
        name: str,
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, object] | None = None,
        key: str = "",
    ) -> str:
        """Open a pipeline's parent run, with a parameter a section of `params`; return its id.

        With a `key` (e.g. the Flyte execution) a run that already has it is opened again.
        """
        run_tags = {KIND_TAG: "pipeline", KEY_TAG: key}
        with self.translated("start a run"):
            existing = self._find(run_tags) if key else []
            if existing:
                self.client.update_run(existing[0], status="RUNNING")
                return existing[0]
            return self._create(name, params or {}, {**(tags or {}), **run_tags}, by_section=True)

    def finish_pipeline(
        self, run_id: str, status: str = "FINISHED", metrics: Mapping[str, float] | None = None
    ) -> None:
        """Record a pipeline's final metrics and end its run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise TrackingError(f"run status {status!r} is unknown; choose one of {STATUSES}")
        if metrics:
            with self.translated("write metrics"):
                known = self.client.get_run(run_id).data.metrics
                for key, value in metrics.items():
                    if known.get(metric_name(key)) != float(value):  # else a retried call did
                        self.client.log_metric(run_id, metric_name(key), float(value))
        with self.translated("end the run"):
            self.client.set_terminated(run_id, status)

    @contextlib.contextmanager
    def stage(
        self,
        name: str,
        parent_run_id: str = "",
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, object] | None = None,
        attempt_key: str = "",
        earlier_run: str = "",
    ) -> Iterator[StageRun]:
        """Open a nested run for the block; it ends FINISHED, FAILED, or KILLED by Ctrl-C.

        `earlier_run` is the id of a run that is opened again, where it is still there.
        """
        stage_tags = {KIND_TAG: "stage", STAGE_TAG: name, KEY_TAG: attempt_key}
        if parent_run_id:
            stage_tags[PARENT_TAG] = parent_run_id
        with self.translated("start a run"):
            for run_id in self._find(stage_tags) if parent_run_id else ():
                # Runs that hold the files of a registered version stay.
                if not self.client.search_model_versions(f"run_id='{run_id}'", max_results=1):
                    self.client.delete_run(run_id)
            reopened = bool(earlier_run) and self._reopen(earlier_run, params or {})
            run_tags = {**(tags or {}), **stage_tags}
            run_id = earlier_run if reopened else self._create(name, params or {}, run_tags)
            run = StageRun(self, run_id, reopened)
        try:
            yield run
        except (KeyboardInterrupt, SystemExit):
            run.close("KILLED")
            raise
        except BaseException as error:
            with contextlib.suppress(TrackingError):
                run.set_tags({ERROR_TAG: f"{type(error).__name__}: {error}"})
            run.close("FAILED")
            raise
        run.close("FINISHED")

    def active_run(self, run_id: str, otherwise: str) -> str:
        """Return `run_id` where that run is there and not in the trash, else `otherwise`."""
        with self.translated("look up a run"), tolerated("RESOURCE_DOES_NOT_EXIST"):
            if run_id and self.client.get_run(run_id).info.lifecycle_stage == "active":
                return run_id
        return otherwise

    def _reopen(self, run_id: str, params: Mapping[str, object]) -> bool:
        """Open a run again; False where it is gone, or is of another experiment."""
        if not self.active_run(run_id, ""):
            return False
        run = self.client.get_run(run_id)
        if run.info.experiment_id != self.experiment_id:
            return False
        now = parameters(params).items()
        if changed := {k: v for k, v in now if run.data.params.get(k) != v}:
            text = tag_texts({CHANGED_TAG: json.dumps(changed)})[CHANGED_TAG]
            self.client.set_tag(run_id, CHANGED_TAG, text)
        if ERROR_TAG in run.data.tags:
            self.client.delete_tag(run_id, ERROR_TAG)
        self.client.update_run(run_id, status="RUNNING")
        return True

    def _create(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, object],
        by_section: bool = False,
    ) -> str:
        from mlflow.entities import Param

        texts = tag_texts({NAME_TAG: name, SOURCE_TAG: "hybridflyte", **tags})
        run_id = str(self.client.create_run(self.experiment_id, tags=texts).info.run_id)
        points = [Param(k, v) for k, v in parameters(params, by_section).items()]
        for start in range(0, len(points), PARAMETERS_A_CALL):
            self.client.log_batch(run_id, params=points[start : start + PARAMETERS_A_CALL])
        return run_id

    def _find(self, tags: Mapping[str, str]) -> list[str]:
        """Return the ids of the experiment's live runs that have all these tags, newest first."""
        texts = tag_texts(tags)
        quoted = {k: v.replace("'", "''") for k, v in texts.items() if v}
        clauses = [f"tags.`{k}` = '{v}'" for k, v in quoted.items()]
        runs = self.client.search_runs(
            [self.experiment_id], " and ".join(clauses), order_by=["attributes.start_time DESC"]
        )
        # An empty key is no clause of the search, so runs with another key are dropped here.
        return [
            run.info.run_id
            for run in runs
            if all(run.data.tags.get(k, "") == v for k, v in texts.items())
        ]
