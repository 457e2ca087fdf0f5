"""The frame of a stage and the cache key of a task."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
from flytekit.core.cache import VersionParameters
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.types.directory import FlyteDirectory
from mlflow import MlflowClient
from s3_server import flyte_variables, s3_server

from engine.errors import DataError
from engine.stages.fetch import resolve
from engine.stages.plan import open_run
from engine.stages.settings import RunContext
from engine.stages.stage import execution_tags, library_versions, shared, stage
from engine.storage.artifacts import read_manifest
from engine.storage.filesystem import Files
from engine.tracking import Tracker
from tasks.host import SourcesPolicy, StageError, artifact, directory, flyte_host
from tasks.inputs import RLHFConfig


def version(image: str = "image:1") -> str:
    parameters: VersionParameters[..., None] = VersionParameters(
        func=lambda: None, container_image=image
    )
    return SourcesPolicy().get_version("", parameters)


def test_the_cache_version_is_stable() -> None:
    assert version() == version()


def test_another_image_is_another_version() -> None:
    assert version("image:1") != version("image:2")


@pytest.mark.parametrize("library", ["torch", "peft", "bitsandbytes"])
def test_another_library_is_another_version(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    before, real = version(), metadata.version
    assert f"{library}=={real(library)}" in library_versions()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0" if name == library else real(name))
    monkeypatch.setattr("tasks.host.library_versions", library_versions.__wrapped__)  # not cached
    assert version() != before


def test_other_sources_are_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = version()
    monkeypatch.setattr("tasks.host.sources_digest", lambda: "another")
    assert version() != before


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> str:
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    shutil.copy(mlflow_store, store)
    return f"sqlite:///{store}"


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
    with flyte_host(), stage("dataset", run, {"seed": 1}) as this:
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


LOWER_LR = [{"step": 40, "setting": "rl.actor.optim.lr", "before": 1e-3, "after": 1e-4}]


def test_a_stage_publishes_with_its_run_and_its_time(run: RunContext, uri: str) -> None:
    with stage("dataset", run, {"seed": 1}) as this:
        (this.folder / "rows.txt").write_text("whole")
        this.tracked.log_metrics({"reward/mean": 0.25}, step=1)
        this.tracked.log_metrics({"reward/mean": 0.5}, step=2)
        path = this.publish({"rows": 1.0, "reward/mean": 0.5}, LOWER_LR).local()
    assert (path / "rows.txt").read_text() == "whole"
    stored = MlflowClient(uri).get_run(this.tracked.run_id).data
    assert stored.metrics.keys() == {"rows", "seconds", "reward/mean"}, "a metric is there twice"
    assert stored.metrics["rows"] == 1.0
    assert stored.metrics["seconds"] >= 0
    rewards = MlflowClient(uri).get_metric_history(this.tracked.run_id, "reward/mean")
    assert [(p.step, p.value) for p in rewards] == [(1, 0.25), (2, 0.5)]
    assert read_manifest(path).metrics.keys() == {"rows", "seconds", "reward/mean"}
    assert read_manifest(path).config == {"seed": 1, "changed_settings": LOWER_LR}
    assert stored.params == {"seed": "1"}


def test_a_stage_names_the_splits_that_it_reads_by_the_digests_of_their_maker(
    run: RunContext, uri: str
) -> None:
    with stage("dataset", run, {"seed": 1}) as maker:
        for split in ("train", "test"):
            frame = pd.DataFrame({"prompt": [split, "b"]})
            frame.to_parquet(maker.folder / f"{split}.parquet", index=False)
        maker.log_splits(maker.folder, ("train", "test"), "arithmetic://")
        made = maker.publish({})
    with stage("rl", run, {"seed": 1}) as reader:
        folder = reader.load_parent("dataset", made)
        reader.log_splits(folder, ("train",))

    def inputs(run_id: str) -> dict[str, tuple[str, str]]:
        found = MlflowClient(uri).get_run(run_id).inputs
        return {i.dataset.name: (i.dataset.digest, i.tags[0].value) for i in found.dataset_inputs}

    digest = read_manifest(folder).files["train.parquet"].sha256[:32]
    assert inputs(maker.tracked.run_id).keys() == {"train", "test"}
    assert inputs(maker.tracked.run_id)["train"] == (digest, "train")
    assert inputs(reader.tracked.run_id) == {"train": (digest, "train")}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A shared store on a real S3 server."""
    for variable in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with s3_server() as endpoint:
        for name, value in flyte_variables(endpoint).items():
            monkeypatch.setenv(name, value)
        root = f"s3://flyte/{tmp_path.name}"
        filesystem = Files(root).fs
        filesystem.mkdir("flyte")
        monkeypatch.setenv("HYBRIDFLYTE_STORE", root)
        yield root


def test_flyte_is_handed_the_address_in_the_store_and_copies_nothing(
    run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with stage("dataset", run, {"seed": 1}) as this:
        (this.folder / "rows.txt").write_text("whole")
        published = this.publish({"rows": 1.0})
    output = directory(lambda: published)
    manifest = read_manifest(str(output.path))
    assert output.path == f"{store}/artifacts/dataset/{manifest.digest[:16]}"
    # As in a pod, where flytekit uploads what is a folder of the machine.
    context = FlyteContextManager.current_context()
    in_a_pod = context.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    raw = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    builder = context.with_execution_state(in_a_pod).with_file_access(raw)
    with FlyteContextManager.with_context(builder) as pod:
        kind = TypeEngine.to_literal_type(FlyteDirectory)
        literal = TypeEngine.to_literal(pod, output, FlyteDirectory, kind)
        assert literal.scalar.blob.uri == output.path
        assert [p for p in (tmp_path / "raw").rglob("*") if p.is_file()] == []
        # The next task, in a pod that has nothing.
        monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "another"))
        given = TypeEngine.to_python_value(pod, literal, FlyteDirectory)
        with stage("sft", run, {"seed": 1}) as next_one:
            folder = next_one.load_parent("dataset", artifact(given))
    assert folder == tmp_path / "another" / "artifacts" / "dataset" / manifest.digest[:16]
    assert (folder / "rows.txt").read_text() == "whole"
    assert [parent.uri for parent in next_one.parents] == [output.path]


def test_a_local_artifact_as_input_goes_to_the_store_for_its_children(
    run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYBRIDFLYTE_STORE")
    with stage("dataset", run, {"seed": 1}) as this:
        (this.folder / "rows.txt").write_text("whole")
        path = this.publish({"rows": 1.0}).local()
    monkeypatch.setenv("HYBRIDFLYTE_STORE", store)
    with stage("sft", run, {"seed": 1}) as next_one:
        next_one.load_parent("dataset", artifact(FlyteDirectory(str(path))))
    (parent,) = next_one.parents
    assert parent.uri == f"{store}/artifacts/dataset/{path.name}"
    assert read_manifest(parent.uri).own_digest == parent.manifest


def test_a_champion_is_fetched_from_the_store(
    run: RunContext, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with stage("rl", run, {"seed": 1}) as this:
        (this.folder / "model.safetensors").write_text("weights")
        address = this.publish({"reward": 1.0}).uri
    folder = tmp_path / "hybridflyte" / address.removeprefix(f"{store}/")
    tracker = Tracker()
    version = tracker.register_model(folder, f"policy-{tmp_path.name}", run.mlflow_run)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "another"))
    found = resolve(f"models:/policy-{tmp_path.name}/{version}", "candidate", run.experiment)
    assert found == tmp_path / "another" / address.removeprefix(f"{store}/")
    assert shared(found).uri == address


def test_an_mlflow_run_leads_to_its_flyte_execution(
    run: RunContext, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert execution_tags("run-1") == {"flyte.execution": "run-1"}
    context = FlyteContextManager.current_context()
    name = WorkflowExecutionIdentifier("hybridflyte", "production", "f1a2b3")
    pod = context.user_space_params.builder()
    pod.execution_id = name
    state = context.new_execution_state().with_params(user_space_params=pod.build())
    page = "https://flyte.example.com/console/projects/hybridflyte/domains/production"
    page += "/executions/f1a2b3"
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        with flyte_host():
            assert execution_tags("f1a2b3") == {"flyte.execution": "f1a2b3"}
        monkeypatch.setenv("FLYTE_PLATFORM_CONSOLE_ENDPOINT", "https://flyte.example.com/")
        with flyte_host(), stage("sft", run, {"seed": 1}) as this:
            pass
    tags = MlflowClient(uri).get_run(this.tracked.run_id).data.tags
    assert tags["flyte.execution"] == "f1a2b3"
    assert tags["flyte.url"] == page
    assert tags["mlflow.note.content"] == f"[Flyte execution f1a2b3]({page})"


def test_a_task_leads_to_its_mlflow_run(
    run: RunContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decks = FlyteContextManager.current_context().user_space_params.decks
    before = len(decks)
    with flyte_host(), stage("sft", run, {"seed": 1}):
        pass
    assert "MLflow run" not in capsys.readouterr().out, "SQLite has no pages"
    assert len(decks) == before
    monkeypatch.setenv("HYBRIDFLYTE_MLFLOW_URL", "https://mlflow.example.com")
    with flyte_host(), stage("sft", run, {"seed": 1}) as this:
        experiment = MlflowClient(Tracker().uri).get_run(this.tracked.run_id).info.experiment_id
    page = f"https://mlflow.example.com/#/experiments/{experiment}/runs/{this.tracked.run_id}"
    assert f"sft: MLflow run {page}\n" in capsys.readouterr().out
    assert decks[-1].name == "MLflow"
    assert f'<a href="{page}">' in decks[-1].html
    del decks[before:]


def test_every_node_s_inputs_lead_to_the_parent_run(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert open_run(RLHFConfig(), "d", "rlhf").mlflow_url == ""
    monkeypatch.setenv("HYBRIDFLYTE_MLFLOW_URL", "https://mlflow.example.com")
    run = open_run(RLHFConfig(), "d", "rlhf")
    experiment = MlflowClient(uri).get_run(run.mlflow_run).info.experiment_id
    page = f"https://mlflow.example.com/#/experiments/{experiment}/runs/{run.mlflow_run}"
    assert run.mlflow_url == page
