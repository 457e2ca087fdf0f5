"""Reinforcement learning on episodes, through the real trainer on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM

from engine.algorithms.correction import GAP_PREFIXES
from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, EpisodeError
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_failed_episodes_are_not_learned_from(tiny_folder: Path) -> None:
    spec = {"name": "digit_games:SometimesFaulty"}
    history, batches = run(tiny_folder, settings(rollout={"agent": {"environment": spec}}))
    failed = batches[0]["reward_failed"]
    assert 0 < int(failed.sum()) < len(failed)
    assert bool((batches[0]["response_mask"][failed] == 0).all())
    assert history[0]["episode/end_failed"] == pytest.approx(float(failed.float().mean()))


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


def test_a_step_without_any_episode_says_why(tiny_folder: Path) -> None:
    spec = {"name": "digit_games:FaultyGame"}
    with pytest.raises(EpisodeError, match=r"none of the 16 episodes .* dice fell off"):
        run(tiny_folder, settings(rollout={"agent": {"environment": spec}}))
    limits = {"multi_turn": {"max_assistant_turns": 1}, "agent": {"on_limit": "drop"}}
    with pytest.raises(EpisodeError, match="a limit ended them"):
        run(tiny_folder, settings(rollout=limits))


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


def test_environments_in_processes_of_their_own_change_no_number(tiny_folder: Path) -> None:
    actor = {"old_log_probs": "trainer"}
    here, _ = run(tiny_folder, settings(actor=actor))
    apart, _ = run(tiny_folder, settings(actor=actor, rollout={"agent": {"num_workers": 1}}))
    for ours, theirs in zip(here, apart, strict=True):
        kept = [key for key in ours if not key.startswith(GAP_PREFIXES)]
        assert [ours[key] for key in kept] == [theirs[key] for key in kept]


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {
                "trainer": {"mode": "async"},
                "actor": {"parallel": {"tp": 2}},
            },
            "actor.parallel.tp=2 with trainer.mode=async",
        ),
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
        (
            {
                "rollout": {
                    "engine": "server",
                    "server": {
                        "url": "http://127.0.0.1:1",
                        "api": "tgi",
                        "weights": "none",
                        "allow_fixed_policy": True,
                    },
                }
            },
            "rollout.server.api=tgi",
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
