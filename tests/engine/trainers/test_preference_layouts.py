"""Preferences and reward models on ranks that Ray places: they do what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_engine import random_completions
from transformers import AutoModelForSequenceClassification

from engine import PreferenceTrainer, RewardModelTrainer
from engine.config import LoRAConfig, PreferenceTrainingConfig, RewardModelTrainingConfig
from engine.data.training_examples import LabelledExample, PairExample, PreferenceExample
from engine.models import load_model
from engine.runtime.policy_runtime import StartModel

pytestmark = pytest.mark.slow


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
