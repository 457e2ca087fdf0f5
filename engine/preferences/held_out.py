"""Which held-out pairs a reward model ranks right, scored as RL's reward would score them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from engine.preferences.learned_reward import reward_of
from engine.rewards import resolve_reward


def ranked_right(folder: str | Path, pairs: pd.DataFrame) -> np.ndarray:
    """Whether each of N pairs' chosen response has the higher score, `[N]` bool.

    pairs: rows with `prompt` (messages), `chosen` and `rejected`. Equal scores are no right
    ranking. Raises RewardError for a folder that is no reward model.
    """
    reward: Callable[..., object] = resolve_reward(reward_of(str(folder)), {"model": str(folder)})
    messages = [[dict(one) for one in prompt] for prompt in pairs["prompt"]]
    prompts = [prompt[-1]["content"] for prompt in messages]
    chosen, rejected = (
        np.asarray(reward(prompts, list(pairs[side]), messages=messages))
        for side in ("chosen", "rejected")
    )
    right: np.ndarray = chosen > rejected
    return right
