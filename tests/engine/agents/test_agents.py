"""Agents of users, who ask the policy through OpenAI's API: what is recorded, faults, learning."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from server_process import vllm_url
from test_agent_rl import (
    FLOAT,
    VLLM,
    ahead,
    check_versions,
    needs_vllm,
    run,
    settings,
    trainer,
    wide_folder,
)
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder
from transformers import AutoModelForCausalLM

from engine.agents.agent_runner import agent_files, check_agent, is_function
from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, EpisodeError
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config
from examples.guessing import guessing_row

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["wide_folder"]  # a fixture
HERE = Path(__file__).parent
FILE = str(HERE / "agents_of_users.py")


def agent(name: str, workers: int = 0, **changes: Any) -> dict[str, Any]:
    options = changes.pop("options", {})
    play = {"name": name, "options": options}
    return {"environment": "", "play": play, "num_workers": workers} | changes


def config(name: str, workers: int = 0, n: int = 4, **changes: Any) -> RLConfig:
    turns = {"multi_turn": {"enable": True} | changes.pop("multi_turn", {})}
    steps = {"total_training_steps": changes.pop("steps", 1)}
    rollout = {"agent": agent(name, workers, **changes), "n": n, **turns}
    return settings(rollout=rollout, actor={"old_log_probs": "trainer"}, trainer=steps)


def check_log_probs(batch: Batch) -> None:
    """The trainer gives each token the log-prob that it was recorded with."""
    kept = batch["response_mask"].bool()
    assert bool(kept.any())
    torch.testing.assert_close(
        batch["old_log_probs"][kept], batch["rollout_log_probs"][kept], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_function_plays_and_each_token_has_the_log_prob_it_was_drawn_with(
    tiny_folder: Path, workers: int
) -> None:
    history, batches = run(tiny_folder, config(f"{FILE}:play", workers))
    for batch in batches[:1]:
        check_log_probs(batch)
        assert len(batch) == 16
        assert set(batch.columns["episode_turns"]) == {2}
        assert set(batch.columns["episode_end"]) == {"done"}
        rewards = batch["token_level_scores"].sum(1).tolist()
        assert rewards == pytest.approx(batch.columns["episode_reward"].tolist())
        assert 0 < sum(rewards) < 16
    assert history[0]["episode/answers"] == 2
    assert history[0]["episode/branches"] == 1
    assert history[0]["episode/refused_calls"] == 0
    assert history[-1]["validation/episode/turns_mean"] == 2
    assert 0 <= history[0]["episode/solved"] <= 1


def wide_model() -> Any:
    """The tiny model with heads of 32: vLLM's attention on CPUs has no smaller ones."""
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY_MODEL.model_copy(update={"hidden_size": 128})
        return AutoModelForCausalLM.from_pretrained(write_tiny_folder(Path(folder), shape))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["colocated", "own process", "server"])
def test_an_agent_that_vllm_answers_is_learned_from(
    wide_folder: Path, request: pytest.FixtureRequest, place: str, mode: str
) -> None:
    """Tokens of the present weights have the log-probs of the trainer's own forward pass."""
    engine: dict[str, Any] = dict(VLLM)
    if place == "own process":
        engine["vllm.in_process"] = False
    if place == "server":
        engine = {"engine": "server", "server.url": vllm_url(wide_model)}
    changes = {"trainer.mode": mode} | {f"rollout.{name}": v for name, v in engine.items()}
    if mode == "async":
        request.getfixturevalue("ray_cluster")
        changes["trainer.placement"] = "ray"
    how = config(f"{FILE}:play", n=4, steps=3).replaced(changes)
    history, batches = run(wide_folder, how, dtype=FLOAT)
    for step, batch in enumerate(batches[:3]):
        assert batch.columns["episode_error"].tolist() == [""] * 16
        assert set(batch.columns["episode_turns"]) == {2}
        present = batch["response_mask"].bool() & (batch["token_versions"] == step)
        assert bool(present.any()) or mode == "async"
        torch.testing.assert_close(
            batch["old_log_probs"][present], batch["rollout_log_probs"][present],
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
        assert history[step]["actor/grad_norm"] > 0
    assert int(batches[2]["token_versions"].max()) > 0


@needs_vllm
@pytest.mark.slow
def test_vllm_answers_all_that_openai_s_client_asks_for(wide_folder: Path) -> None:
    how = config(f"{FILE}:everything", n=2)
    how = how.replaced({f"rollout.{name}": value for name, value in VLLM.items()})
    _, [batch, *_] = run(wide_folder, how, dtype=FLOAT)
    assert batch.columns["episode_error"].tolist() == [""] * len(batch)
    check_log_probs(batch)


def test_branches_are_rows_that_are_learned_from_once(tiny_folder: Path) -> None:
    history, [batch, *_] = run(tiny_folder, config("agents_of_users:branching", n=2))
    check_log_probs(batch)
    assert history[0]["episode/branches"] == 4
    assert history[0]["episode/answers"] == 5
    assert len(batch) == 4 * 2 * 4
    assert batch["continues"].tolist() == [True, True, True, False] * 8
    assert batch["token_level_scores"].sum(1).tolist() == [0.0, 0.0, 0.0, 1.0] * 8
    assert history[0]["actor/grad_norm"] >= 0


def test_the_api_has_what_openai_s_client_asks_for(tiny_folder: Path) -> None:
    history, [batch, *_] = run(tiny_folder, config(f"{FILE}:everything", n=2))
    assert batch.columns["episode_error"].tolist() == [""] * len(batch)
    assert set(batch.columns["episode_end"]) == {"done"}
    check_log_probs(batch)
    assert history[0]["episode/refused_calls"] >= 9


def test_tools_are_called_and_answered(tmp_path: Path) -> None:
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 256})
    folder = write_tiny_folder(tmp_path / "model", shape)
    how = config("agents_of_users:with_tools", multi_turn={"format": "agents_of_users:digit_adds"})
    batches: list[Batch] = []
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    with RLTrainer(folder, how, loader, max_response_length=120, max_model_len=250) as subject:
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
    check_log_probs(batches[0])
    called = sum(info["called"] for info in batches[0].columns["episode_info"])
    spans = batches[0].columns["episode_turn_spans"]
    assert called == sum(len(turn["calls"]) for turns in spans for turn in turns) > 0
    assert set(batches[0].columns["episode_end"]) == {"done"}


WAYS = ("well", "raises", "hangs", "no number", "too much", "hangs up", "later")
ENDS = {"raises": "failed", "hangs": "seconds", "no number": "failed", "too much": "tokens"}


def faulty_rows(ways: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = arithmetic_rows(len(ways))
    return [row | {"extra_info": {"way": way}} for row, way in zip(rows, ways, strict=True)]


@pytest.mark.parametrize(
    ("ways", "workers"),
    [(WAYS, 0), pytest.param((*WAYS, "dies", "blocks"), 2, marks=pytest.mark.slow)],
)
def test_a_client_at_fault_costs_its_own_episode(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ways: tuple[str, ...],
    workers: int,
) -> None:
    monkeypatch.setenv("NOTED_GAMES", str(tmp_path / "log"))
    limit = 40.0 if workers else 5.0
    how = config(f"{FILE}:by_way", workers, n=2, timeout_s=limit, call_timeout_s=4.0)
    loader = PromptLoader(pd.DataFrame(faulty_rows(ways)), len(ways), 0)
    how = how.replaced({"trainer.train_batch_size": len(ways), "actor.ppo_mini_batch_size": 2})
    batches: list[Batch] = []
    with RLTrainer(tiny_folder, how, loader, max_response_length=36, max_model_len=60) as subject:
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
    if not workers:  # else what calls late may be in the process that another ends
        assert "late: 410" in (tmp_path / "log").read_text()
    columns = batches[0].columns
    ends = ENDS | {"dies": "failed", "blocks": "seconds"}
    for way, end, error, info in zip(
        (about["way"] for about in columns["extra_info"]),
        *(columns[name] for name in ("episode_end", "episode_error", "episode_info")),
        strict=True,
    ):
        assert end == ends.get(way, "done"), (way, error)
        if way == "raises":
            assert "ValueError: the agent is broken" in error
        if way == "no number":
            assert "return a finite number" in error
        if way == "hangs up":
            assert info["abandoned_calls"] == 1
        if way == "too much":
            assert info["refused_calls"] == 1
    assert bool(batches[0]["truncated"].any())


def test_the_example_plays_its_game(tmp_path: Path) -> None:
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 512})
    folder = write_tiny_folder(tmp_path / "model", shape)
    rows = [guessing_row("Ada", 2, 8, 2 + i, "train", i) for i in range(4)]
    how = config("examples.guessing_agent:play", n=2, options={"max_turns": 2})
    batches: list[Batch] = []
    loader = PromptLoader(pd.DataFrame(rows), 4, 0)
    with RLTrainer(folder, how, loader, max_response_length=100, max_model_len=400) as subject:
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
    columns = batches[0].columns
    assert columns["episode_error"].tolist() == [""] * 8
    for info, turns, reward in zip(
        columns["episode_info"], columns["episode_turns"], columns["episode_reward"], strict=True
    ):
        assert (info["turns"], info["success"]) == (turns, reward == 1.0)
    check_log_probs(batches[0])


@pytest.mark.parametrize("how", ["leave", "silent", "fail"])
def test_a_program_plays_by_two_variables_and_leaves_its_reward(
    tiny_folder: Path, how: str
) -> None:
    command = f"{sys.executable} -S {HERE / 'agent_program.py'} {how}"
    if how != "leave":
        said = "left no reward in the file" if how == "silent" else "exit status 1: no luck today"
        with pytest.raises(EpisodeError, match=said):
            run(tiny_folder, config(command, n=2))
        return
    history, [batch, *_] = run(tiny_folder, config(command, n=2))
    check_log_probs(batch)
    assert batch.columns["episode_reward"].tolist() == [0.5] * len(batch)
    assert history[0]["episode/length"] >= 0


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_agents_play_ahead_of_the_trainer(tiny_folder: Path, mode: str) -> None:
    made = ahead(mode, "local", agent=agent(f"{FILE}:play", options={"turns": 3}))
    history, batches = run(tiny_folder, made)
    check_versions(history[:-1], batches[:4])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no/such/file.py:play", {}, "does not exist here"),
        (f"{FILE}:nothing", {}, "has no function 'nothing'"),
        (f"{FILE}:digits", {}, "no coroutine function"),
        (f"{FILE}:without_client", {}, "can't be called as"),
        (f"{FILE}:play", {"turn": 1}, "did you mean 'turns'"),
        (f"{FILE}:play", {"turns": "many"}, "options.turns='many'"),
        ("no_such_module:play", {}, "can't be imported"),
        ("no-such-program --fast", {}, "there is no program 'no-such-program'"),
        ("'", {}, "is no command"),
        ("python x.py", {"turns": 1}, "options are a function's"),
    ],
)
def test_an_agent_that_can_t_play_is_refused_before_the_run(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_agent(name, options)


def test_settings_of_agents_are_checked_together() -> None:
    with pytest.raises(ValueError, match="set one of the two"):
        settings(rollout={"agent": {"play": "x:y"}})
    with pytest.raises(ConfigError, match="may have branches"):
        check_config(
            settings(
                rollout={"agent": agent(f"{FILE}:play")},
                algorithm={"adv_estimator": "reinforce_plus_plus"},
            )
        )
    assert is_function("a.b:play")
    assert not is_function("python a.py:play")
    assert agent_files("python a.py --x b/c") == ["a.py", "b/c"]
    assert agent_files("a/b.py:play") == ["a/b.py"]


@pytest.mark.slow
def test_an_agent_s_reward_rises(tiny_folder: Path) -> None:
    """It is the share of digits in the policy's last turn."""
    how = config(f"{FILE}:play", n=8, steps=30)
    rewards: list[float] = []
    with trainer(tiny_folder, how) as subject:
        subject.on_step = lambda step, total, metrics: rewards.append(metrics["reward/mean"])
        subject.fit()
    before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"reward {before:.3f} → {after:.3f}")
    assert all(map(math.isfinite, rewards))
    assert after > before + 0.3
