"""Stages as plain functions: plans, loggers, profiles."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from flytekit.core.local_cache import LocalTaskCache
from s3_server import s3_bucket
from tracker_files import tensorboard_points, wandb_points

from engine import stages
from engine.config import ParallelConfig, PipelineConfig
from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.stages import interfaces
from engine.stages.plan import check_settings, checks_key, pin_named_content
from engine.stages.profiles import (
    PROFILES,
    apply_profile,
    check_model_layouts,
    read_profile,
    require_shared_home,
    suggest_gpus,
)
from engine.stages.settings import RunContext
from engine.stages.stage import Artifact, execution_tags, host
from engine.stages.training import open_loggers
from engine.storage.filesystem import Files
from engine.trainers.auto_placement import fixed_settings
from engine.trainers.layout_checks import check_layouts
from engine.trainers.offline import check_offline_layout, offline_placement
from engine.trainers.run_plan import check_config
from tasks.host import StageError, flyte_host
from tasks.inputs import RLHFConfig
from tasks.stages import plan

RUN = """
import json, sys, time
from engine.config import DataConfig, ModelConfig, SFTConfig
from engine.stages.dataset import preprocess
from engine.stages.settings import DatasetSettings, RunContext, SFTSettings
from engine.stages.training import sft
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker

data = DataConfig(sft_size=32, train_size=8, validation_size=8, test_size=8, max_response_length=8)
run = RunContext(
    run_id="plain", mlflow_run=Tracker().start_pipeline("p"), experiment="hybridflyte",
    started_at=time.time(),
)
dataset = preprocess(run, DatasetSettings(
    data=data, source_digest="", model_path="", model_digest="", context=64, seed=0
))
shape = ModelConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)
config = SFTConfig(max_steps=2, train_batch_size=8)
model = sft(run, SFTSettings(start=shape, start_digest="", config=config, seed=0), dataset)
manifest = read_manifest(model.local())
print(json.dumps({
    "kind": manifest.kind,
    "parent": manifest.parents[0].uri == dataset.uri,
    "execution": manifest.flyte_execution,
    "flytekit": "flytekit" in sys.modules,
}))
"""


def test_stages_run_without_flytekit(tmp_path: Path, mlflow_store: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(mlflow_store.read_bytes())
    places = {
        "HOME": str(tmp_path),
        "HYBRIDFLYTE_HOME": str(tmp_path / "home"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kind": "sft",
        "parent": True,
        "execution": "plain",
        "flytekit": False,
    }


BODIES = (
    *("plan.plan", "plan.plan_promotion", "dataset.trigger_retraining", "dataset.ingest"),
    *("fetch.fetch", "training.rl", "preferences.pairs", "promotion.rollback"),
    *("evaluation.evaluate_part", "evaluation.report", "evaluation.review"),
)


@pytest.mark.parametrize("body", BODIES)
def test_a_signature_that_is_read_is_that_of_the_function(body: str) -> None:
    types = {"Artifact": Artifact, "Path": Path, "PipelineConfig": PipelineConfig, "pd": pd}
    module, name = body.split(".")
    function = getattr(getattr(stages, module), name)
    signature = interfaces.signature_of(body, types)
    assert signature == inspect.signature(function, eval_str=True)
    ours = interfaces.function_of(body, lambda function: function, __name__, signature)
    assert (ours(), ours.__name__, ours.__doc__) == (function, name, inspect.getdoc(function))
    other = interfaces.signature_of(body, types, gives=bytes, run=int)
    assert other.return_annotation is bytes
    assert [p.annotation for p in other.parameters.values() if p.name == "run"] in ([], [int])


def test_tasks_are_declared_before_torch_is_loaded() -> None:
    program = "import sys, tasks.stages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_plain_host_is_no_cluster() -> None:
    assert host().execution == ""
    assert execution_tags("run-1") == {"flyte.execution": "run-1"}
    assert host().checkpoint_paths() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"path": "/nope"}}, "model.path='/nope' does not exist"),
        ({"model": {"path": "/nope"}}, "or leave it empty for a model from scratch"),
        ({"model": {"path": "nope"}}, "model.path='nope' does not exist"),
        (
            {"sft": {"skip": True}},
            "sft.skip=true leaves RL without a model: one from scratch needs",
        ),
        (
            {"data": {"source": "gsm8k", "path": "/nowhere"}},
            "'/nowhere' is no data file",
        ),
        ({"rl": {"reward": {"name": "nice"}}}, "reward.name='nice' is unknown"),
        ({"rl": {"algorithm": {"teacher": "nope"}}}, "rl.algorithm.teacher='nope' does not exist"),
    ],
)
def test_a_wrong_name_is_known_before_torch_is_loaded(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    for module in ("engine.models", "engine.trainers.run_plan"):
        monkeypatch.setitem(sys.modules, module, None)  # an ImportError where it is reached
    config = RLHFConfig.model_validate(change)
    body: Any = plan.task_function
    given: dict[str, Any] = dict.fromkeys(("source", "path", "model", "preferences"), "")
    given |= {"seed": -1, "profile": "laptop", "workflow": "rlhf"}
    with pytest.raises(StageError, match=said):
        body(config=config, **given)


def test_a_logger_without_its_package_is_known_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "engine.trainers.run_plan", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wandb" else find(name)
    )
    config = RLHFConfig.model_validate({"tracking": {"logger": ["console", "wandb"]}})
    with pytest.raises(ConfigError, match=r"^tracking\.logger: wandb needs the package wandb"):
        check_settings(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sft": {"parallel": {"fsdp": 2}, "placement": "local"}}, "sft.placement=local runs one"),
        ({"sft": {"pools": [{"roles": ["actor"]}]}}, "there is one pool here, of roles"),
        ({"evaluate": {"parallel": {"pp": 2}}}, "evaluate.parallel.pp=2 has no effect"),
    ],
)
def test_layouts_are_checked_before_anything_starts(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(RLHFConfig.model_validate(change))


@pytest.mark.parametrize("section", ["sft", "rl.actor", "evaluate"])
def test_so_is_whether_the_model_can_be_split(tmp_path: Path, section: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    change: dict[str, Any] = {"parallel": {"tp": 3}}
    for name in reversed(section.split(".")):
        change = {name: change}
    config = RLHFConfig.model_validate({"model": {"path": str(tmp_path)}, **change})
    with pytest.raises(ConfigError, match="tp=3 does not divide the model's num_attention_heads=4"):
        check_model_layouts(config)
    check_model_layouts(RLHFConfig.model_validate({"model": {"path": str(tmp_path)}}))


def test_a_home_that_other_pods_don_t_see(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RLHFConfig()
    monkeypatch.setenv("HYBRIDFLYTE_HOME", "/outputs/of/a/pod")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    require_shared_home(config)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(
        ConfigError, match=r"HYBRIDFLYTE_HOME=/outputs/of/a/pod is on the pod's own"
    ):
        require_shared_home(config)
    local = {"rl": {"trainer": {"placement": "local"}}}
    require_shared_home(RLHFConfig.model_validate(local))
    monkeypatch.setenv("HYBRIDFLYTE_HOME", "/dev/shm/outputs")  # of another file system
    require_shared_home(config)


def check_on_flyte(config: RLHFConfig) -> None:
    """Check settings where Flyte's local cache remembers what has passed."""
    with flyte_host():
        check_settings(config)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local cache of Flyte of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(LocalTaskCache, "_initialized", False)
    monkeypatch.setattr(LocalTaskCache, "_cache", None, raising=False)


@pytest.mark.usefixtures("empty_cache")
def test_settings_that_passed_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RLHFConfig()
    check_on_flyte(config)
    monkeypatch.setitem(sys.modules, "engine.trainers.run_plan", None)  # no further check
    check_on_flyte(config)
    with pytest.raises(ImportError):
        check_on_flyte(config.model_copy(update={"seed": 7}))
    monkeypatch.setattr("engine.stages.plan.sources_digest", lambda: "edited")
    with pytest.raises(ImportError):
        check_on_flyte(config)


@pytest.mark.usefixtures("empty_cache")
def test_settings_that_fail_are_checked_again() -> None:
    config = RLHFConfig.model_validate({"rl": {"algorithm": {"adv_estimator": "nice"}}})
    for _ in range(2):
        with pytest.raises(StageError, match="nice"):
            check_on_flyte(config)


@pytest.mark.parametrize(
    "change",
    [
        {"rl": {"plugins": ["my_rewards"]}},
        {"rl": {"algorithm": {"teacher": "/models/teacher"}}},
        {"rl": {"reward": {"name": "my_rewards:length"}}},
    ],
)
def test_what_changes_by_itself_is_always_checked(change: dict[str, Any]) -> None:
    assert checks_key(RLHFConfig())
    assert not checks_key(RLHFConfig.model_validate(change))


STAGE: Any = SimpleNamespace(kind="sft", config={"seed": 0})


def run(*logger: str) -> RunContext:
    return RunContext(run_id="r1", mlflow_run="x", experiment="sums", started_at=0.0, logger=logger)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TENSORBOARD_DIR", "HYBRIDFLYTE_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A shared store on a real S3 server."""
    with s3_bucket("shared") as bucket:
        monkeypatch.setenv("HYBRIDFLYTE_STORE", f"{bucket}/team")
        yield f"{bucket}/team"


def log_steps(first: int, last: int, *logger: str) -> None:
    with open_loggers(run(*logger), STAGE) as logs:
        for step in range(first, last + 1):
            logs.log_metrics({"sft/loss": 1 / step}, step)


def steps(lines: str | bytes) -> list[int]:
    return [json.loads(line)["step"] for line in lines.splitlines()]


def test_the_files_of_a_stage_are_in_its_run_s_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_steps(1, 3, "console", "file", "tensorboard")
    folder = home / "runs" / "r1" / "sft"
    assert steps((folder / "metrics.jsonl").read_text()) == [1, 2, 3]
    assert len(tensorboard_points(folder / "tensorboard", "sft/loss")) == 3
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "shared"))
    log_steps(1, 3, "tensorboard")
    assert len(tensorboard_points(tmp_path / "shared" / "r1" / "sft", "sft/loss")) == 3


def test_without_a_logger_there_is_nothing(home: Path) -> None:
    log_steps(1, 3, "console", "mlflow")
    assert not home.exists()


def test_an_attempt_in_another_pod_goes_on_from_what_the_store_has(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        log_steps(1, 4, "file", "tensorboard", "wandb")
    finally:
        wandb.teardown()
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "another pod"))
    log_steps(3, 5, "file", "tensorboard")  # from the checkpoint of step 2

    files = Files(f"{store}/runs/r1/sft")
    assert steps(files.read("metrics.jsonl")) == [1, 2, 3, 4, 5]
    copy = tmp_path / "copy"
    for name in files.sizes():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(files.read(name))
    points = tensorboard_points(copy / "tensorboard", "sft/loss")
    assert [step for step, _ in points] == [1, 2, 3, 4, 5]
    (offline,) = (copy / "wandb").rglob("*.wandb")
    assert [step for step, _ in wandb_points(offline, "sft/loss")] == [1, 2, 3, 4]
    assert b"sft-r1" in offline.read_bytes(), "the run's name"
    assert not list((copy / "wandb").glob("latest-run*")), "a link to what is there already"


def test_the_store_has_what_grows_while_the_stage_runs(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.stages.training.COPY_SECONDS", 0.05)
    files, deadline = Files(f"{store}/runs/r1/sft"), time.monotonic() + 30
    with open_loggers(run("file"), STAGE) as logs:
        for step in (1, 2):
            logs.log_metrics({"sft/loss": 0.5}, step)
            while not (files.sizes() and steps(files.read("metrics.jsonl"))[-1:] == [step]):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_a_store_that_fails_costs_a_sentence_and_no_stage(
    store: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "s3://no-such-bucket/team")
    monkeypatch.setattr("engine.stages.training.COPY_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING), open_loggers(run("file"), STAGE) as logs:
        logs.log_metrics({"sft/loss": 0.5}, 1)
        time.sleep(0.3)
        logs.log_metrics({"sft/loss": 0.4}, 2)
    (said,) = (r.getMessage() for r in caplog.records if "metrics wait" in r.getMessage())
    assert "s3://no-such-bucket/team/runs/r1/sft" in said
    assert steps((home / "runs" / "r1" / "sft" / "metrics.jsonl").read_text()) == [1, 2]


def test_a_machine_without_the_package_says_so_before_the_stage(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tracking\.logger: tensorboard needs the package"):
        log_steps(1, 1, "tensorboard")
    assert not home.exists()


WITH_GPUS = [name for name, profile in PROFILES.items() if profile.gpus]


SEVERAL_GPUS = [name for name in WITH_GPUS if name != "one-gpu"]


def settings(**rl: Any) -> RLHFConfig:
    """As a plan has them."""
    return pin_named_content(RLHFConfig.model_validate({"rl": rl}))


def fitted_to(config: RLHFConfig, profile: str) -> RLHFConfig:
    return apply_profile(config, PROFILES[profile])


def test_the_names() -> None:
    assert list(PROFILES) == ["laptop", "one-gpu", "8xA100", "2x8xH100", "mi300x"]
    assert all(profile.name == name for name, profile in PROFILES.items())


def test_sizes_of_one_s_own() -> None:
    own = read_profile("{cpus: 64, memory_gib: 500, gpus: 4, replicas: {start: 3, most: 4}}")
    assert (own.name, own.cpus, own.gpus, own.world) == ("custom", 64, 4, 12)
    assert (own.vendor, own.resource, own.image_kind) == ("nvidia", "nvidia.com/gpu", "cuda")
    assert own.layout == ParallelConfig(
        dp=3, fsdp=4, compute_dtype="bfloat16", activation_checkpointing=True
    )
    half = read_profile('{"base": "8xA100", "name": "half", "gpus": 4}')
    assert half == PROFILES["8xA100"].model_copy(update={"name": "half", "gpus": 4})
    assert read_profile("mi300x") is PROFILES["mi300x"]
    more = read_profile("{base: 2x8xH100, replicas: {most: 4}}").replicas
    assert (more.fewest, more.start, more.most) == (1, 2, 4)


@pytest.mark.parametrize(
    ("product", "kind"), [("NVIDIA A100-SXM4-80GB", "A100-80G"), ("NVIDIA Strange", "")]
)
def test_this_machine_is_a_profile_with_all_its_gpus(
    product: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read_profile("this-machine").gpus == 0
    properties = SimpleNamespace(total_memory=79 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: product)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert apply_profile(settings(), read_profile("this-machine")) == settings(), "needs no Ray"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    machine = read_profile("this-machine")
    assert (machine.gpus, machine.accelerator, machine.world) == (8, kind, 8)
    assert machine.cpus == os.cpu_count()
    fitted = apply_profile(settings(), machine)
    assert Layout.of(fitted.rl.actor.parallel).world_size == 8
    assert [pool.gpus for pool in fitted.rl.trainer.pools] == [1.0, 0.0]
    listed = tmp_path / "gpus"
    monkeypatch.setattr("engine.stages.profiles.DRIVER_GPUS", listed)
    for count, profile, told in ((0, "laptop", False), (8, "laptop", True), (8, "8xA100", False)):
        for number in range(count):
            (listed / f"{number}").mkdir(parents=True, exist_ok=True)
        suggest_gpus(read_profile(profile))
        assert ("has 8 GPUs, and profile=laptop" in capsys.readouterr().out) == told, profile
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    suggest_gpus(read_profile("laptop"))
    assert not capsys.readouterr().out, "a pod has the GPUs that its profile says"
    with pytest.raises(ConfigError, match=r"profile=this-machine is for runs on one machine"):
        read_profile("this-machine")


def test_rocm_takes_the_same_path() -> None:
    for sizes in ("accelerator: AMD-Instinct-MI355X-OAM", "gpu_resource: amd.com/gpu"):
        amd = read_profile(f"{{cpus: 64, memory_gib: 500, gpus: 8, {sizes}}}")
        assert (amd.vendor, amd.resource, amd.image_kind) == ("amd", "amd.com/gpu", "rocm")
    assert not read_profile("mi300x").layout.activation_checkpointing, "its memory is enough"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9xA100", "profile='9xA100' is none of laptop, one-gpu, 8xA100, 2x8xH100, mi300x, this-"),
        ("{base: 9xA100}", "profile base='9xA100' is none of laptop"),
        ("{cpus: [", "no valid YAML"),
        ("{base: laptop, gpu: 1}", "profile: unknown setting 'gpu'; did you mean gpus?"),
        ("{cpus: 4}", "memory_gib"),
        ("{base: laptop, shared_memory_gib: 8}", "shared_memory_gib=8 leaves nothing"),
        ("{base: laptop, accelerator: H100}", "accelerator='H100' with gpus=0"),
        ("{base: laptop, replicas: {start: 3}}", "fewest=1, start=3, most=2 are not in ascending"),
    ],
)
def test_what_is_no_profile(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_profile(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("profile", WITH_GPUS)
def test_a_layout_fits_its_machines(profile: str) -> None:
    fitted = fitted_to(settings(), profile)
    layout = Layout.of(fitted.rl.actor.parallel)
    assert layout.world_size == PROFILES[profile].world
    assert fitted.rl.actor.parallel.compute_dtype == "bfloat16"
    check_config(fitted.rl)  # its pools place each role once
    check_layouts(fitted.rl, fitted.model.lora)
    policy, beside = fitted.rl.trainer.pools
    assert policy.roles == ("actor", "rollout", "reference")
    assert policy.gpus == 1
    assert (beside.roles, beside.gpus) == (("reward",), 0)
    # All of it fits one machine's cores.
    whole = PROFILES[profile]
    assert policy.cpus * whole.gpus + beside.cpus <= whole.cpus


@pytest.mark.parametrize("profile", SEVERAL_GPUS)
def test_the_warm_start_is_laid_out_as_rl(profile: str) -> None:
    fitted, whole = fitted_to(settings(), profile), PROFILES[profile]
    rl = fitted.rl.actor.parallel
    assert rl.activation_checkpointing is None, "the start of RL chooses it by the GPU"
    assert fitted.sft.parallel == rl.model_copy(
        update={"activation_checkpointing": whole.layout.activation_checkpointing}
    )
    check_offline_layout(fitted.sft, fitted.model.lora)
    (pool,) = offline_placement(fitted.sft).pools
    assert (pool.roles, pool.world_size, pool.gpus) == (("sft",), whole.world, 1)
    assert pool.cpus * whole.gpus <= whole.cpus


def test_the_warm_start_keeps_its_own_layout() -> None:
    own = {"parallel": {"fsdp": 4, "tp": 2}, "pools": [{"roles": ["sft"], "gpus": 1}]}
    asked = RLHFConfig.model_validate({"sft": own})
    fitted = fitted_to(asked, "8xA100").sft
    assert (fitted.parallel, fitted.pools) == (asked.sft.parallel, asked.sft.pools)
    assert fitted.placement == "ray"
    assert fitted_to(settings(), "one-gpu").sft == settings().sft
    none = RLHFConfig.model_validate({"sft": {"skip": True}, "model": {"path": "x/y"}})
    assert fitted_to(none, "8xA100").sft == none.sft


@pytest.mark.parametrize(
    ("sft", "profile", "said"),
    [
        ({"parallel": {"fsdp": 32}}, "8xA100", r"sft.parallel is a layout of 32 ranks.*most 16"),
        ({"parallel": {"dp": 2}}, "one-gpu", r"sft.parallel is a layout of 2 ranks.*most 1 GPUs"),
        ({"placement": "local"}, "8xA100", r"sft.placement=local with profile=8xA100.*leave"),
    ],
)
def test_a_warm_start_that_the_machines_can_t_take(
    sft: dict[str, Any], profile: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fitted_to(RLHFConfig.model_validate({"sft": sft}), profile)


def test_an_evaluation_is_on_one_machine() -> None:
    config = RLHFConfig.model_validate({"evaluate": {"parallel": {"dp": 2, "tp": 4}}})
    assert fitted_to(config, "8xA100").evaluate.parallel == config.evaluate.parallel
    said = r"evaluate.parallel is a layout of 8 ranks.*machine of profile=one-gpu.*has 1 GPUs"
    with pytest.raises(ConfigError, match=said):
        fitted_to(config, "one-gpu")


def test_two_nodes_shard_inside_and_copy_between() -> None:
    parallel = fitted_to(settings(), "2x8xH100").rl.actor.parallel
    assert (parallel.dp, parallel.fsdp) == (2, 8)


def test_a_critic_is_placed_with_the_policy() -> None:
    ppo = settings(algorithm={"adv_estimator": "gae"}, rollout={"n": 1})
    fitted = fitted_to(ppo, "8xA100")
    check_config(fitted.rl)
    assert fitted.rl.trainer.pools[0].roles == ("actor", "rollout", "reference", "critic")


def test_without_gpus_nothing_is_filled_in() -> None:
    assert fitted_to(settings(), "laptop") == settings()


def test_what_the_settings_say_stays() -> None:
    own = settings(
        actor={"parallel": {"fsdp": 4, "tp": 2}},
        trainer={"pools": [{"roles": ["actor", "rollout", "reference"]}, {"roles": ["reward"]}]},
    )
    assert fitted_to(own, "8xA100").rl == own.rl


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_samplers_with_gpus_of_their_own_are_placed_by_the_planner(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = settings(trainer={"mode": mode}, actor={"parallel": {"fsdp": 4}})
    fitted = fitted_to(apart, "8xA100").rl
    assert fitted.trainer == apart.rl.trainer.replaced({"placement": "auto"})
    assert fitted.actor.parallel == ParallelConfig(fsdp=4, compute_dtype="bfloat16")
    assert "layout and pools are chosen at each start of rl" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"profile=one-gpu has one; set rl.trainer.mode=sync"):
        fitted_to(apart, "one-gpu")
    server = settings(trainer={"mode": mode}, rollout={"engine": "server"})
    assert fitted_to(server, "one-gpu").rl.trainer.placement == "auto"
    pools = [{"roles": ["actor"], "gpus": 1}, {"roles": ["sampler"], "gpus": 2}]
    own = settings(trainer={"mode": mode, "pools": pools})
    assert fitted_to(own, "8xA100").rl == own.rl


@pytest.mark.parametrize(
    ("profile", "mode"),
    [*((each, "sync") for each in WITH_GPUS), *((each, "one_step_off") for each in SEVERAL_GPUS)],
)
def test_the_planner_finds_layout_and_pools_open(
    profile: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = settings(trainer={"placement": "auto", "mode": mode})
    fitted = fitted_to(auto, profile)
    assert fitted.rl.actor.parallel == ParallelConfig(compute_dtype="bfloat16")
    assert fitted.rl.trainer == auto.rl.trainer
    pins = fixed_settings(fitted.rl)
    assert pins.axes == {}
    assert pins == fixed_settings(auto.rl)
    assert "chosen at each start" in capsys.readouterr().out


def test_the_planner_keeps_what_the_settings_say() -> None:
    own = settings(
        actor={"parallel": {"tp": 2, "compute_dtype": "float32"}}, trainer={"placement": "auto"}
    )
    assert fitted_to(own, "8xA100").rl == own.rl
    assert fixed_settings(fitted_to(own, "8xA100").rl).axes == {"tp": 2}


def test_a_layout_that_is_too_large() -> None:
    with pytest.raises(ConfigError, match=r"32 ranks, but profile=8xA100 has at most 16 GPUs"):
        fitted_to(settings(actor={"parallel": {"fsdp": 32}}), "8xA100")


def test_gpus_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"placement=local with profile=one-gpu"):
        fitted_to(settings(trainer={"placement": "local"}), "one-gpu")
