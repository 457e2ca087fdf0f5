"""RL with `rollout.engine=server`: steps sample from a real vLLM server that has their weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from rollout_models import VOCABULARY, build
from server_process import vllm_url
from tiny_engine import arithmetic_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def trainer(folder: Path, mode: str, **rollout: Any) -> RLTrainer:
    settings = RLConfig.model_validate(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
            "actor": {"optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
            "rollout": {"n": 4} | rollout,
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
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
        folder, settings, loader, max_response_length=6, max_model_len=64, dtype="float32"
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
