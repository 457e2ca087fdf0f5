"""A warm start on ranks that Ray places: it does what one process does, and what can't be is
refused."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_supervision import pid_of
from tiny_engine import random_completions, tiny_model

from engine.checkpoint.store import CheckpointStore
from engine.config import LoRAConfig, SFTConfig, explain
from engine.errors import ConfigError
from engine.models import load_model
from engine.runtime.policy_runtime import StartModel
from engine.trainers.offline import (
    SFTExample,
    SFTTrainer,
    is_on_ray,
    offline_dtype,
    offline_placement,
)
from engine.trainers.resume import run_with_retries


def examples(rows: int, seed: int = 0) -> list[SFTExample]:
    return [SFTExample(p, r) for p, r in zip(*random_completions(rows, seed), strict=True)]


def settings(**changes: Any) -> SFTConfig:
    values = {"threads": 2, "train_batch_size": 4, "max_steps": 6, "optim": {"lr": 1e-2}}
    return SFTConfig.model_validate(values | changes)


def wait_for_checkpoint(folder: Path, step: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while CheckpointStore(folder).newest_of(step) is None:
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in {timeout_s:g} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("one_rank", [{"parallel": {"fsdp": 2}}, {"placement": "ray"}], ids=str)
def test_ranks_train_save_and_resume_as_one_process(
    tiny_folder: Path, tmp_path: Path, one_thread: None, ray_cluster: None, one_rank: dict[str, Any]
) -> None:
    start, rows, held_out = StartModel(str(tiny_folder), "float32"), examples(10), examples(3, 9)
    wanted = SFTTrainer(start, 0, settings(), seed=0)
    final = wanted.fit(rows, held_out)

    def stop(step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise KeyboardInterrupt

    first = settings(parallel={"dp": 2}, save_freq=2)
    with SFTTrainer(start, 0, first, seed=0, on_step=stop) as copies:
        with pytest.raises(ConfigError, match="the model is on the ranks"):
            _ = copies.model
        with pytest.raises(KeyboardInterrupt):
            copies.fit(rows, held_out, tmp_path / "run")
    resumed: list[int] = []
    with SFTTrainer(start, 0, settings(**one_rank), seed=0) as shards:
        shards.on_resume = lambda folder, step: resumed.append(step)
        found = shards.fit(rows, held_out, tmp_path / "run")
        shards.save(tmp_path / "out", tiny_folder)
    assert resumed == [2]
    for name in ("sft/loss", "sft/grad_norm", "sft/lr", "sft/validation_loss"):
        assert found[name] == pytest.approx(final[name], rel=1e-3), name
    saved, whole = load_model(tmp_path / "out").state_dict(), wanted.model.state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint(
    tiny_folder: Path, tmp_path: Path, one_thread: None, ray_cluster: None
) -> None:
    start, rows = StartModel(str(tiny_folder), "float32"), examples(10)
    config = settings(parallel={"fsdp": 2}, save_freq=2)
    with SFTTrainer(start, 0, config, seed=0) as whole:
        wanted = whole.fit(rows, [])
    struck: list[int] = []
    resumed: list[int] = []
    found: dict[str, float] = {}

    def work(trainer: SFTTrainer) -> None:
        def strike(step: int, total: int, metrics: dict[str, float]) -> None:
            if step == 3 and not struck:
                wait_for_checkpoint(tmp_path / "run", 2)  # ranks write it during step 3
                struck.append(pid_of("sft"))
                os.kill(struck[0], signal.SIGKILL)

        trainer.on_step = strike
        trainer.on_resume = lambda folder, step: resumed.append(step)
        found.update(trainer.fit(rows, [], tmp_path / "run"))

    make = partial(SFTTrainer, start, 0, config, seed=0)
    run_with_retries(make, work, tmp_path / "run", max_attempts=2)
    assert struck
    assert resumed == [2]
    del found["sft/tokens_per_s"], wanted["sft/tokens_per_s"]
    assert found == wanted


def test_one_rank_is_this_process_unless_ray_is_asked_for() -> None:
    assert not is_on_ray(settings())
    assert is_on_ray(settings(parallel={"tp": 2}))
    assert is_on_ray(settings(placement="ray"))
    assert not is_on_ray(settings(parallel={"tp": 2}, placement="local"))


def test_ranks_share_the_cores_or_take_what_their_pool_says() -> None:
    (pool,) = offline_placement(settings(parallel={"dp": 2}, threads=8)).pools
    assert (pool.roles, pool.world_size, pool.cpus, pool.gpus) == (("sft",), 2, 4.0, 0.0)
    own = [{"roles": ["sft"], "cpus": 21, "gpus": 1, "labels": {"disk": "ssd"}}]
    placement = offline_placement(settings(parallel={"fsdp": 16}, pools=own, step_timeout_s=60))
    (pool,) = placement.pools
    assert (pool.world_size, pool.cpus, pool.gpus, pool.labels) == (16, 21, 1, {"disk": "ssd"})
    assert placement.call_timeout_s == 60


def test_auto_is_the_dtype_of_the_ranks_devices(tiny_folder: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    load = tiny_model("llama").config
    load.hidden_size = 256
    load.save_pretrained(wide)
    on_gpus = settings(placement="ray", pools=[{"roles": ["sft"], "gpus": 1}])
    assert offline_dtype("auto", str(wide), on_gpus) == "bfloat16"
    assert offline_dtype("auto", str(tiny_folder), on_gpus) == "float32"
    assert offline_dtype("float16", str(wide), on_gpus) == "float16"


@pytest.mark.parametrize(
    ("changes", "lora", "said"),
    [
        (
            {"parallel": {"dp": 2}, "placement": "local"},
            {},
            r"sft.parallel is a layout of 2 ranks \(dp=2\), and sft.placement=local",
        ),
        ({"parallel": {"tp": 3}}, {}, r"tp=3 does not divide the model's num_attention_heads=4"),
        ({"parallel": {"pp": 3}}, {}, r"pp=3 stages are more than the model's 2 layers"),
        (
            {"parallel": {"tp": 2}},
            {"rank": 4, "quantize": "nf4"},
            r"quantize=nf4 with sft.parallel.tp=2: .*set tp=1",
        ),
        (
            {"parallel": {"dp": 2, "offload_params": True}},
            {},
            r"sft.parallel.offload_params is FSDP's; set sft.parallel.fsdp to 2",
        ),
        (
            {"parallel": {"dp": 2}, "pools": [{"roles": ["actor"]}]},
            {},
            r"sft.pools has the roles .*'actor'.* one pool here, of roles \[sft\]",
        ),
    ],
)
def test_what_can_t_be_is_refused_before_a_rank_starts(
    tiny_folder: Path, changes: dict[str, Any], lora: dict[str, Any], said: str
) -> None:
    start = StartModel(str(tiny_folder), "float32", LoRAConfig.model_validate(lora))
    with pytest.raises(ConfigError, match=said):
        SFTTrainer(start, 0, settings(**changes), seed=0)


def test_a_model_in_memory_stays_in_this_process() -> None:
    with pytest.raises(ConfigError, match=r"dp=2 on Ray.*give StartModel\(path, dtype\)"):
        SFTTrainer(tiny_model("qwen2"), 0, settings(parallel={"dp": 2}), seed=0)


def test_packing_has_one_setting() -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as refused:
        settings(parallel={"packing": False})
    assert "sft.parallel.packing is sft.packing here; set that" in explain(refused.value)
