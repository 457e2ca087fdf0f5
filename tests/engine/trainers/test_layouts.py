"""SFT, preference learning and RL on layouts."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from test_supervision import pid_of
from tiny_engine import arithmetic_rows, random_completions, tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from engine import PreferenceTrainer, RewardModelTrainer
from engine.checkpoint.store import CheckpointStore
from engine.config import (
    LoRAConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
    explain,
)
from engine.data.loader import PromptLoader
from engine.data.training_examples import LabelledExample, PairExample, PreferenceExample
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
from engine.trainers.rl import RLTrainer


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
            {"parallel": {"fsdp": 2, "offload_params": True}},
            {},
            r"sft.parallel.offload_params .*no rollout; set sft.parallel.offload_policy",
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
    assert "sft.parallel.packing is sft.packing here; set that" in explain(refused.value, SFTConfig)


def pairs(count: int, seed: int = 0) -> list[PairExample]:
    prompts, chosen = random_completions(count, seed)
    _, rejected = random_completions(count, seed + 100)
    return [PairExample(*ids) for ids in zip(prompts, chosen, rejected, strict=True)]


def labels(count: int, seed: int = 0) -> list[PreferenceExample]:
    return [
        LabelledExample(e.prompt_ids, e.chosen_ids, i % 3 > 0)
        for i, e in enumerate(pairs(count, seed))
    ]


def values(**changes: Any) -> dict[str, Any]:
    own = {"threads": 2, "train_batch_size": 4, "max_steps": 6, "optim": {"lr": 1e-3}}
    return own | changes


def stop_after_two(step: int, total: int, metrics: dict[str, float]) -> None:
    if step == 3:
        raise KeyboardInterrupt


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        if not name.endswith("tokens_per_s"):
            assert found[name] == pytest.approx(wanted[name], rel=2e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "one_rank"),
    [
        ({"loss": "sigmoid"}, {"parallel": {"fsdp": 2}}),
        ({"loss": "sigmoid", "reference": "live"}, {"parallel": {"tp": 2}}),
        (
            {"loss": "kto"},
            {"placement": "ray", "pools": [{"roles": ["preference"], "cpus": 1}]},
        ),
    ],
    ids=str,
)
def test_preferences_on_ranks_are_those_of_one_process(
    tiny_folder: Path,
    tmp_path: Path,
    one_thread: None,
    ray_cluster: None,
    method: dict[str, Any],
    one_rank: dict[str, Any],
) -> None:
    start, read = (
        StartModel(str(tiny_folder), "float32"),
        labels if "kto" in method.values() else pairs,
    )
    rows, held_out = list(read(10)), list(read(3, 9))

    def trainer(**changes: Any) -> PreferenceTrainer:
        config = PreferenceTrainingConfig.model_validate(values(**method, **changes))
        return PreferenceTrainer(start, 0, config, seed=0)

    alone = trainer()
    wanted = alone.fit(rows, held_out)
    with trainer(parallel={"dp": 2}, save_freq=2) as copies:  # an odd batch: ranks get padding
        copies.on_step = stop_after_two
        with pytest.raises(KeyboardInterrupt):
            copies.fit(rows, held_out, tmp_path / "run")
    resumed: list[int] = []
    with trainer(**one_rank) as ranks:
        ranks.on_resume = lambda folder, step: resumed.append(step)
        found = ranks.fit(rows, held_out, tmp_path / "run")
        ranks.save(tmp_path / "out", tiny_folder)
    assert resumed == [2]
    assert_same(found, wanted)
    saved = load_model(tmp_path / "out").state_dict()
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_adapters_on_ranks_have_the_base_as_their_reference(
    tiny_folder: Path, one_thread: None, ray_cluster: None
) -> None:
    start = StartModel(str(tiny_folder), "float32", lora=LoRAConfig(rank=4))
    rows, found = pairs(8), []
    for layout in ({}, {"parallel": {"dp": 2}}):
        config = PreferenceTrainingConfig.model_validate(values(reference="live", **layout))
        with PreferenceTrainer(start, 0, config, seed=0) as trainer:
            found.append(trainer.fit(rows))
    assert_same(found[1], found[0])
    assert found[0]["preference/rewards/margins"] != 0


@pytest.mark.slow
def test_a_reward_model_on_ranks_is_that_of_one_process(
    tiny_folder: Path, tmp_path: Path, one_thread: None, ray_cluster: None
) -> None:
    start = StartModel(str(tiny_folder), "float32")
    rows, held_out = pairs(10), pairs(20, 9)

    def trainer(**changes: Any) -> RewardModelTrainer:
        config = RewardModelTrainingConfig.model_validate(values(**changes))
        return RewardModelTrainer(start, 0, config, seed=0)

    alone = trainer()
    wanted, scores = alone.fit(rows, held_out), alone.scores(held_out)
    with trainer(parallel={"dp": 2}, save_freq=2) as copies:
        copies.on_step = stop_after_two
        with pytest.raises(KeyboardInterrupt):
            copies.fit(rows, held_out, tmp_path / "run")
    with trainer(parallel={"fsdp": 2}) as shards:
        assert_same(shards.fit(rows, held_out, tmp_path / "run"), wanted)
        torch.testing.assert_close(shards.scores(held_out), scores, rtol=1e-3, atol=1e-4)
        shards.save(tmp_path / "reward", tiny_folder)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    ids = [*held_out[0].prompt_ids, *held_out[0].chosen_ids]
    with torch.no_grad():
        logit = saved(input_ids=torch.tensor([ids])).logits[0, 0]
    assert float(logit) == pytest.approx(float(scores[0, 0]), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "layout"),
    [
        ("preference", {"fsdp": 2}),
        ("preference", {"pp": 2}),
        ("reward_model", {"dp": 2}),
        ("reward_model", {"tp": 2}),
    ],
    ids=str,
)
def test_a_run_on_ranks_that_is_stopped_goes_on_bit_for_bit(
    tiny_folder: Path,
    tmp_path: Path,
    one_thread: None,
    ray_cluster: None,
    what: str,
    layout: dict[str, int],
) -> None:
    start, rows = StartModel(str(tiny_folder), "float32"), pairs(10)
    own = values(parallel=layout, save_freq=2, max_steps=4)

    def trainer() -> PreferenceTrainer | RewardModelTrainer:
        if what == "preference":
            config = PreferenceTrainingConfig.model_validate(own)
            return PreferenceTrainer(start, 0, config, seed=0)
        return RewardModelTrainer(start, 0, RewardModelTrainingConfig.model_validate(own), seed=0)

    saved = []
    for stopped in (False, True):
        place = tmp_path / str(stopped)
        if stopped:
            with trainer() as first:
                first.on_step = stop_after_two
                with pytest.raises(KeyboardInterrupt):
                    first.fit(rows, [], place / "run")
        resumed: list[int] = []
        with trainer() as last:
            last.on_resume = lambda folder, step, found=resumed: found.append(step)  # type: ignore[misc]
            last.fit(rows, [], place / "run")
            last.save(place / "out", tiny_folder)
        assert resumed == ([2] if stopped else [])
        saved.append(load_file(place / "out" / "model.safetensors"))
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[1][name], tensor) for name, tensor in saved[0].items())


# One optimizer step a batch: mini-batches are cut from each rank's own rows.
PPO: dict[str, Any] = {
    "algorithm": {"adv_estimator": "gae"},
    "actor": {"use_kl_loss": True},
    "critic": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
}


def trainer(folder: Path, lora: int = 0, **sections: Any) -> RLTrainer:
    values: dict[str, Any] = {
        "actor": {"optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"total_training_steps": 4, "train_batch_size": 4, "threads": 2},
    }
    for section, content in sections.items():
        values[section] = values.get(section, {}) | content
    settings = RLConfig.model_validate(values)
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    return RLTrainer(
        folder,
        settings,
        loader,
        max_response_length=6,
        max_model_len=40,
        lora=LoRAConfig(rank=lora),
    )


def course(
    folder: Path, out: Path, steps: int, checkpoints: Path | None = None, **sections: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Each step's metrics, and the weights at the end."""
    with trainer(folder, **sections) as subject:
        subject.fit(steps, checkpoints)
        subject.save(out)
        return subject.history, load_model(out).state_dict()


COMPARED = (
    "reward/mean",
    "actor/grad_norm",
    "actor/kl",
    "critic/value_loss",
    "response/length_mean",
)


def assert_same_rl(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        compared = [name for name in COMPARED if name in theirs]
        assert len(compared) > 3
        for name in compared:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-4), name


@pytest.fixture(scope="module")
def alone(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    out = tmp_path_factory.mktemp("alone")
    local = {"total_training_steps": 4, "placement": "local"}
    return course(tiny_folder, out, 4, **PPO, trainer=local)


needs_rl = pytest.mark.usefixtures("one_thread", "ray_cluster")


@needs_rl
@pytest.mark.parametrize(
    ("parallel", "rollout_tp"),
    [({"tp": 2}, 1), ({"fsdp": 2}, 2), ({"pp": 2}, 1), ({"sp": 2}, 1)],
)
@pytest.mark.slow
def test_ppo_on_two_ranks_is_ppo_on_one(
    tiny_folder: Path,
    tmp_path: Path,
    alone: tuple[list[dict[str, float]], dict[str, Tensor]],
    parallel: dict[str, int],
    rollout_tp: int,
) -> None:
    sharded = PPO | {
        "actor": {"use_kl_loss": True, "parallel": parallel},
        "rollout": {"n": 2, "tensor_parallel_size": rollout_tp},
    }
    history, weights = course(tiny_folder, tmp_path, 4, **sharded)
    assert_same_rl(history, alone[0])
    for name, tensor in alone[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-3)


@needs_rl
@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes(
    tiny_folder: Path,
    tmp_path: Path,
    alone: tuple[list[dict[str, float]], dict[str, Tensor]],
) -> None:
    sharded = PPO | {"actor": {"use_kl_loss": True, "parallel": {"fsdp": 2}}}
    course(tiny_folder, tmp_path / "two", 2, tmp_path / "run", **sharded)
    local = {"placement": "local"}
    history, weights = course(
        tiny_folder, tmp_path / "one", 2, tmp_path / "run", **PPO, trainer=local
    )
    assert_same_rl(history, alone[0])
    for name, tensor in alone[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-3)


@needs_rl
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.slow
def test_rollout_beside_a_sharded_trainer_gets_whole_weights(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    run = {"mode": mode, "threads": 2, "rollout_threads": 1}
    pools = {"actor": {"parallel": {"fsdp": 2}}, "trainer": run}
    history, weights = course(tiny_folder, tmp_path, 3, **pools)
    assert all(row["actor/grad_norm"] > 0 for row in history)
    # Log-probs of the sampler's copy and of the trainer's shards agree where nothing was updated.
    assert history[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-3)
    assert history[-1]["staleness/max"] <= 1
    assert weights


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"actor": {"parallel": {"tp": 8}}}, r"heads"),
    "layers": ({"actor": {"parallel": {"pp": 3}}}, r"layers"),
    "local": (
        {"actor": {"parallel": {"fsdp": 2}}, "trainer": {"placement": "local"}},
        r"layout of 2 ranks .*trainer.placement=ray",
    ),
    "rollout": (
        {"actor": {"parallel": {"fsdp": 2}}, "rollout": {"tensor_parallel_size": 3}},
        r"rollout.tensor_parallel_size=3 does not divide",
    ),
    "sizes": (
        PPO | {"actor": {"parallel": {"fsdp": 2}}, "critic": {"parallel": {"fsdp": 4}}},
        r"layouts of different sizes",
    ),
    "parts": (
        {"actor": {"parallel": {"fsdp": 2}}, "rollout": {"parts": 3}},
        r"rollout.parts=3 is more than the 2 prompts that each copy",
    ),
    "pairs": (
        {
            "algorithm": {"dataflow": "online_dpo"},
            "actor": {"parallel": {"fsdp": 2}, "ppo_mini_batch_size": 2},
        },
        r"ppo_mini_batch_size=2 holds no pair .*each of 2 data-parallel ranks; set 4 or more",
    ),
    "rows": ({"actor": {"parallel": {"fsdp": 8}}}, r"prompts don't give each of the actor's 8"),
}


@needs_rl
@pytest.mark.parametrize("case", BAD)
def test_layouts_that_can_not_be_are_refused_before_anything_starts(
    tiny_folder: Path, case: str
) -> None:
    sections, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_folder, **sections)
