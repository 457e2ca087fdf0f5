"""RL over episodes, in every mode and after kills."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import guessing
import pandas as pd
import pytest
import torch
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder
from transformers import AutoModelForCausalLM

from engine.algorithms.correction import GAP_PREFIXES
from engine.batch import Batch
from engine.checkpoint.store import find_latest
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, EpisodeError
from engine.rollout.stream import take_partial_groups
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config


def settings(placement: str = "local", **changes: Any) -> RLConfig:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor": {
            "optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0},
            "ppo_mini_batch_size": 8,
        },
        "rollout": {
            "n": 4,
            "multi_turn": {"enable": True, "max_turn_length": 6},
            "agent": {"environment": "digit_games:DigitGame", "num_workers": 0},
        },
        "reward": {"name": "environment"},
        "trainer": {
            "total_training_steps": 2,
            "train_batch_size": 4,
            "placement": placement,
            "threads": 1,
        },
    }
    for section, content in changes.items():
        merged = values.get(section, {})
        for key, value in content.items():
            old = merged.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            merged[key] = old | value if both else value
        values[section] = merged
    return RLConfig.model_validate(values)


def trainer(folder: Path, config: RLConfig, dtype: str = "auto") -> RLTrainer:
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), config.trainer.train_batch_size, 0)
    return RLTrainer(folder, config, loader, max_response_length=36, max_model_len=60, dtype=dtype)


def run(
    folder: Path, config: RLConfig, out: Path | None = None, dtype: str = "auto"
) -> tuple[list[dict[str, float]], list[Batch]]:
    """Each step's metrics without times, then the validation's; and the steps' batches."""
    history: list[dict[str, float]] = []
    batches: list[Batch] = []
    with trainer(folder, config, dtype) as subject:
        subject.on_step = lambda step, total, metrics: history.append(dict(metrics))
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
        history.append(subject.validate(arithmetic_rows(5)))
        if out is not None:
            subject.save(out)
    return [{k: v for k, v in m.items() if not k.endswith("_s")} for m in history], batches


@pytest.mark.usefixtures("one_thread")
def test_a_step_learns_from_what_was_sampled_alone(tiny_folder: Path) -> None:
    history, batches = run(tiny_folder, settings(algorithm={"adv_estimator": "grpo_turn"}))
    for metrics in history[:2]:
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["episode/turns_mean"] == 3
        assert metrics["episode/end_done"] == 1
        assert 0 <= metrics["episode/digits"] <= 1
        assert metrics["episode/observed_tokens"] > 0
        assert metrics["actor/grad_norm"] > 0
    assert history[0]["prob_gap/max"] < 1e-3 if "prob_gap/max" in history[0] else True
    batch = batches[0]
    outside = ~batch["response_mask"].bool()
    for name in ("advantages", "token_level_scores", "token_level_rewards"):
        assert bool((batch[name][outside] == 0).all()), name
    sums = torch.tensor(batch.columns["episode_reward"].astype(float)).float()
    torch.testing.assert_close(batch["token_level_scores"].sum(1), sums)
    assert history[0]["reward/mean"] == pytest.approx(float(sums.mean()))
    assert history[-1]["validation/episode/turns_mean"] == 3
    assert len(batch) == 16


@pytest.mark.usefixtures("one_thread")
def test_the_trainer_gives_sampled_tokens_the_log_probs_that_rollout_did(
    tiny_folder: Path,
) -> None:
    config = settings(actor={"old_log_probs": "trainer"})
    _, batches = run(tiny_folder, config)
    for batch in batches[:2]:
        kept = batch["response_mask"].bool()
        torch.testing.assert_close(
            batch["old_log_probs"][kept], batch["rollout_log_probs"][kept], atol=1e-4, rtol=1e-4
        )


@pytest.mark.usefixtures("one_thread")
def test_an_outcome_and_the_environments_rewards_are_both_learned_from(tiny_folder: Path) -> None:
    reward = {"name": "tiny_engine:digit_share", "isolation": "none"}
    _, batches = run(tiny_folder, settings(reward=reward))
    scores, given = batches[0]["token_level_scores"], batches[0]["environment_rewards"]
    outcome = scores - given
    assert bool((outcome != 0).any())
    assert int((outcome != 0).sum(1).max()) == 1  # on the last sampled token
    last = [row.nonzero()[-1].item() for row in batches[0]["response_mask"]]
    elsewhere = outcome.clone()
    elsewhere[torch.arange(len(last)), torch.tensor(last)] = 0
    assert bool((elsewhere == 0).all())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_parts_that_are_over_are_scored_while_others_play(tiny_folder: Path) -> None:
    rows: list[list[Any]] = []
    for parts in (1, 2):
        config = settings(rollout={"parts": parts}, trainer={"total_training_steps": 1})
        history, [batch, _] = run(tiny_folder, config)
        assert history[0]["episode/turns_mean"] == 3
        scores, groups = batch["token_level_scores"].sum(1).tolist(), batch["group_ids"].tolist()
        sampled = batch["response_mask"].bool()
        own = [row[m].tolist() for row, m in zip(batch["responses"], sampled, strict=True)]
        rows.append(sorted(zip(groups, own, scores, strict=True)))
    assert rows[0] == rows[1]


@pytest.mark.usefixtures("one_thread")
def test_failed_episodes_are_not_learned_from(tiny_folder: Path) -> None:
    spec = {"name": "digit_games:SometimesFaulty"}
    history, batches = run(tiny_folder, settings(rollout={"agent": {"environment": spec}}))
    failed = batches[0]["reward_failed"]
    assert 0 < int(failed.sum()) < len(failed)
    assert bool((batches[0]["response_mask"][failed] == 0).all())
    assert history[0]["episode/end_failed"] == pytest.approx(float(failed.float().mean()))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "die"])
@pytest.mark.parametrize("on_error", ["drop", "score"])
def test_a_run_goes_on_whatever_an_environment_s_process_does(
    tiny_folder: Path, fault: str, on_error: str
) -> None:
    game = {"name": "digit_games:SometimesGone", "options": {"fault": fault}}
    agent = {"environment": game, "num_workers": 1, "concurrency": 4}
    agent |= {"call_timeout_s": 1.0, "on_error": on_error}
    if on_error == "score":
        agent["error_reward"] = -1.0
    config = settings(rollout={"agent": agent}, trainer={"total_training_steps": 4})
    history, batches = run(tiny_folder, config)
    assert len(history) == 5
    failed = 0
    for metrics, batch in zip(history[:4], batches[:4], strict=True):
        assert math.isfinite(metrics["actor/grad_norm"])
        bad = torch.tensor([end == "failed" for end in batch.columns["episode_end"]])
        failed += int(bad.sum())
        assert torch.equal(batch["reward_failed"], bad & (on_error == "drop"))
        kept = batch["response_mask"].bool().any(1)
        assert torch.equal(kept, ~(bad & (on_error == "drop")))
        if on_error == "score":
            assert bool((batch["environment_rewards"][bad].min(1).values < 0).all())
    assert 0 < failed < 64


@pytest.mark.usefixtures("one_thread")
def test_a_step_without_any_episode_says_why(tiny_folder: Path) -> None:
    spec = {"name": "digit_games:FaultyGame"}
    with pytest.raises(EpisodeError, match=r"none of the 16 episodes .* dice fell off"):
        run(tiny_folder, settings(rollout={"agent": {"environment": spec}}))
    limits = {"multi_turn": {"max_assistant_turns": 1}, "agent": {"on_limit": "drop"}}
    with pytest.raises(EpisodeError, match="a limit ended them"):
        run(tiny_folder, settings(rollout=limits))


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_is_the_whole_run(tiny_folder: Path, tmp_path: Path) -> None:
    trainers = {"old_log_probs": "trainer"}  # rollout's depend on who answers first
    config = settings(actor=trainers, trainer={"total_training_steps": 2, "save_freq": 1})
    whole: list[dict[str, float]] = []
    with trainer(tiny_folder, config) as subject:
        subject.on_step = lambda step, total, metrics: whole.append(dict(metrics))
        subject.fit(checkpoint_dir=tmp_path / "a")
        expected = subject.validate(arithmetic_rows(4))
    with trainer(tiny_folder, config) as subject:
        subject.fit(1, checkpoint_dir=tmp_path / "b")
    again: list[dict[str, float]] = []
    with trainer(tiny_folder, config) as subject:
        subject.on_step = lambda step, total, metrics: again.append(dict(metrics))
        subject.fit(checkpoint_dir=tmp_path / "b")
        got = subject.validate(arithmetic_rows(4))
    for ours, theirs in zip(again, whole[1:], strict=True):
        for name in set(ours) & set(theirs):
            if not name.endswith("_s") and not name.startswith(("checkpoint", *GAP_PREFIXES)):
                assert ours[name] == theirs[name], name
    same = {k: v for k, v in expected.items() if not k.endswith("_s")}
    assert same == {k: v for k, v in got.items() if not k.endswith("_s")}


@pytest.mark.usefixtures("one_thread")
def test_environments_in_processes_of_their_own_change_no_number(tiny_folder: Path) -> None:
    actor = {"old_log_probs": "trainer"}
    here, _ = run(tiny_folder, settings(actor=actor))
    apart, _ = run(tiny_folder, settings(actor=actor, rollout={"agent": {"num_workers": 1}}))
    for ours, theirs in zip(here, apart, strict=True):
        kept = [key for key in ours if not key.startswith(GAP_PREFIXES)]
        assert [ours[key] for key in kept] == [theirs[key] for key in kept]


@pytest.mark.usefixtures("one_thread")
def test_tools_that_a_prompt_shows_take_nothing_from_the_response(
    tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from engine.data.templates import encode_prompt, tool_tokens

    game = {"name": "digit_games:HostileGame", "options": {"turns": 1}}
    rollout = {"agent": {"environment": game}, "multi_turn": {"format": "digit_games:digit_calls"}}
    row, tools = arithmetic_rows(1)[0], [{"function": {"name": "digits"}}]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{% if tools %}{{ 8 * '1+2' }}{% endif %}" + tokenizer.chat_template
    shown = tool_tokens(tokenizer, tools)
    assert shown >= 8
    assert tool_tokens(tokenizer, ()) == 0
    folder, batches = tmp_path / "shows", list[Batch]()
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plain = len(encode_prompt(tokenizer, row["prompt"]))
    loader = PromptLoader(pd.DataFrame([row] * 4), 4, 0)
    config = settings(rollout=rollout, trainer={"total_training_steps": 1})
    with RLTrainer(
        folder, config, loader, max_response_length=6, max_model_len=plain + 6
    ) as subject:
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
    read = batches[0]["attention_mask"].sum(1) - (batches[0]["responses"] != 0).sum(1)
    assert int(read.max()) == plain + shown
    assert set(batches[0].columns["episode_end"]) == {"done"}
    assert int(batches[0]["response_mask"].sum(1).max()) == 6


@pytest.mark.usefixtures("one_thread")
def test_branches_are_rows_of_one_episode(tiny_folder: Path, tmp_path: Path) -> None:
    """The template leaves out the sign of earlier questions, as Qwen3's leaves out thoughts."""
    from transformers import AutoTokenizer

    folder = tmp_path / "rewriting"
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    said = "message['content'] + '<|end|>'"
    shorter = "(message['content'] if loop.last else message['content'] | replace('+', ''))"
    shorter += " + '<|end|>'"
    assert said in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(said, shorter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = settings(rollout={"multi_turn": {"history": "branches"}})
    history, batches = run(folder, config)
    batch = batches[0]
    assert len(batch) > 16
    assert int((~batch["continues"]).sum()) == 16
    turns = torch.tensor(batch.columns["episode_turns"].astype(int))
    assert bool((turns == 3).all())
    sums = torch.tensor(batch.columns["episode_reward"].astype(float)).float()
    whole = ~batch["continues"]
    assert history[0]["reward/mean"] == pytest.approx(float(sums[whole].mean()), rel=1e-5)
    ids = batch["episode_ids"]
    for episode in ids.unique():
        rows = ids == episode
        scores = batch["token_level_scores"][rows].sum()
        assert float(scores) == pytest.approx(float(sums[rows][0]), rel=1e-4, abs=1e-6)
        kept = batch["response_mask"][rows].bool()
        assert len(batch["advantages"][rows][kept].unique()) == 1  # one completion of the group
    with pytest.raises(ConfigError, match="history=branches"):
        check_config(
            settings(
                algorithm={"adv_estimator": "gae"},
                rollout={"multi_turn": {"history": "branches"}},
            )
        )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"tensor_parallel_size": 2}}, "rollout.tensor_parallel_size=2"),
        (
            {"rollout": {"engine": "vllm", "tensor_parallel_size": 2}},
            "set it to 1, or rollout.vllm.in_process=false",
        ),
        (
            {
                "rollout": {
                    "engine": "server",
                    "server": {"url": "http://127.0.0.1:1"},
                    "agent": {"turn_timeout_s": 1.0},
                }
            },
            "turn_timeout_s with rollout.engine=server",
        ),
        ({"rollout": {"agent": {"environment": "digit_games:Nothing"}}}, "Nothing"),
        ({"rollout": {"agent": {"environment": ""}}}, "rollout.agent.environment"),
        ({"reward": {"overlong_buffer": {"enable": True}}}, "overlong_buffer"),
        ({"rollout": {"multi_turn": {"enable": False}}}, "rollout.multi_turn"),
    ],
)
def test_what_episodes_don_t_go_with_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(settings(**changes))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gae_turn"])
def test_local_and_ray_give_equal_runs(
    tiny_folder: Path, tmp_path: Path, ray_cluster: None, name: str
) -> None:
    changes = {"algorithm": {"adv_estimator": name}, "actor": {"old_log_probs": "trainer"}}
    local, _ = run(tiny_folder, settings("local", **changes), tmp_path / "local")
    remote, _ = run(tiny_folder, settings("ray", **changes), tmp_path / "ray")
    for ours, theirs in zip(local, remote, strict=True):
        assert ours.keys() == theirs.keys()
        kept = [key for key in ours if not key.startswith(GAP_PREFIXES)]
        assert [ours[key] for key in kept] == [theirs[key] for key in kept]
    here = AutoModelForCausalLM.from_pretrained(tmp_path / "local").state_dict()
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "ray").state_dict()
    assert all(torch.equal(here[key], there[key]) for key in here)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_digits_are_learned(tiny_folder: Path) -> None:
    config = settings(
        rollout={"n": 8, "agent": {"environment": "digit_games:DigitGame"}},
        trainer={"total_training_steps": 30, "train_batch_size": 8},
        actor={"use_kl_loss": False},
    )
    history, _ = run(tiny_folder, config)
    first = sum(m["reward/mean"] for m in history[:5]) / 5
    last = sum(m["reward/mean"] for m in history[25:30]) / 5
    assert last > first + 0.5, (first, last)  # of 3


needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


VLLM = {"engine": "vllm", "kv_cache_memory_mb": 64, "max_num_seqs": 8}


FLOAT = "float32"  # in bfloat16 two engines round otherwise


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM on CPU has attention for heads of 32 and more."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return write_tiny_folder(folder, TINY_MODEL.model_copy(update={"hidden_size": 128}))


def ahead(mode: str, placement: str = "local", steps: int = 4, **rollout: Any) -> Any:
    run = {"mode": mode, "total_training_steps": steps}
    return settings(placement, trainer=run, rollout=rollout)


def check_versions(history: list[dict[str, float]], batches: list[Batch], bound: int = 1) -> None:
    assert history[0]["staleness/max"] == 0
    for step, (metrics, batch) in enumerate(zip(history, batches, strict=True)):
        assert metrics["actor/grad_norm"] > 0
        assert metrics["episode/turns_mean"] == 3
        assert math.isfinite(metrics["rollout_corr/rollout_is_mean"])
        kept = batch["response_mask"].bool()
        versions = batch["token_versions"][kept]
        assert 0 <= step - int(versions.min()) <= bound  # what a step learns from
        assert int(versions.max()) <= step
        assert metrics["staleness/max"] == step - int(versions.min())
        # A token that the present weights drew has weight 1; another one its own ratio.
        ratios = (batch["old_log_probs"] - batch["rollout_log_probs"])[kept].exp()
        assert bool((ratios[versions == step] - 1).abs().lt(1e-3).all())
        if bool((versions < step).any()):
            assert float((ratios[versions < step] - 1).abs().max()) > 1e-3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("placement", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_episodes_ahead_of_the_trainer_stay_within_the_bound(
    tiny_folder: Path, request: pytest.FixtureRequest, mode: str, placement: str
) -> None:
    if placement == "ray":
        request.getfixturevalue("ray_cluster")
    history, batches = run(tiny_folder, ahead(mode, placement))
    check_versions(history[:-1], batches[:4])
    if mode == "one_step_off":
        assert [metrics["staleness/max"] for metrics in history[:-1]] == [0, 1, 1, 1]
    assert history[-1]["validation/episode/turns_mean"] == 3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_ranks_on_ray_save_the_episodes_of_their_step(
    tiny_folder: Path, tmp_path: Path, ray_cluster: None
) -> None:
    slow = {"name": "digit_games:SavedGame", "options": {"delay": 0.2}}
    config = settings(
        "ray",
        rollout={"agent": {"environment": slow, "save_freq_s": 0.05}},
        trainer={"total_training_steps": 1},
    )
    seen: set[str] = set()
    with trainer(tiny_folder, config) as subject:
        folder, ended = tmp_path / "episodes", threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                seen.update(path.name for path in folder.glob("rollout-*"))

        watching = threading.Thread(target=watch)
        watching.start()
        subject.fit(checkpoint_dir=tmp_path)
        ended.set()
        watching.join()
    assert seen == {"rollout-00000-of-00001.safetensors"}
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_episodes_under_way_resume_with_an_async_run(tiny_folder: Path, tmp_path: Path) -> None:
    """Those that are over, and those that aren't, are in the checkpoint and are learned from."""
    slow = {"name": "digit_games:SavedGame", "options": {"delay": 0.3}}
    chosen: list[str] = []

    def config() -> Any:
        made = ahead("async", steps=12, agent={"environment": slow, "concurrency": 8})
        keep = {"save_freq": 1, "max_checkpoints_to_keep": 12}
        return made.model_copy(update={"trainer": made.trainer.model_copy(update=keep)})

    def has_begun(step: int, total: int, metrics: dict[str, float]) -> None:
        found = find_latest(tmp_path)
        begun = [] if found is None else [one for one in found.state["prompts"]["begun"] if one]
        if any(one["sequences"] for tree in begun for one in tree["episodes"]):
            assert found is not None
            chosen.append(found.folder)
            raise KeyboardInterrupt

    with trainer(tiny_folder, config()) as first:
        first.on_step = has_begun
        with pytest.raises(KeyboardInterrupt):
            first.fit(checkpoint_dir=tmp_path)
    batches: list[Batch] = []
    with trainer(tiny_folder, config()) as second:
        second.load_checkpoint(chosen[0])
        saved = {
            prompt.columns["prompt"][0][0]["content"]: partial.episodes
            for prompt in second.source.prompts._resumed
            for partial in take_partial_groups(prompt)[1]
            if partial is not None
        }
        second.on_rollouts = lambda split, step, batch: batches.append(batch)
        second.fit(2)
    gone_on = 0
    for batch in batches:
        for row, prompt in enumerate(batch.columns["prompt"]):
            ids = batch["responses"][row].tolist()
            for tree in saved.get(prompt[0]["content"], ()):
                begun = tree["sequences"][0]["token_ids"].tolist()
                if begun and ids[: len(begun)] == begun:
                    drawn = tree["sequences"][0]["log_probs"]
                    own = batch["rollout_log_probs"][row][: len(begun)]
                    gone_on += torch.equal(own, drawn)
    assert gone_on > 0


@pytest.mark.usefixtures("one_thread")
@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_vllm_plays_ahead_of_the_trainer(wide_folder: Path, ray_cluster: None, mode: str) -> None:
    history, batches = run(wide_folder, ahead(mode, "ray", **VLLM), dtype=FLOAT)
    check_versions(history[:-1], batches[:4])


@pytest.mark.usefixtures("one_thread")
@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_vllm_and_native_play_the_same_greedy_episodes(wide_folder: Path, own: bool) -> None:
    found: dict[str, Batch] = {}
    for engine in ("native", "vllm"):
        rollout: dict[str, Any] = VLLM if engine == "vllm" else {}
        if engine == "vllm" and own:
            rollout = rollout | {"vllm": {"in_process": False}, "tensor_parallel_size": 2}
        with trainer(wide_folder, settings(rollout=rollout), FLOAT) as subject:
            subject.on_rollouts = lambda split, step, batch, e=engine: found.update({e: batch})
            subject.validate(arithmetic_rows(6))
    ours, theirs = found["vllm"], found["native"]
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    assert theirs.columns["episode_turns"].tolist() == [3] * 6
    torch.testing.assert_close(
        ours["rollout_log_probs"], theirs["rollout_log_probs"], atol=1e-4, rtol=1e-4
    )


@pytest.mark.usefixtures("one_thread")
@needs_vllm
@pytest.mark.slow
def test_vllm_samples_what_the_trainer_learns_from(wide_folder: Path) -> None:
    rollout = VLLM | {"agent": {"num_workers": 1}}
    history, batches = run(
        wide_folder, settings(rollout=rollout, actor={"old_log_probs": "trainer"}), dtype=FLOAT
    )
    assert [metrics["staleness/max"] for metrics in history[:2]] == [0, 0]
    for batch in batches[:2]:
        kept = batch["response_mask"].bool()
        torch.testing.assert_close(
            batch["old_log_probs"][kept], batch["rollout_log_probs"][kept], atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("estimator", ["grpo", "grpo_turn"])
def test_a_search_is_learned(tmp_path: Path, estimator: str) -> None:
    start = guessing.write_start(tmp_path / "start")
    config = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": estimator},
            "actor": {
                "optim": {"lr": 1e-3, "weight_decay": 0.0, "warmup_ratio": 0.0},
                "use_kl_loss": False,
            },
            "rollout": {
                "n": 8,
                "multi_turn": {"enable": True, "max_turn_length": 4, "max_assistant_turns": 3},
                "agent": {"environment": "guessing:Guessing", "num_workers": 0},
            },
            "reward": {"name": "environment"},
            "trainer": {
                "total_training_steps": 80,
                "train_batch_size": 35,
                "placement": "local",
                "threads": 1,
                "test_freq": 100,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(guessing.rows(35)), 35, 0)
    solved: list[float] = []
    with RLTrainer(start, config, loader, max_response_length=40, max_model_len=60) as trainer:
        trainer.on_step = lambda step, total, metrics: solved.append(metrics["reward/mean"])
        trainer.fit()
        greedy = trainer.validate(guessing.rows(7))
    before, after = sum(solved[:3]) / 3, sum(solved[-3:]) / 3
    print(
        f"{estimator}: solved {before:.2f} → {after:.2f}, greedy {greedy['validation/reward']:.2f}"
    )
    assert before < 0.8
    assert after > before + 0.2
    assert after > 0.95


SCRIPT = Path(__file__).with_name("killed_episodes.py")


ASKED = 4 * 4  # episodes of a step


def start(folder: Path, out: Path, log: Path, name: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(out), name],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NOTED_GAMES": str(log)},
    )


def asked(log: Path, what: str) -> int:
    return log.read_text().count(what) if log.exists() else 0


def history(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "history.json").read_text())
    times = ("perf/", "checkpoint/", "episode/environment_s", *GAP_PREFIXES)
    return [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["digit_games:SavedGame", "digit_games:NotedGame", "agents_of_users:slowly"]
)
def test_a_kill_in_the_middle_of_a_step_leaves_no_trace(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    begun, again = tmp_path / "begun", tmp_path / "again"
    assert start(tiny_folder, whole, tmp_path / "log", name).wait(600) == 0
    assert (asked(tmp_path / "log", "reset"), asked(tmp_path / "log", "step")) == (48, 144)

    first = start(tiny_folder, killed, begun, name)
    until = time.monotonic() + 300
    saved = killed / "checkpoints" / "episodes" / "rollout-00000-of-00001.safetensors"
    while asked(begun, "reset") < ASKED + 10 or not saved.exists():  # in the second step
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.25)  # for a save
    first.kill()
    first.wait()
    assert start(tiny_folder, killed, again, name).wait(600) == 0

    if name == "digit_games:SavedGame":  # what was saved of the second step isn't played again
        assert asked(again, "reset") <= 2 * ASKED - 6
        steps = asked(begun, "step") + asked(again, "step")
        assert 144 <= steps < 144 + 20
    else:  # but for what was over
        assert 2 * ASKED - 16 < asked(again, "reset") < 2 * ASKED
    assert not saved.exists()
    assert history(killed) == history(whole)
    one, two = (
        AutoModelForCausalLM.from_pretrained(out / "model").state_dict() for out in (whole, killed)
    )
    assert all(torch.equal(tensor, two[key]) for key, tensor in one.items())
