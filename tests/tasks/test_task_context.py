"""The frame of a stage and the cache key of a task."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from flytekit.core.cache import VersionParameters
from mlflow import MlflowClient

from engine.errors import DataError
from engine.tracking import Tracker
from tasks.context import RunContext, SourcesPolicy, StageError, library_versions, stage


def version(image: str = "image:1") -> str:
    parameters: VersionParameters[..., None] = VersionParameters(
        func=lambda: None, container_image=image
    )
    return SourcesPolicy().get_version("", parameters)


def test_the_cache_version_is_stable() -> None:
    assert version() == version()


def test_another_image_is_another_version() -> None:
    assert version("image:1") != version("image:2")


def test_another_library_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before, real = version(), metadata.version
    assert f"torch=={real('torch')}" in library_versions()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0" if name == "torch" else real(name))
    assert version() != before


def test_other_sources_are_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = version()
    monkeypatch.setattr("tasks.context.sources_digest", lambda: "another")
    assert version() != before


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def run(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunContext]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "hybridflyte"))
    parent = Tracker().start_pipeline("p")
    with contextlib.chdir(tmp_path):
        yield RunContext(
            run_id=tmp_path.name, mlflow_run=parent, experiment="hybridflyte", started_at=0.0
        )


def raise_in(run: RunContext, error: BaseException) -> None:
    with stage("dataset", run, {"seed": 1}) as this:
        (this.folder / "half.txt").write_text("half")
        raise error


@pytest.mark.parametrize(
    ("error", "shown", "status"),
    [
        (DataError("row 3 has no answer"), StageError, "FAILED"),
        (OSError(errno.ENOSPC, "No space left on device"), StageError, "FAILED"),
        (RuntimeError("a bug of ours"), RuntimeError, "FAILED"),
        (KeyboardInterrupt(), KeyboardInterrupt, "KILLED"),
    ],
)
def test_however_a_stage_ends_nothing_is_left(
    run: RunContext,
    uri: str,
    error: BaseException,
    shown: type[BaseException],
    status: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(shown):
        raise_in(run, error)
    assert [path for path in Path("hybridflyte").rglob("*") if path.is_file()] == []
    client = MlflowClient(uri)
    parent = client.get_run(run.mlflow_run)
    nested = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.mlflow_run}'"
    )
    assert [r.info.status for r in (parent, *nested)] == [status, status]
    assert ("interrupted" in capsys.readouterr().out) == (status == "KILLED")


def test_a_stage_publishes_with_its_run_and_its_time(run: RunContext, uri: str) -> None:
    with stage("dataset", run, {"seed": 1}) as this:
        (this.folder / "rows.txt").write_text("whole")
        path = Path(this.publish({"rows": 1.0}).path)
    assert (path / "rows.txt").read_text() == "whole"
    stored = MlflowClient(uri).get_run(this.tracked.run_id).data
    assert stored.metrics["rows"] == 1.0
    assert stored.metrics["seconds"] >= 0
    assert stored.params == {"seed": "1"}
