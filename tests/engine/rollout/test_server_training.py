"""RL with `rollout.engine=server`: steps sample from a real vLLM server that has their weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import torch
from rollout_models import VOCABULARY, build
from server_process import vllm_url
from tiny_engine import arithmetic_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.batch import Batch
from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.data.tokenizer import ASSISTANT, CHAT_TEMPLATE, END, PAD, USER
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.timeout(600)  # the server's start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the session's server, with one token a character."""
    path = tmp_path_factory.mktemp("policy")
    characters = string.printable[: VOCABULARY - 5]
    vocabulary = {word: i for i, word in enumerate([PAD, END, USER, ASSISTANT, "?", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    build("qwen2").save_pretrained(path)  # type: ignore[operator]
    return path


EPISODES = {
    "multi_turn": {"enable": True, "max_turn_length": 6},
    "agent": {"environment": "digit_games:DigitGame", "num_workers": 0},
}


def trainer(folder: Path, mode: str, length: int = 6, **rollout: Any) -> RLTrainer:
    share = {"name": "tiny_engine:digit_share", "isolation": "none"}
    settings = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | rollout,
            "reward": {"name": "environment"} if "multi_turn" in rollout else share,
            "trainer": {
                "total_training_steps": 3,
                "train_batch_size": 4,
                "placement": "local",
                "mode": mode,
                "threads": 1,
            },
        }
    )
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, seed=0)
    return RLTrainer(
        folder, settings, loader, max_response_length=length, max_model_len=64, dtype="float32"
    )


def version_served() -> str:
    """Such as "v3"."""
    said: str = httpx.get(f"{vllm_url()}/weight_info").json()["weight_version"]
    return said.split("-")[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_each_step_samples_from_the_server_with_its_weights(folder: Path, mode: str) -> None:
    rows = arithmetic_rows(6)
    with trainer(folder, "sync") as native:
        expected = native.validate(rows)
    served: list[str] = []
    with trainer(folder, mode, engine="server", server={"url": vllm_url()}) as subject:
        assert subject.validate(rows) == expected, "greedy completions don't depend on the engine"
        subject.on_step = lambda step, total, metrics: served.append(version_served())
        subject.fit()
        history = subject.history
        subject.validate(rows)
    if mode == "sync":
        assert served == ["v0", "v1", "v2"]
        assert version_served() == "v3", "validation is of the last weights"
    else:  # a step's completions are drawn during the one before
        assert served[-1] == "v1"
    for step, row in enumerate(history):
        assert row["staleness/max"] == (0.0 if mode == "sync" or step == 0 else 1.0)
        distance = row["rollout_corr/log_ppl_abs_diff"]  # of the trainer's from the sampler's
        assert (distance < 1e-5) == (row["staleness/max"] == 0.0), distance


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_server_samples_the_turns_of_episodes(folder: Path, mode: str) -> None:
    rows, found, batches = arithmetic_rows(6), list[Batch](), list[Batch]()
    for kind, more in (("sync", {}), (mode, {"engine": "server", "server": {"url": vllm_url()}})):
        with trainer(folder, kind, 48, **EPISODES, **more) as subject:
            subject.on_rollouts = lambda split, step, batch: found.append(batch)
            subject.validate(rows)
            if more:
                subject.on_rollouts = lambda split, step, batch: batches.append(batch)
                subject.fit()
                history = subject.history
    theirs, ours = found
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(ours[name], theirs[name]), name
    assert len(batches) == 3
    for step, batch in enumerate(batches):
        assert history[step]["episode/turns_mean"] == 3
        assert history[step]["episode/end_done"] == 1
        kept = batch["response_mask"].bool()
        fresh = kept & (batch["token_versions"] == step)
        assert bool(fresh.any()) or mode == "async"
        torch.testing.assert_close(
            batch["old_log_probs"][fresh], batch["rollout_log_probs"][fresh], atol=1e-4, rtol=1e-4
        )
        assert 0 <= step - int(batch["token_versions"][kept].min()) <= 1
