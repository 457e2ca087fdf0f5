"""What tasks find on their host: context, memory, attempts."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flytekit.core.cache import VersionParameters
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.types.directory import FlyteDirectory
from mlflow import MlflowClient
from s3_server import environment, flyte_variables, s3_bucket, s3_server

from engine.config import DataConfig, LoRAConfig, ParallelConfig, load_config, parse_config
from engine.config.pipeline import PipelineConfig
from engine.controller.launch import ray_session
from engine.data.incremental_data import find_new_files
from engine.data.sources import load_splits
from engine.errors import DataError, PlacementError
from engine.lineage.lookup import write_origin
from engine.parallel.layout import Layout
from engine.planner import fitted
from engine.planner.memory import usable_bytes
from engine.planner.resources import GIB
from engine.stages.fetch import resolve
from engine.stages.plan import open_run
from engine.stages.profiles import (
    PROFILES,
    apply_profile,
    check_memory,
    cluster,
    read_profile,
    rl_estimate,
)
from engine.stages.settings import RunContext
from engine.stages.stage import execution_tags, library_versions, shared, stage
from engine.storage.artifacts import Draft, local_path, read_manifest
from engine.storage.digests import hash_files
from engine.storage.filesystem import Files
from engine.tracking import Tracker
from engine.trainers.auto_placement import (
    fixed_settings,
    rl_candidate,
    sft_memory,
    sft_workload,
    workload,
)
from tasks.host import SourcesPolicy, StageError, artifact, directory, flyte_host, on_cluster
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


SHAPES: dict[str, dict[str, Any]] = {
    "7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def folder(tmp_path: Path, size: str) -> str:
    shape = SHAPES[size] | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def documented(path: str, profile: str, **model: Any) -> PipelineConfig:
    """`rlhf_full --model PATH --profile PROFILE`."""
    values = load_config("preset:full").model_dump(exclude_unset=True)
    values["model"] = {"path": path, **model}
    return apply_profile(parse_config(values), PROFILES[profile])


@pytest.mark.parametrize("profile", ["8xA100", "2x8xH100"])
def test_the_preset_for_7b_fits_eight_gpus(tmp_path: Path, profile: str) -> None:
    values = load_config("preset:gsm8k-7b-8gpu").model_dump()
    values["model"]["path"] = folder(tmp_path, "7B")
    check_memory(apply_profile(parse_config(values), PROFILES[profile]), PROFILES[profile])


def test_a_plan_says_what_rl_takes_and_costs(tmp_path: Path) -> None:
    config = documented(folder(tmp_path, "7B"), "2x8xH100")
    priced = config.replaced({"tracking.price_per_hour": 50.0})
    lines = list(rl_estimate(priced, PROFILES["2x8xH100"]))
    assert lines[0] == "estimate  of RL on 16 × H100, every row at its longest"
    assert "of 80.0 GiB a rank" in lines[1]
    assert "fits" in lines[1]
    step = float(lines[3].split()[1])  # time      12.3 s a step
    cost = float(lines[-1].split()[1].rstrip(","))
    assert cost == pytest.approx(config.rl.trainer.total_training_steps * step / 72, rel=0.01)
    assert list(rl_estimate(config, PROFILES["2x8xH100"]))[-1].startswith("cost      not known")
    scratch = list(rl_estimate(PipelineConfig(), PROFILES["laptop"]))
    assert scratch[0] == "estimate  of RL on 1 × CPU, every row at its longest"
    assert "fits" in scratch[1]


def test_a_plan_says_which_gpus_decode_while_others_compute(tmp_path: Path) -> None:
    """With a profile the layout of asynchronous modes is the planner's, as the run's will be."""
    path, machines = folder(tmp_path, "7B"), PROFILES["2x8xH100"]
    values = load_config("preset:full").model_dump(exclude_unset=True)
    config = parse_config(values | {"model": {"path": path}}).replaced({"rl.trainer.mode": "async"})
    config = apply_profile(config, machines)
    check_memory(config, machines)
    lines = list(rl_estimate(config, machines))
    assert lines[0].startswith("placement: auto found 2 machines, 16 × H100 of 80.0 GiB")
    [roles] = [line for line in lines if line.startswith("  roles   ")]
    ranks = int(roles.split()[1])  # roles   13 GPUs compute for
    assert 0 < ranks < 16
    assert f"estimate  of RL on {ranks} × H100, every row at its longest" in lines


def test_7b_fits_two_nodes_of_eight_80_gb_gpus_in_every_stage(tmp_path: Path) -> None:
    path = folder(tmp_path, "7B")
    config = documented(path, "2x8xH100")
    check_memory(config, PROFILES["2x8xH100"])
    there = cluster(PROFILES["2x8xH100"]).machines[0]
    assert there.gpu_memory == 80 * GIB
    rl = config.rl
    assert Layout.of(rl.actor.parallel) == Layout(dp=2, fsdp=8)
    work = workload(
        rl,
        model_path=path,
        lora=LoRAConfig(),
        dtype="bfloat16",
        max_response_length=config.data.max_response_length,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
    )
    parts = cluster(PROFILES["2x8xH100"]).allocations()
    (allocation,) = (part for part in parts if part.ranks == 16)
    chosen = fitted(work, rl_candidate(rl), allocation, fixed_settings(rl))
    assert chosen is not None
    assert chosen.fits
    assert not config.sft.skip
    warm = sft_workload(
        config.sft,
        model_path=path,
        lora=LoRAConfig(),
        dtype="bfloat16",
        max_response_length=config.data.max_response_length,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
    )
    tokens = config.sft.max_tokens_per_micro_batch
    for memory in (
        chosen.memory,
        sft_memory(warm, config.sft.parallel, tokens),
    ):
        assert memory.peak <= usable_bytes(there.gpu_memory), memory
        assert memory.host <= usable_bytes(there.memory // there.gpus), memory


def with_sft(config: PipelineConfig, **changes: Any) -> PipelineConfig:
    return config.model_copy(update={"sft": config.sft.model_copy(update=changes)})


def test_a_warm_start_that_can_t_fit_is_refused_with_the_layout_that_would(tmp_path: Path) -> None:
    machines = PROFILES["2x8xH100"]
    config = documented(folder(tmp_path, "7B"), machines.name)
    copies = ParallelConfig(dp=16)
    said = r"with sft.parallel dp=16 a GPU keeps 1\d\d GiB .* has 80; sft.parallel .*fsdp=.* would"
    with pytest.raises(PlacementError, match=said):
        check_memory(with_sft(config, parallel=copies), machines)
    adapters = documented(folder(tmp_path, "7B"), machines.name, lora={"rank": 16})
    check_memory(with_sft(adapters, parallel=copies), machines)
    large = with_sft(documented(folder(tmp_path, "70B"), machines.name), parallel=copies)
    said = r"sft.parallel .*fsdp=.* \(offload moments, recompute\) would"
    with pytest.raises(PlacementError, match=said):
        check_memory(large, machines)
    few = read_profile("{base: 8xA100, gpus: 2, cpus: 22}")
    with pytest.raises(
        PlacementError, match=r"sft can't fit: .* no layout of these machines would"
    ):
        check_memory(with_sft(large, parallel=ParallelConfig(dp=2)), few)


def test_what_can_t_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    large = with_sft(documented(folder(tmp_path, "70B"), "2x8xH100"), skip=True)
    with pytest.raises(PlacementError) as refused:
        check_memory(large, PROFILES["2x8xH100"])
    said = str(refused.value)
    assert "rl can't fit: with rl.actor.parallel dp=2 fsdp=8 a GPU keeps" in said
    assert "\n" not in said
    print(said)


def test_an_evaluation_that_can_t_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    machines = PROFILES["2x8xH100"]
    large = documented(folder(tmp_path, "70B"), machines.name)
    check_memory(large, machines, trains=False)  # on four of a machine's GPUs
    pairs = large.evaluate.model_copy(update={"parallel": ParallelConfig(dp=8)})
    said = (
        r"evaluate.parallel dp=8 a GPU keeps 131 GiB .* has 80; evaluate.parallel dp=2 tp=4 would"
    )
    with pytest.raises(PlacementError, match=said):
        check_memory(large.model_copy(update={"evaluate": pairs}), machines, trains=False)
    small = read_profile("{cpus: 8, memory_gib: 64, gpus: 2, accelerator: A10G}")
    with pytest.raises(PlacementError, match=r"evaluate can't fit: .* 131 GiB .* 2 GPUs of 24"):
        check_memory(large, small, trains=False)


def test_what_is_not_known_is_let_through(tmp_path: Path) -> None:
    path = folder(tmp_path, "70B")
    config = parse_config({"model": {"path": path}})
    for profile in ("laptop", "one-gpu"):
        check_memory(config, PROFILES[profile])
    check_memory(parse_config({}), PROFILES["2x8xH100"])  # a model from scratch


def test_a_gpu_kind_of_one_s_own_is_counted_with(tmp_path: Path) -> None:
    """A kind that the table has not, and one that it has otherwise."""
    sizes = "{cpus: 64, memory_gib: 500, gpus: 4, accelerator: %s}"
    config = parse_config({"model": {"path": folder(tmp_path, "7B")}, "sft": {"skip": True}})
    unknown = read_profile(sizes % "L20")
    check_memory(apply_profile(config, unknown), unknown)  # nobody knows its memory
    small = {"memory_gib": 12, "tflops": 119, "memory_gbs": 864}
    for kind in ("L20", "H100"):
        values = {"rl": {"trainer": {"gpu_kinds": {kind: small}}}}
        values |= config.model_dump(include={"model": {"path"}, "sft": {"skip"}})
        machines = read_profile(sizes % kind)
        with pytest.raises(PlacementError, match=r"rl can't fit: .* and has 12"):
            check_memory(apply_profile(parse_config(values), machines), machines)


KICKOFF = datetime(2026, 11, 20, 2, tzinfo=UTC)


STEPS: dict[str, Callable[[], object]] = {
    "retraining trigger": lambda: find_new_files("s3://bucket/arrivals", KICKOFF, [], 30),
    "preprocess": lambda: load_splits(DataConfig(source="gsm8k", path="s3://bucket/gsm8k"), 0),
    "checkpoints": lambda: write_origin("s3://bucket/run", Draft(kind="rl")),
    "lineage": lambda: hash_files("s3://bucket/artifacts/rl/0123456789abcdef"),
    "an artifact": lambda: local_path("s3://bucket/artifacts/rl/0123456789abcdef"),
}


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Live as a task in a pod does."""
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    context = FlyteContextManager.current_context()
    task = context.user_space_params.builder()
    task.execution_id = WorkflowExecutionIdentifier("hybridflyte", "production", "f1a2b3")
    state = context.new_execution_state().with_params(user_space_params=task.build())
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        assert on_cluster()
        yield


@pytest.mark.parametrize("step", STEPS)
def test_s3_away_is_tried_again(pod: None, step: str) -> None:
    with (
        environment(AWS_ENDPOINT_URL="http://127.0.0.1:9"),
        pytest.raises(FlyteRecoverableException, match="Could not connect"),
        flyte_host(),
    ):
        STEPS[step]()


def test_a_ray_that_does_not_start_is_tried_again(
    pod: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(FlyteRecoverableException, match="Ray could not be started: The current"),
        flyte_host(),
        ray_session("ray"),
    ):
        pass


def test_what_s3_does_not_hold_is_not(pod: None) -> None:
    with s3_bucket("bucket"):
        for step in ("preprocess", "lineage"):
            with pytest.raises(StageError), flyte_host():
                STEPS[step]()
