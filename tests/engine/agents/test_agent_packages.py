"""Agents and environments of other packages, unchanged, through their own rollout code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from agents_of_users import digits
from test_agents import check_log_probs, config
from test_environments import openenv_python, started
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.data.templates import decode_response
from engine.data.tokenizer import load_tokenizer
from engine.trainers.rl import RLTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"


def played(folder: Path, how: RLConfig, rows: list[dict[str, Any]]) -> Batch:
    """The batch of one step, whose tokens have the log-probs that they were drawn with."""
    shape = TINY_MODEL.model_copy(update={"max_position_embeddings": 1024})
    model = write_tiny_folder(folder / "model", shape)
    batches: list[Batch] = []
    loader = PromptLoader(pd.DataFrame(rows), 4, 0)
    with RLTrainer(model, how, loader, max_response_length=400, max_model_len=1000) as subject:
        subject.on_rollouts = lambda split, step, batch: batches.append(batch)
        subject.fit()
    [batch] = batches
    assert batch.columns["episode_error"].tolist() == [""] * len(batch)
    assert set(batch.columns["episode_end"]) == {"done"}
    check_log_probs(batch)
    return batch


@pytest.mark.skipif(find_spec("agents") is None, reason="no openai-agents; run make env")
def test_the_agents_sdk_works_unchanged(tmp_path: Path) -> None:
    turns = {"format": "agents_of_users:digit_adds"}
    batch = played(tmp_path, config("sdk_agent:play", n=4, multi_turn=turns), arithmetic_rows(4))
    infos = batch.columns["episode_info"].tolist()
    assert max(info["added"] for info in infos) > 0
    assert all(turns > 1 or info["answered"] for turns, info in zip(
        batch.columns["episode_turns"], infos, strict=True))  # fmt: skip
    assert batch.columns["episode_turns"].max() > 1
    assert len(batch) == 16, "no history was rewritten"


def test_verifiers_plays_by_its_own_rollout_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = os.environ.get("VERIFIERS_PYTHON", "")
    if not python:
        pytest.skip("VERIFIERS_PYTHON names no Python with images/requirements-verifiers.txt")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")  # for uv
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    named = json.dumps({"taskset": {"id": "words-taskset"}, "agent": seat})
    program = [python, str(EXAMPLES / "verifiers_episode.py"), named]
    told = subprocess.run([*program, "--rows", "2"], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == ["0+1=", "1+1="]
    how = config(f"{python} {program[1]} '{named}'", n=2, timeout_s=300.0)
    batch = played(tmp_path, how.replaced({"trainer.train_batch_size": 2}), rows)
    for reward, info in zip(
        batch.columns["episode_reward"], batch.columns["episode_info"], strict=True
    ):
        assert 0 <= reward <= 1
        assert info["length"] >= 0
    assert sys.executable != python


def test_harbor_plays_its_task_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task's own tests give the reward: the share of digits in the file that it asks for."""
    python = os.environ.get("HARBOR_PYTHON", "")
    if not python:
        pytest.skip("HARBOR_PYTHON names no Python with images/requirements-harbor.txt")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    program = [python, str(EXAMPLES / "harbor_episode.py"), str(HERE / "harbor_tasks")]
    told = subprocess.run([*program, "--rows"], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    assert [row["extra_info"]["task"] for row in rows] == ["write-digits", "write-more"]
    seat = "--environment process --agent harbor_agent:WritingAgent"
    how = config(f"{' '.join(program)} {seat}", n=2, timeout_s=300.0)
    batch = played(tmp_path, how.replaced({"trainer.train_batch_size": 2}), rows)
    assert set(batch.columns["episode_turns"]) == {2}
    tokenizer = load_tokenizer(tmp_path / "model")
    for ids, spans, reward in zip(
        batch["responses"].tolist(),
        batch.columns["episode_turn_spans"],
        batch.columns["episode_reward"],
        strict=True,
    ):
        last = decode_response(tokenizer, ids[spans[-1]["start"] : spans[-1]["stop"]])
        assert reward == pytest.approx(digits(last.replace("\0", "").rstrip("\n")))
    assert {info["agent_failed"] for info in batch.columns["episode_info"]} == {False}


def test_an_environment_of_openenv_is_played_with_its_own_client(tmp_path: Path) -> None:
    python = openenv_python()
    if not python:
        pytest.skip("OPENENV_PYTHON names no Python with openenv")
    server = started([python, str(HERE / "openenv_countdown.py")])
    how = config(f"{python} {HERE / 'openenv_agent.py'} {next(server)}", n=2, timeout_s=120.0)
    batch = played(tmp_path, how, arithmetic_rows(4))
    server.close()
    for reward, info in zip(
        batch.columns["episode_reward"], batch.columns["episode_info"], strict=True
    ):
        assert reward == 6 - info["left"]
