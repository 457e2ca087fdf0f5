"""Pairs from rollouts of a policy: sampled, scored by a reward, ranked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.config import EvaluateConfig, PairsConfig
from engine.data.rows import has_words, is_utf8
from engine.data.templates import decode_response, encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.evaluation.decode import decode_passes
from engine.evaluation.evaluate import repeated, scorer_inputs
from engine.evaluation.judging import judge
from engine.plugins import import_plugins
from engine.preferences.ranking import ScoredText, ranked_pairs
from engine.rewards import Scorer
from engine.rollout.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class RankedRollouts:
    """Pairs, and the rollouts that they were made of."""

    pairs: pd.DataFrame  # prompt, chosen, rejected, margin, extra_info
    prompts: int
    without_pair: int  # prompts whose completions are all worth the same, or nearly
    unusable: int  # completions that were cut off, are empty, or could not be scored
    mean_score: float
    correct: float  # share of right completions, 0 to 1

    def metrics(self) -> dict[str, float]:
        """As a stage records them."""
        return {
            "prompts": float(self.prompts),
            "prompts_without_pair": float(self.without_pair),
            "completions_unusable": float(self.unusable),
            "score_mean": self.mean_score,
            "correct": self.correct,
        }


def layout_of(config: PairsConfig) -> EvaluateConfig:
    """How the policy is sampled from, in the terms of an evaluation."""
    return EvaluateConfig(engine=config.engine, parallel=config.parallel)


def pairs_of_rollouts(
    folder: str | Path,
    rows: pd.DataFrame,
    config: PairsConfig,
    *,
    max_response_length: int,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> RankedRollouts:
    """Sample `config.n` completions of each prompt of RL rows, and rank them.

    A pair's margin is the difference of its rewards, which `extra_info` has. Several GPUs of this
    machine, or `config.parallel`, share the prompts. `on_progress(n)` is called with the number of
    finished completions. Raises what `decode_passes` and the scorer raise.
    """
    import_plugins(config.plugins)
    tokenizer = load_tokenizer(folder)
    prompts = encode_prompts(tokenizer, rows["prompt"], "train")
    params = SamplingParams(
        n=config.n,
        max_new_tokens=max_response_length,
        temperature=config.temperature,
        seed=seed,
    )
    asked, columns = scorer_inputs(rows, prompts)
    with closing(Scorer(config.scorer, config.plugins)) as scorer:
        (answers,) = decode_passes(
            folder, prompts, (params,), layout_of(config), on_progress=on_progress
        )
        judged = judge(
            scorer,
            [decode_response(tokenizer, one.token_ids) for one in answers],
            [len(one.token_ids) for one in answers],
            [one.truncated for one in answers],
            repeated(asked, config.n),
            {name: repeated(values, config.n) for name, values in columns.items()},
        )
    scored = [
        ScoredText(one.text, one.score, _is_whole(one.text) and not (one.truncated or one.failed))
        for one in judged
    ]
    return _ranked(rows, scored, config, float(np.mean([one.correct for one in judged])))


def _is_whole(text: str) -> bool:
    """Whether a file of rows can hold it: it has words, and no NUL or half of a character."""
    return has_words(text) and is_utf8(text) and "\0" not in text


def _ranked(
    rows: pd.DataFrame, scored: list[ScoredText], config: PairsConfig, correct: float
) -> RankedRollouts:
    found: list[dict[str, object]] = []
    without = 0
    for number, prompt in enumerate(rows["prompt"]):
        group = scored[number * config.n : (number + 1) * config.n]
        pairs = ranked_pairs(group, config.margin, config.pairs_a_prompt)
        without += not pairs
        for good, bad in pairs:
            scores = {"row": number, "chosen_score": good.score, "rejected_score": bad.score}
            found.append(
                {
                    "prompt": prompt,
                    "chosen": good.text,
                    "rejected": bad.text,
                    "margin": good.score - bad.score,
                    "extra_info": scores,
                }
            )
    columns = ["prompt", "chosen", "rejected", "margin", "extra_info"]
    return RankedRollouts(
        pd.DataFrame(found, columns=columns),
        len(rows),
        without,
        sum(not one.usable for one in scored),
        float(np.mean([one.score for one in scored])),
        correct,
    )
