"""What measurements of learning share: the task's solutions, RL, greedy pass@1, gains, seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from engine.config import EvaluateConfig, PipelineConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.sources import Splits
from engine.data.templates import decode_response, encode_prompts, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.evaluation.decode import decode_passes
from engine.evaluation.metrics import mean_interval, paired_interval
from engine.models import saved_dtype
from engine.rewards.answers import answer_match
from engine.rollout.protocol import SamplingParams
from engine.runtime.policy_runtime import StartModel
from engine.trainers.offline import SFTExample
from engine.trainers.rl import OnStep, RLTrainer

DEFAULTS = PipelineConfig()
LONGEST = DEFAULTS.data.max_response_length


@dataclass(frozen=True, slots=True)
class Clock:
    """When something began."""

    wall: float
    cpu: float

    @classmethod
    def start(cls) -> Clock:
        """Now."""
        return cls(time.perf_counter(), time.process_time())

    def __str__(self) -> str:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return f"{wall:.0f} s, {cpu:.0f} of the CPU"


def solutions(tokenizer: PreTrainedTokenizerBase, splits: Splits) -> list[SFTExample]:
    """The default task's examples of a warm start."""
    train = splits.sft_train
    prompts = encode_prompts(tokenizer, train["prompt"], "sft_train")
    return [
        SFTExample(prompt, encode_response(tokenizer, response))
        for prompt, response in zip(prompts, train["response"], strict=True)
    ]


def reinforce(
    start: Path,
    out: Path,
    config: RLConfig,
    splits: Splits,
    seed: int,
    on_step: OnStep = lambda step, total, metrics: None,
    dtype: str = "",
) -> list[dict[str, float]]:
    """RL from `start` to `out` on the training prompts; returns the metrics of each step.

    dtype: of the weights; empty: that of `start`.
    """
    prompts = encode_prompts(load_tokenizer(start), splits.train["prompt"], "train")
    with RLTrainer(
        start,
        config,
        PromptLoader(splits.train, config.trainer.train_batch_size, seed),
        max_response_length=LONGEST,
        max_model_len=max(map(len, prompts)) + LONGEST,
        seed=seed,
        dtype=dtype or saved_dtype(start),
        on_step=on_step,
    ) as trainer:
        trainer.fit()
        trainer.save(out)
        return trainer.history


def rule(texts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """1 for right answers, 0 for others."""
    return answer_match([""] * len(texts), texts, ground_truth=[r["ground_truth"] for r in rows])


def right(folder: Path, tokens: Path, frame: pd.DataFrame) -> np.ndarray:
    """Which greedy answers `[N]` of the model in `folder` are right."""
    tokenizer = load_tokenizer(tokens)
    prompts = encode_prompts(tokenizer, frame["prompt"], "test")
    params = SamplingParams(max_new_tokens=LONGEST, temperature=0.0, seed=0)
    (greedy,) = decode_passes(folder, prompts, (params,), EvaluateConfig(k=1, samples=1))
    texts = [decode_response(tokenizer, one.token_ids) for one in greedy]
    return np.array(rule(texts, list(frame["reward_model"])))


def gain(before: np.ndarray, after: np.ndarray) -> str:
    """E.g. `14.8 points (11.1 to 18.6)`, of the same problems' outcomes."""
    found = paired_interval(before, after, 0.95)
    return f"{100 * found.mean:.1f} points ({100 * found.low:.1f} to {100 * found.high:.1f})"


def rate(outcomes: np.ndarray) -> str:
    """A share of right ones with its 95 % interval."""
    found = mean_interval(outcomes, 0.95)
    return f"{found.mean:.1%} ({found.low:.1%} to {found.high:.1%})"


def load(folder: Path) -> StartModel:
    """A policy, to be loaded."""
    return StartModel(str(folder), saved_dtype(folder))
