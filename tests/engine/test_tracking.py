"""What the tracker promises, on SQLite, and on a real MLflow server over it and PostgreSQL."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow_server import mlflow_server
from postgres import postgres
from thorough import and_slow

from engine.errors import LineageError, StorageError, TrackingError
from engine.lineage.__main__ import main as lineage_command
from engine.promotion.champions import Champions, LockTimeouts
from engine.storage.artifacts import Draft, publish, staging, verify
from engine.tracking import Tracker
from engine.tracking.connection import flatten, name, parameters, tags


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> str:
    """One SQLite store for the module."""
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    shutil.copy(mlflow_store, store)
    return f"sqlite:///{store}"


@pytest.fixture(scope="module")
def on_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real `mlflow server` over a real PostgreSQL, with artifacts served by it."""
    with postgres() as store, mlflow_server(store, tmp_path_factory.mktemp("server")) as uri:
        yield uri


STORES = {"sqlite": "database", "server": "mlflow_address", "postgres": "on_postgres"}


@pytest.fixture(params=and_slow(["sqlite", "postgres"], ["server"]))
def tracker(request: pytest.FixtureRequest) -> Tracker:
    """A tracker in an experiment of its own."""
    uri = request.getfixturevalue(STORES[request.param])
    return Tracker(uri, experiment=request.node.name)


@pytest.fixture
def local(database: str, request: pytest.FixtureRequest) -> Tracker:
    return Tracker(database, experiment=request.node.name)


def make_model(text: str = "weights") -> Path:
    with staging("rl") as folder:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
        (folder / "model.safetensors").write_text(text)
        return publish(folder, Draft(kind="rl", metrics={"reward": 0.5}))


def history(tracker: Tracker, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((p.step, p.value) for p in tracker.client.get_metric_history(run_id, key))


# Values


def test_mlflow_is_told_no_credentials() -> None:
    options = {"options": {"api_key": "hunter2", "url": "http://a:hunter2@b"}}
    shown = {"rl.options.api_key": "***", "rl.options.url": "http://a:***@b"}
    assert parameters({"rl": options}) == shown
    assert tags({"error": "ConfigError: url='http://a:hunter2@b'"}) == {
        "error": "ConfigError: url='http://a:***@b'"
    }


def test_nested_settings_become_dotted_parameters() -> None:
    nested = {"rl": {"actor": {"lr": 0.1}, "empty": {}}, "betas": (0.9, 0.95), "none": None}
    assert flatten(nested)["rl.actor.lr"] == 0.1
    assert parameters(nested) == {
        "rl.actor.lr": "0.1",
        "rl.empty": "{}",
        "betas": "[0.9, 0.95]",
        "none": "None",
    }
    assert parameters(nested, by_section=True) == {
        "rl": '{"actor": {"lr": 0.1}, "empty": {}}',
        "betas": "[0.9, 0.95]",
        "none": "None",
    }
    assert parameters({"x": "y" * 9000})["x"] == "y" * 5999 + "…"
    assert name("val/pass@1 (%)") == "val/pass_at_1 ___"


# Runs


def test_a_pipeline_is_one_parent_with_nested_stages(tracker: Tracker, tmp_path: Path) -> None:
    params = {"rl": {"lr": 1e-3}, **{f"p{i}": i for i in range(150)}, "long": "x" * 9000}
    parent = tracker.start_pipeline("rlhf", params, {"flyte": "e1"})
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "note.txt").write_text("hi")
    with tracker.stage("sft", parent, {"optim": {"lr": 3e-3}}, {"device": "cpu"}) as run:
        for step in range(30):
            run.log_metrics({"loss": 1.0 / (step + 1), "pass@1": 0.5, "kl": math.nan}, step)
        run.log_folder(tmp_path / "plots", "plots")
    tracker.finish_pipeline(parent, metrics={"gain": 0.25})
    tracker.finish_pipeline(parent, metrics={"gain": 0.25})

    stage = tracker.client.get_run(run.run_id)
    assert stage.info.status == "FINISHED"
    assert stage.data.tags["mlflow.parentRunId"] == parent
    assert stage.data.tags["device"] == "cpu"
    assert stage.data.params == {"optim.lr": "0.003"}
    assert history(tracker, run.run_id, "loss") == [(s, 1.0 / (s + 1)) for s in range(30)]
    assert stage.data.metrics["pass_at_1"] == 0.5
    assert math.isnan(stage.data.metrics["kl"])
    files = {f.path for f in tracker.client.list_artifacts(run.run_id, "plots")}
    assert files == {"plots/note.txt"}

    pipeline = tracker.client.get_run(parent)
    assert pipeline.info.status == "FINISHED"
    assert len(pipeline.data.params) == 152
    assert json.loads(pipeline.data.params["rl"]) == {"lr": 1e-3}, "nested by section"
    assert len(pipeline.data.params["long"]) == 6000
    assert history(tracker, parent, "gain") == [(0, 0.25)]


def test_datasets_are_inputs_with_digests(tracker: Tracker, tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pd.DataFrame({"prompt": ["a", "b"], "score": [1.0, 2.0]}).to_parquet(file)
    with tracker.stage("rl") as run:
        run.log_dataset(file, "train", "ab" * 32, "s3://bucket/x")
        run.log_dataset(file, "test", "cd" * 16, str(file))
    inputs = tracker.client.get_run(run.run_id).inputs.dataset_inputs
    found = {i.dataset.name: (i.dataset, {t.key: t.value for t in i.tags}) for i in inputs}
    assert found.keys() == {"train", "test"}
    assert found["train"][0].digest == ("ab" * 32)[:36]
    assert json.loads(found["train"][0].profile) == {"digest": "ab" * 32, "num_rows": 2}
    assert found["train"][0].source_type == "s3"
    assert found["test"][1] == {"mlflow.data.context": "test"}
    columns = json.loads(found["test"][0].schema)["mlflow_colspec"]
    assert [c["name"] for c in columns] == ["prompt", "score"]
    assert json.loads(found["test"][0].source) == {"uri": str(file)}


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("bad row 3"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (None, "FINISHED")],
)
def test_a_stage_ends_as_it_ended(local: Tracker, error: BaseException | None, status: str) -> None:
    runs: list[str] = []

    def body() -> None:
        with local.stage("sft") as run:
            runs.append(run.run_id)
            run.log_metrics({"loss": 2.0}, 7)
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    ended = local.client.get_run(runs[0])
    assert ended.info.status == status
    assert history(local, runs[0], "loss") == [(7, 2.0)]
    if status == "FAILED":
        assert ended.data.tags["hybridflyte.error"] == "ValueError: bad row 3"


def test_a_retry_takes_the_place_of_the_earlier_attempt(tracker: Tracker) -> None:
    parent = tracker.start_pipeline("rlhf", key="execution-1")
    with tracker.stage("sft", parent) as other:
        other.log_metrics({"loss": 9.0})

    def attempt(fail: bool, key: str = "k1") -> str:
        with tracker.stage("rl", parent, attempt_key=key) as run:
            for step in range(2 if fail else 3):
                run.log_metrics({"reward": step}, step)
            if fail:
                raise RuntimeError("pre-empted")
        return run.run_id

    with pytest.raises(RuntimeError):
        attempt(fail=True)
    assert tracker.start_pipeline("rlhf", key="execution-1") == parent
    second = attempt(fail=False)
    another_key = attempt(fail=False, key="it's another")
    live = tracker.client.search_runs([tracker.experiment_id])
    assert {r.info.run_id for r in live} == {parent, other.run_id, second, another_key}
    assert history(tracker, second, "reward") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert tracker.start_pipeline("rlhf", key="execution-2") != parent


def test_a_resumed_run_of_a_command_line_goes_on_in_its_run(
    mlflow_address: str, request: pytest.FixtureRequest
) -> None:
    tracker = Tracker(mlflow_address, experiment=request.node.name)

    def attempt(steps: Sequence[int], earlier: str, offset: float = 0.0, lr: float = 0.1) -> str:
        with tracker.stage("ppo", params={"lr": lr, "n": 8}, earlier_run=earlier) as run:
            for step in steps:
                run.log_metrics({"reward": step + offset, "lr@1": 0.5}, step)
            if max(steps) < 4:
                raise RuntimeError("the machine is gone")
        return run.run_id

    with pytest.raises(RuntimeError):
        attempt([1, 2, 3], "")
    (first,) = (run.info.run_id for run in tracker.client.search_runs([tracker.experiment_id]))
    # From the checkpoint of step 2: the whole history, and step 3 once more.
    assert attempt([1, 2, 3, 4], first, offset=10.0, lr=0.2) == first
    assert history(tracker, first, "reward") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 14.0)]
    assert len(history(tracker, first, "lr_at_1")) == 4
    run = tracker.client.get_run(first)
    assert (run.info.status, run.data.params["lr"]) == ("FINISHED", "0.1")
    assert run.data.tags["hybridflyte.changed_settings"] == '{"lr": "0.2"}'
    assert "hybridflyte.error" not in run.data.tags
    # Where it is gone, or of another experiment, there is a new one.
    assert attempt([4], "0" * 32) != first
    elsewhere = Tracker(mlflow_address, experiment=f"{request.node.name}-2")
    with elsewhere.stage("ppo", earlier_run=first) as other:
        pass
    tracker.client.delete_run(first)
    assert first not in (other.run_id, attempt([4], first))


def test_a_run_that_holds_a_registered_model_stays_out_of_the_trash(tracker: Tracker) -> None:
    parent = tracker.start_pipeline("rlhf", key="execution-1")
    with tracker.stage("rl", parent) as lost:
        pass
    with tracker.stage("rl", parent) as holder:
        assert tracker.active_run(lost.run_id, parent) == parent
        assert tracker.active_run("0" * 32, parent) == parent
        assert tracker.active_run("", parent) == parent
        assert tracker.active_run(holder.run_id, parent) == holder.run_id
        tracker.register_model(make_model("kept"), f"kept-{tracker.experiment}", holder.run_id)
    with tracker.stage("rl", parent) as again:
        pass
    live = tracker.client.search_runs([tracker.experiment_id])
    assert {run.info.run_id for run in live} == {parent, holder.run_id, again.run_id}


def test_log_metrics_costs_a_training_loop_nothing(local: Tracker) -> None:
    metrics = {f"metric_{i}": float(i) for i in range(20)}
    with local.stage("sft") as run:
        run.log_metrics(metrics, 0)  # the first call imports mlflow's entities
        costs = []
        for step in range(1, 51):
            start = time.perf_counter()
            run.log_metrics(metrics, step)
            costs.append(time.perf_counter() - start)
    assert sorted(costs)[len(costs) // 2] < 1e-3
    assert len(history(local, run.run_id, "metric_7")) == 51


def test_metrics_appear_while_the_stage_runs(local: Tracker) -> None:
    with local.stage("sft") as run:
        run.log_metrics({"loss": 1.0}, 0)
        deadline = time.monotonic() + 15
        while not history(local, run.run_id, "loss"):
            assert time.monotonic() < deadline, "nothing was sent before the stage ended"
            time.sleep(0.2)


def test_a_store_lost_midway_costs_no_work(tmp_path: Path, database: str, caplog: Any) -> None:
    """The database is replaced by rubbish while a stage runs: the stage still ends well."""
    store = tmp_path / "mlflow.db"
    store.write_bytes(Path(database.removeprefix("sqlite:///")).read_bytes())
    tracker = Tracker(f"sqlite:///{store}", "lost")
    with tracker.stage("rl") as run:
        store.write_bytes(b"rubbish " * 1000)
        run.log_metrics({"reward": 0.5}, 3)
    saved = tmp_path / "home" / "unsent" / f"{run.run_id}.jsonl"
    point = json.loads(saved.read_text())
    assert (point["key"], point["value"], point["step"]) == ("reward", 0.5, 3)
    assert str(saved) in caplog.text


def test_the_page_of_a_run_is_known_where_there_is_one(
    local: Tracker, mlflow_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Tracker(mlflow_address, "pages")
    run = remote.start_pipeline("p")
    page = f"/#/experiments/{remote.experiment_id}/runs/{run}"
    assert remote.run_url(run) == mlflow_address + page
    assert local.run_url("r") == ""
    monkeypatch.setenv("HYBRIDFLYTE_MLFLOW_URL", "https://mlflow.example.com/")
    assert remote.run_url(run) == "https://mlflow.example.com" + page
    monkeypatch.setenv("HYBRIDFLYTE_MLFLOW_URL", "https://me:hunter2@mlflow.example.com/")
    assert remote.run_url(run) == "https://mlflow.example.com" + page


# The store


def test_the_default_store_is_local_quiet_and_opened_by_two_processes_at_once(
    tmp_path: Path,
) -> None:
    code = (
        "from engine.tracking import Tracker\n"
        "t = Tracker(); t.check()\n"
        "p = t.start_pipeline('rlhf')\n"
        "with t.stage('sft', p) as run:\n"
        "    t.client.log_text(run.run_id, 'x', 'x.txt')\n"
        "t.finish_pipeline(p)\n"
        "print(run.run_id)\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for child in children:
        out, err = child.communicate(timeout=120)
        assert (child.returncode, err) == (0, "")
        artifact = tmp_path / "mlartifacts" / out.strip() / "artifacts" / "x.txt"
        assert artifact.read_text() == "x"
    assert {p.name for p in tmp_path.iterdir()} == {"mlflow.db", "mlartifacts"}
    tracker = Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert len(tracker.client.search_runs([tracker.experiment_id])) == 4


def test_the_variable_names_the_store(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    assert Tracker().uri == database


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://no-such-host.invalid:5000", "its host name is unknown"),
        ("http://me:hunter2@127.0.0.1:9", "connection refused"),
        ("file:./mlruns", "filesystem tracking backend"),
        ("sqlite:////proc/none/mlflow.db", "No such file or directory"),
    ],
)
def test_an_unreachable_store_is_one_sentence_in_seconds(uri: str, reason: str) -> None:
    import mlflow  # noqa: F401  (its import takes seconds of its own)

    start = time.monotonic()
    with pytest.raises(TrackingError, match=reason) as caught:
        Tracker(uri).check(timeout_s=2)
    assert time.monotonic() - start < 4
    uri = uri.replace("hunter2", "***")
    assert uri in str(caught.value)
    assert "MLFLOW_TRACKING_URI" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        start = time.monotonic()
        with pytest.raises(TrackingError, match="no answer in time"):
            Tracker(f"http://127.0.0.1:{deaf.getsockname()[1]}").check(timeout_s=1)
        assert time.monotonic() - start < 4


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, " * 100)
    with pytest.raises(TrackingError, match="not a database"):
        Tracker(f"sqlite:///{tmp_path / 'mlflow.db'}").check()


def test_a_deleted_experiment_names_the_way_out(local: Tracker) -> None:
    local.client.delete_experiment(local.experiment_id)
    with pytest.raises(TrackingError, match="mlflow experiments restore"):
        Tracker(local.uri, local.experiment).check()


# The registry


def test_a_model_is_registered_promoted_and_fetched_again(
    tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    policy = f"policy-{tracker.experiment}"
    assert tracker.champion(policy) is None
    artifact = make_model()
    with tracker.stage("promote") as run:
        version = tracker.register_model(artifact, policy, run.run_id, {"gain": 0.3})
        assert tracker.register_model(artifact, policy, run.run_id) == version
        second = tracker.register_model(make_model("better"), policy, run.run_id)
    assert (version, second) == ("1", "2")
    assert tracker.champion(policy) is None  # a model, but no such alias

    tracker.set_alias(policy, "champion", version, expected=None)
    champion = tracker.champion(policy)
    assert champion is not None
    assert (champion.version, champion.run_id) == (version, run.run_id)
    assert champion.tags["gain"] == "0.3"
    assert champion.tags["artifact_uri"] == str(artifact)
    assert champion.tags["artifact_digest"] == verify(artifact).digest

    got = tracker.download_model(champion, tmp_path / "got")
    assert verify(got) == verify(artifact)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
    import mlflow.artifacts

    plain = mlflow.artifacts.download_artifacts(
        f"models:/{policy}@champion", dst_path=str(tmp_path / "plain")
    )
    assert (Path(plain) / "tokenizer" / "vocab.json").read_text() == "{}"

    assert lineage_command([f"models:/{policy}@champion"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{policy} version 1 {verify(artifact).digest[:12]}")
    assert f"artifact: rl {verify(artifact).digest[:12]}" in out
    assert lineage_command([f"models:/{policy}@nobody"]) == 1

    with pytest.raises(StorageError, match="already there"):
        tracker.download_model(champion, tmp_path / "got")
    with pytest.raises(TrackingError, match=r"has no models:/.*/7"):
        tracker.model_version(f"models:/{policy}/7")


def promoter(uri: str, model: str, version: str, start: float, results: Queue[str]) -> None:
    """A process that promotes `version` in place of version 1 at the moment `start`."""
    champions = Champions(Tracker(uri), model, timeouts=LockTimeouts(lease=60, wait=90, skew=0))
    champions.history()  # imports and connections are made by now
    time.sleep(max(0.0, start - time.time()))
    try:
        champions.promote(version, "1", "better", request=version, by=f"p{version}")
        results.put(f"won {version}")
    except TrackingError as error:
        results.put(f"lost {version}: {error}")


@pytest.mark.slow
def test_of_two_promotions_at_once_on_postgres_one_moves_the_alias(on_postgres: str) -> None:
    tracker = Tracker(on_postgres, experiment="promotions")
    run = tracker.start_pipeline("models")
    for text in ("one", "two", "three"):
        tracker.register_model(make_model(f"{text} of two"), "policy", run)
    champions = Champions(tracker, "policy")
    champions.promote("1", None, "first", request="first")
    context = multiprocessing.get_context("spawn")
    results: Queue[str] = context.Queue()
    start = time.time() + 10
    processes = [
        context.Process(target=promoter, args=(on_postgres, "policy", version, start, results))
        for version in ("2", "3")
    ]
    for process in processes:
        process.start()
    lost, won = sorted(results.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(30)
    winner = won.removeprefix("won ")
    assert winner in ("2", "3")
    assert f"is on version {winner} now, where version 1 was compared with" in lost
    champion = tracker.champion("policy")
    assert champion is not None
    assert champion.version == winner
    assert [move.version for move in champions.history()] == ["1", winner]


def test_an_alias_moves_only_from_where_it_was_compared(local: Tracker) -> None:
    with local.stage("promote") as run:
        for text in ("one", "two", "three"):
            local.register_model(make_model(text), "gated", run.run_id)
    local.set_alias("gated", "champion", "1", expected=None)
    local.set_alias("gated", "champion", "2", expected="1")
    with pytest.raises(TrackingError, match="on version 2 where 1 was compared"):
        local.set_alias("gated", "champion", "3", expected="1")
    champion = local.champion("gated")
    assert champion is not None
    assert champion.version == "2"


def test_a_registry_that_cannot_be_asked_is_not_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="connection refused"):
        Tracker("http://127.0.0.1:9").champion("policy")


def test_a_tampered_folder_is_not_registered(local: Tracker) -> None:
    artifact = make_model("to be tampered with")
    (artifact / "model.safetensors").write_text("poison")
    with local.stage("promote") as run, pytest.raises(LineageError, match="differs"):
        local.register_model(artifact, "tampered", run.run_id)
    assert local.client.search_registered_models("name='tampered'") == []


def test_a_stage_leaves_no_thread_behind(local: Tracker) -> None:
    with local.stage("sft"):
        assert "mlflow-metrics" in {t.name for t in threading.enumerate()}
    assert "mlflow-metrics" not in {t.name for t in threading.enumerate()}
