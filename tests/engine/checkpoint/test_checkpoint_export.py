"""Model folders out of checkpoints: what the actor itself saves, whatever ranks wrote them."""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import TINY_MODEL, arithmetic_rows, training_batch, write_tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.checkpoint import CheckpointStore, find_latest
from engine.cli.commands.export import main
from engine.config import ActorConfig, LoRAConfig, RLConfig
from engine.controller.worker_host import shard_rows
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError, DamagedCheckpointError, ModelError
from engine.models import load_model, save_model
from engine.parallel.layout import Layout
from engine.storage.folder import Folder
from engine.trainers import huggingface_export as export_beside
from engine.trainers.huggingface_export import export_policy
from engine.trainers.rl import RLTrainer
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(
    folder: str, draft: str, out: str, parallel: dict[str, Any], model: dict[str, Any]
) -> dict[str, Tensor]:
    """On each rank: an update, the state saved, and the policy as the actor saves it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    values = {"optim": {"lr": 1e-2}, "parallel": parallel, "use_kl_loss": False}
    config = ActorConfig.model_validate(values)
    layout = Layout.of(config.parallel)
    worker = ActorWorker(
        WorkerContext("actor", rank, world, layout=layout),
        model_path=folder,
        config=config,
        temperature=1.0,
        total_steps=8,
        seed=0,
        dtype=model["dtype"],
        lora=LoRAConfig.model_validate(model["lora"]),
    )
    worker.update(shard_rows(training_batch(8), layout.data_shard(rank))[0])
    worker.save_state(draft)
    worker.wait_saved()
    worker.save(out)
    return {name: tensor.clone() for name, tensor in worker.sharded.full_tensors()}


def checkpoint(
    folder: Path, root: Path, parallel: dict[str, Any] | None = None, **model: Any
) -> tuple[str, Path, dict[str, Tensor]]:
    """A checkpoint, the folder that the actor saved beside it, and the weights in both."""
    start = {"model": str(folder), "dtype": "float32", "lora": {}} | model
    world, out = Layout(**parallel or {}).world_size, root / "saved"
    store = CheckpointStore(root / "run")
    draft = store.begin(1)
    draft.roles = {"actor": world}
    given = (str(folder), draft.folder, str(out), parallel or {}, start)
    weights = run_ranks(world, trained, *given)[0] if parallel else trained(*given)
    draft.state = {"step": 1, "policy": start}
    store.commit(draft)
    return str(root / "run" / "step_1"), out, weights


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


CASES = and_slow(
    [({"tp": 2}, {}), ({"fsdp": 2}, {"lora": {"rank": 4, "alpha": 8.0}})],
    [
        ({"fsdp": 2, "tp": 2}, {}),
        ({"pp": 2}, {"dtype": "bfloat16"}),
        ({}, {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"], "quantize": "nf4"}}),
    ],
)


@pytest.mark.parametrize(("parallel", "model"), CASES)
def test_it_is_what_the_actor_saves(
    tiny_folder: Path, tmp_path: Path, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    saved, wanted, weights = checkpoint(tiny_folder, tmp_path, parallel, **model)
    assert export_policy(saved, tmp_path / "out") == saved
    assert content(tmp_path / "out") == content(wanted)
    assert (
        content(tmp_path / "out")["model.safetensors"] != content(tiny_folder)["model.safetensors"]
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    if not model.get("lora"):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    assert load_tokenizer(tmp_path / "out")("1+2=") == load_tokenizer(tiny_folder)("1+2=")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def saved(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tiny_folder, tmp_path_factory.mktemp("plain"))[0]


@pytest.fixture(scope="module")
def saved_adapters(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tiny_folder, tmp_path_factory.mktemp("lora"), lora={"rank": 2})[0]


def test_a_model_of_another_shape_is_refused(saved: str, tmp_path: Path) -> None:
    other = write_tiny_folder(
        tmp_path / "other", TINY_MODEL.model_copy(update={"intermediate_size": 64})
    )
    with pytest.raises(CheckpointError, match=r"step_1 is not of the start model .*/other: .*mlp"):
        export_policy(saved, tmp_path / "out", other)
    assert not (tmp_path / "out").exists()


def test_adapters_of_another_base_are_refused(
    saved_adapters: str, tiny_folder: Path, tmp_path: Path
) -> None:
    other = load_model(tiny_folder)
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(0.5)
    save_model(other, load_tokenizer(tiny_folder), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"adapters were trained on other weights; give --mo"):
        export_policy(saved_adapters, tmp_path / "out", tmp_path / "other")


def test_a_start_model_that_is_gone(saved: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the start model \(--model\)='.*/gone' does not exist"):
        export_policy(saved, tmp_path / "out", tmp_path / "gone")


def test_a_folder_that_is_taken_stays(saved: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes is there already; delete it"):
        export_policy(saved, tmp_path / "notes")
    assert (tmp_path / "notes" / "text").read_text() == "mine"


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint and holds none"):
        export_policy(tmp_path / "nothing", tmp_path / "out")
    store = CheckpointStore(tmp_path)
    draft = store.begin(1)
    draft.state = {"model": {"weight": torch.zeros(3)}}
    store.commit(draft)
    with pytest.raises(CheckpointError, match=r"step_1 has no policy of an RL run; a warm start"):
        export_policy(tmp_path / "step_1", tmp_path / "out")


def test_a_changed_file_is_found(saved: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "run" / "step_1"))
    shard = copy / "actor-00000-of-00001.model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError, match=r"model.safetensors differs from its check"):
        export_policy(copy, tmp_path / "out")
    shard.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"model.safetensors is missing"):
        export_policy(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_store_on_both_ends(saved: str, bucket: str, tmp_path: Path) -> None:
    root, out = Folder(f"{bucket}/{tmp_path.name}"), Folder(f"{bucket}/{tmp_path.name}-out")
    root.files.fs.put(str(Path(saved).parent), f"{root.path}", recursive=True)
    out.write("model.safetensors", [b"what an upload that was broken off has left"])
    export_policy(root.uri, out.uri)
    export_policy(saved, tmp_path / "here")
    out.files.fs.get(out.path, str(tmp_path / "copy"), recursive=True)
    assert content(tmp_path / "copy") == content(tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"is there already"):
        export_policy(root.uri, out.uri)


def test_the_command(saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main([str(Path(saved).parent), "--out", out, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("dry run, nothing is written; ")
    assert not Path(out).exists()
    assert main([saved, "--out", out, "--model", "/nowhere", "--dry-run"]) == 1
    assert "/nowhere" in capsys.readouterr().err
    assert main([str(Path(saved).parent), "--out", out]) == 0
    assert capsys.readouterr().out == f"{out}: the policy of {saved}\n"
    assert main([saved, "--out", out]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "folder for its newest good one" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as stop:
        main([saved])
    assert stop.value.code == 2


def test_the_command_ends_with_the_run_that_called_it(saved: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.export", saved, "--out", str(tmp_path / "out"), "--beside"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == 130
    assert list(tmp_path.iterdir()) == []


def trainer(folder: Path, **settings: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "actor": {"optim": {"lr": 5e-3}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    }
    values["trainer"] = {
        "total_training_steps": 3,
        "train_batch_size": 4,
        "placement": "local",
        "threads": 1,
        "save_freq": 1,
        "max_checkpoints_to_keep": 1,
        "step_timeout_s": 240.0,
    } | settings
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(
        folder, RLConfig.model_validate(values), loader, max_response_length=6, max_model_len=40
    )


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes of exports begin when this file is there."""
    path, slow = tmp_path / "gate", tmp_path / "python"
    python = shlex.quote(sys.executable)
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {path} ]; do sleep 0.05; done\nexec {python} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(export_beside.sys, "executable", str(slow))
    monkeypatch.setattr(export_beside, "_NICENESS", 0)  # the other tests leave it no core
    return path


def test_a_run_makes_them_beside_its_checkpoints_and_waits_for_none(
    tiny_folder: Path, tmp_path: Path, gate: Path
) -> None:
    root = tmp_path / "run"

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 3:  # two have been saved by then, and no export has begun
            assert find_latest(root) is not None
            assert not (root / "huggingface").exists()
            gate.touch()

    with trainer(tiny_folder, save_huggingface=True) as subject:
        subject.on_step = on_step
        subject.fit(checkpoint_dir=root)
        subject.save(tmp_path / "saved")
    assert sorted(path.name for path in root.iterdir()) == ["huggingface", "step_3"]
    assert [path.name for path in (root / "huggingface").iterdir()] == ["step_3"]
    assert content(root / "huggingface" / "step_3") == content(tmp_path / "saved")
    found = find_latest(root)
    assert found is not None
    assert found.folder == str(root / "step_3")
    assert find_latest(root / "huggingface") is None


@pytest.mark.slow
def test_a_run_that_goes_on_makes_what_is_missing_and_lets_the_old_go(
    tiny_folder: Path, bucket: str, tmp_path: Path
) -> None:
    root = Folder(f"{bucket}/{tmp_path.name}")
    exports = root / "huggingface"
    with trainer(tiny_folder, total_training_steps=1) as first:
        first.fit(checkpoint_dir=root.uri)
        assert root.folders() == ["step_1"]
    with trainer(tiny_folder, total_training_steps=1, save_huggingface=True) as second:
        second.fit(checkpoint_dir=root.uri)
        assert exports.folders() == ["step_1"]
        second.save(tmp_path / "saved")
    exports.files.fs.get(f"{exports.path}/step_1", str(tmp_path / "copy"), recursive=True)
    assert content(tmp_path / "copy") == content(tmp_path / "saved")
    with trainer(tiny_folder, total_training_steps=2) as third:
        third.fit(checkpoint_dir=root.uri)
    assert exports.folders() == []
    assert root.folders() == ["step_2"]


@pytest.mark.slow
def test_one_that_fails_is_logged_and_ends_nothing(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    with (
        trainer(model, total_training_steps=1, save_huggingface=True) as subject,
        caplog.at_level(logging.WARNING),
    ):
        subject.on_step = lambda *facts: (model / "config.json").unlink()
        subject.fit(checkpoint_dir=tmp_path / "run")
        assert subject.step == 1
    assert f"no model folder of checkpoint {tmp_path}/run/step_1: the start model" in caplog.text
    assert "has no config.json" in caplog.text
    assert (tmp_path / "run" / "step_1" / "COMPLETE").exists()
    assert not (tmp_path / "run" / "huggingface" / "step_1").exists()
