"""Environments written with the package `verifiers`, played unchanged."""

from __future__ import annotations

import asyncio
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import TINY_MODEL, write_tiny_folder

from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.agents.environment_protocol import Action, Observation
from engine.agents.environments import VerifiersEnvironment, verifiers_rows
from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, EpisodeError
from engine.trainers.rl import RLTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        find_spec("verifiers") is None,
        reason="no verifiers: `pip install --no-deps -r images/requirements-verifiers.txt`",
    ),
]
ID = "verifiers-words"


def row(index: int = 0) -> dict[str, Any]:
    return {"extra_info": {"index": index}}


def played(environment: VerifiersEnvironment, index: int, turns: list[Action]) -> list[Observation]:
    async def play() -> list[Observation]:
        try:
            seen = [await environment.reset(row(index))]
            return seen + [await environment.step(turn) for turn in turns]
        finally:
            await environment.close()

    return asyncio.run(play())


def said(observation: Observation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in observation.messages]


def test_a_conversation_of_several_turns_ends_with_the_rubrics_reward() -> None:
    environment = VerifiersEnvironment(id=ID)
    first, second, third, last = played(
        environment, 1, [Action("12"), Action("no"), Action("2 it is 2")]
    )
    assert said(first) == [("system", "Say numbers."), ("user", "1+1=")]
    assert said(second) == [("user", "2 characters")]
    assert (said(third), third.done) == ([("user", "2 characters")], False)
    assert last.done
    assert last.reward == 4 + 0.5
    assert last.info["digits"] == 4
    assert last.info["num_turns"] == 3
    assert last.info["stop_condition"] == "max_turns_reached"
    again = played(environment, 0, [Action("stop 1")])
    assert (again[1].done, again[1].reward) == (True, 1.0), "the answer isn't in what it said last"


def test_tools_are_shown_called_and_answered() -> None:
    environment = VerifiersEnvironment(id=ID, arguments={"kind": "tools"})
    [schema] = environment.tools()
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    text = 'so: <tool_call>{"name": "add", "arguments": {"a": 2, "b": 1}}</tool_call>'
    call = parsed_action(resolve_call_parser("hermes"), text)
    first, second, last = played(environment, 2, [call, Action("it is 3")])
    assert said(first) == [("user", "2+1=")]
    [answer] = second.messages
    assert (answer["role"], answer["content"]) == ("tool", "3")
    assert answer["tool_call_id"] == "call_0"
    assert (last.done, last.reward) == (True, 1.0)


def test_episodes_share_an_environment_and_not_their_turns() -> None:
    async def play() -> list[float]:
        players = [VerifiersEnvironment(id=ID) for _ in range(20)]
        await asyncio.gather(*(one.reset(row(i % 2)) for i, one in enumerate(players)))
        for _ in range(2):
            await asyncio.gather(*(one.step(Action("7" * i)) for i, one in enumerate(players)))
        ends = await asyncio.gather(*(one.step(Action("x")) for one in players))
        return [end.reward for end in ends]

    assert asyncio.run(play()) == [2.0 * i for i in range(20)]


def test_what_goes_wrong_in_it_is_the_episodes_failure() -> None:
    environment = VerifiersEnvironment(id=ID)
    with pytest.raises(EpisodeError, match="echo is broken"):
        played(environment, 2, [Action("1")])
    rewriting = VerifiersEnvironment(id=ID, arguments={"kind": "rewriting"})
    with pytest.raises(EpisodeError, match="go on from its last turn"):
        played(rewriting, 0, [Action("1")])
    assert played(environment, 0, [Action("stop")])[1].done, "another episode can be played"


def test_what_can_t_be_played_is_refused_by_name() -> None:
    for options, said in (
        ({}, "options.id"),
        ({"id": "no-such-environment"}, "no-such-environment"),
        ({"id": ID, "arguments": {"kind": "group"}}, "group"),
        ({"id": ID, "arguments": {"sort": 1}}, "sort"),
    ):
        with pytest.raises(ConfigError, match=said):
            VerifiersEnvironment(**options)
    with pytest.raises(ConfigError, match=r"extra_info\.index"):
        asyncio.run(VerifiersEnvironment(id=ID).reset({}))


def test_loading_leaves_the_runs_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    VerifiersEnvironment(id=ID, arguments={"questions": 2})
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_learns_from_the_ids_that_were_sampled(tmp_path: Path) -> None:
    rows = verifiers_rows(ID, count=2)
    assert [one["reward_model"]["ground_truth"] for one in rows] == ["1", "2"]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 256})
    model = write_tiny_folder(tmp_path / "model", shape)
    config = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {"ppo_mini_batch_size": 2, "old_log_probs": "trainer"},
            "rollout": {
                "n": 4,
                "multi_turn": {"enable": True, "max_turn_length": 8},
                "agent": {"environment": {"name": "verifiers", "options": {"id": ID}}},
            },
            "reward": {"name": "environment"},
            "trainer": {
                "total_training_steps": 1,
                "train_batch_size": 2,
                "placement": "local",
                "threads": 1,
            },
        }
    )
    batches: list[Batch] = []
    loader = PromptLoader(pd.DataFrame(rows), 2, 0)
    with RLTrainer(model, config, loader, max_response_length=160, max_model_len=250) as trainer:
        trainer.on_rollouts = lambda split, step, batch: batches.append(batch)
        trainer.fit()
    [batch] = batches
    kept = batch["response_mask"].bool()
    torch.testing.assert_close(
        batch["old_log_probs"][kept], batch["rollout_log_probs"][kept], atol=1e-4, rtol=1e-4
    )
    turns = batch.columns["episode_turns"].tolist()
    assert set(turns) <= {1, 2, 3}
    assert batch.columns["episode_end"].tolist() == ["done"] * 8
    assert [info["num_turns"] for info in batch.columns["episode_info"]] == turns
    rewards = batch["token_level_scores"].sum(1).tolist()
    told = [info["digits"] + 0.5 * info["answered"] for info in batch.columns["episode_info"]]
    assert rewards == pytest.approx(told)
