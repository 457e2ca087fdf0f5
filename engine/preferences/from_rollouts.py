"""Pairs, or labels for KTO, from rollouts of a policy: sampled, scored by a reward, ranked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.config import EvaluateConfig, PairsConfig
from engine.data.preference_rows import Kind
from engine.data.rows import has_words, is_utf8
from engine.data.scored_groups import (
    ScoredCompletion,
    ScoredGroup,
    labels_from_groups,
    pairs_from_groups,
)
from engine.data.templates import decode_response, encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.evaluation.decode import decode_passes
from engine.evaluation.evaluate import repeated, scorer_inputs
from engine.evaluation.judging import judge
from engine.evaluation.rows import Judged
from engine.plugins import import_plugins
from engine.rewards import Scorer
from engine.rollout.protocol import SamplingParams

COLUMNS: dict[Kind, list[str]] = {
    "pairs": ["prompt", "chosen", "rejected", "margin", "extra_info"],
    "labels": ["prompt", "completion", "label", "extra_info"],
}


@dataclass(frozen=True, slots=True)
class RankedRollouts:
    """Preferences, and the rollouts that they were made of."""

    rows: pd.DataFrame  # of `COLUMNS`
    prompts: int
    without_pair: int  # prompts that gave no row, e.g. as their completions are worth the same
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


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """Completions of prompts and what the reward says of them, to be ranked as pairs or labels."""

    prompts: list[list[dict[str, str]]]  # P chat prompts
    judged: list[Judged]  # `config.n` of each prompt, P · n in all
    config: PairsConfig

    def ranked(self, kind: Kind) -> RankedRollouts:
        """Pairs, or labels. A pair's `margin`, which a reward model's loss would ask for, is 0."""
        n, most = self.config.n, self.config.pairs_a_prompt
        scored = [
            ScoredCompletion(
                one.text,
                None if one.failed or not _is_whole(one.text) else _score(one, kind),
                one.truncated,
            )
            for one in self.judged
        ]
        groups = [
            ScoredGroup(prompt, scored[i * n : (i + 1) * n], {"row": i})
            for i, prompt in enumerate(self.prompts)
        ]
        found = (
            labels_from_groups(groups, per_group=most)
            if kind == "labels"
            else pairs_from_groups(groups, pairs_per_group=most, min_gap=self.config.margin)
        )
        return RankedRollouts(
            pd.DataFrame(found, columns=COLUMNS[kind]),
            len(groups),
            len(groups) - len({row["extra_info"]["row"] for row in found}),
            len(scored) - sum(len(group.usable) for group in groups),
            float(np.mean([one.score for one in self.judged])),
            float(np.mean([one.correct for one in self.judged])),
        )


def rank_rollouts(
    folder: str | Path,
    rows: pd.DataFrame,
    config: PairsConfig,
    kind: Kind = "pairs",
    *,
    max_response_length: int,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> RankedRollouts:
    """Sample `config.n` completions of each prompt of RL rows, and rank them.

    A pair is the best and the worst of them, with both rewards in `extra_info`. Of labels, right
    ones are good. Raises as `score_rollouts`, whose arguments the others are.
    """
    return score_rollouts(
        folder,
        rows,
        config,
        max_response_length=max_response_length,
        seed=seed,
        on_progress=on_progress,
    ).ranked(kind)


def score_rollouts(
    folder: str | Path,
    rows: pd.DataFrame,
    config: PairsConfig,
    *,
    max_response_length: int,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> ScoredRollouts:
    """Sample `config.n` completions of each prompt of RL rows, and score them.

    Several GPUs of this machine, or `config.parallel`, share the prompts. `on_progress(n)` is
    called with the number of finished completions. Raises what `decode_passes` and the scorer
    raise.
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
    return ScoredRollouts(list(rows["prompt"]), judged, config)


def _score(one: Judged, kind: Kind) -> float:
    """What pairs are ranked by; of labels whether it is right."""
    return float(one.correct) if kind == "labels" else one.score


def _is_whole(text: str) -> bool:
    """Whether a file of rows can hold it: it has words, and no NUL or half of a character."""
    return has_words(text) and is_utf8(text) and "\0" not in text
