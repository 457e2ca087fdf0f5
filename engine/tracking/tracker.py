"""The runs of a pipeline: one parent run, one nested run a stage.

Retries. A stage is known by its parent run, its name and an attempt key. When it is opened again
(a Flyte retry, a pre-empted attempt), the runs of earlier attempts are moved to MLflow's trash and
a new one begins, so that each step's metrics are there once and always from one attempt. A lost
attempt that is still alive somewhere can't write to its run any more. A parent run with a key is
opened again instead, because its stages belong to it. A run that holds the files of a registered
version is never moved to the trash: `mlflow gc` would delete them with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from engine.errors import TrackingError
from engine.tracking import values
from engine.tracking.registry import ModelRegistry
from engine.tracking.stage import StageRun

STATUSES = ("FINISHED", "FAILED", "KILLED")
PARENT_TAG = "mlflow.parentRunId"
NAME_TAG = "mlflow.runName"
SOURCE_TAG = "mlflow.source.name"
KIND_TAG = "hybridflyte.kind"
STAGE_TAG = "hybridflyte.stage"
KEY_TAG = "hybridflyte.key"
ERROR_TAG = "hybridflyte.error"
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
        """Open the parent run of a pipeline and return its id.

        It gets one parameter a section of `params`; a stage's run gets its settings one by one.
        With a `key` (e.g. the Flyte execution) a run that already has it is opened again.
        """
        own = {KIND_TAG: "pipeline", KEY_TAG: key}
        with self.translated("start a run"):
            known = self._find({KIND_TAG: "pipeline", KEY_TAG: key}) if key else []
            if known:
                self.client.update_run(known[0], status="RUNNING")
                return known[0]
            return self._create(name, params or {}, {**(tags or {}), **own}, by_section=True)

    def finish_pipeline(
        self, run_id: str, status: str = "FINISHED", metrics: Mapping[str, float] | None = None
    ) -> None:
        """Record a pipeline's final metrics and end its run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise TrackingError(f"run status {status!r} is unknown; choose one of {STATUSES}")
        if metrics:
            self._log_once(run_id, metrics)
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
    ) -> Iterator[StageRun]:
        """Open a nested run for the block; it ends FINISHED, FAILED, or KILLED by Ctrl-C or exit.

        See the module's text for what happens to earlier attempts of the same stage.
        """
        own = {KIND_TAG: "stage", STAGE_TAG: name, KEY_TAG: attempt_key}
        if parent_run_id:
            own[PARENT_TAG] = parent_run_id
        with self.translated("start a run"):
            earlier = self._find(own) if parent_run_id else []
            for run_id in earlier:
                if not self._holds_version(run_id):
                    self.client.delete_run(run_id)
            run = StageRun(self, self._create(name, params or {}, {**(tags or {}), **own}))
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
        from mlflow.exceptions import MlflowException

        if not run_id:
            return otherwise
        with self.translated("look up a run"):
            try:
                found = self.client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return otherwise
        return run_id if found.info.lifecycle_stage == "active" else otherwise

    def _holds_version(self, run_id: str) -> bool:
        """Tell whether a registered version's files are among this run's artifacts."""
        return bool(self.client.search_model_versions(f"run_id='{run_id}'", max_results=1))

    def _create(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, object],
        by_section: bool = False,
    ) -> str:
        """Create a run with its tags and parameters."""
        from mlflow.entities import Param

        texts = values.tags({NAME_TAG: name, SOURCE_TAG: "hybridflyte", **tags})
        run_id = str(self.client.create_run(self.experiment_id, tags=texts).info.run_id)
        points = [Param(k, v) for k, v in values.parameters(params, by_section).items()]
        for start in range(0, len(points), PARAMETERS_A_CALL):
            self.client.log_batch(run_id, params=points[start : start + PARAMETERS_A_CALL])
        return run_id

    def _find(self, tags: Mapping[str, str]) -> list[str]:
        """Return the ids of the experiment's live runs that have all these tags, newest first."""
        wanted = {k: v for k, v in values.tags(tags).items() if v}
        clauses = [f"tags.`{k}` = '{_quote(v)}'" for k, v in wanted.items()]
        found = self.client.search_runs(
            [self.experiment_id], " and ".join(clauses), order_by=["attributes.start_time DESC"]
        )
        # An empty key is no clause of the search, so runs with another key are dropped here.
        return [
            run.info.run_id
            for run in found
            if all(run.data.tags.get(k, "") == v for k, v in values.tags(tags).items())
        ]

    def _log_once(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Record values at step 0, leaving out those that a retried call recorded already."""
        with self.translated("write metrics"):
            known = self.client.get_run(run_id).data.metrics
            for key, value in metrics.items():
                if known.get(values.name(key)) != float(value):
                    self.client.log_metric(run_id, values.name(key), float(value))


def _quote(text: str) -> str:
    return text.replace("'", "''")
