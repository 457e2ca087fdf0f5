"""The steps of the RL run that made a model, and the effect of a learned reward over the KL.

A policy that is trained against a reward model at first gets better by the true reward, too, and
then may get worse while the model's score goes on rising (Gao et al., arXiv 2210.10760).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import DataError

FILE, MODEL, SCORE = "metrics.parquet", "model", "validation/reward"


@dataclass(frozen=True, slots=True)
class PolicySteps:
    """An RL run's steps, and which of them the model is of."""

    rows: pd.DataFrame  # a row a step, with the metrics that it logged
    row: int  # position of the model's step

    @property
    def until_model(self) -> pd.DataFrame:
        return self.rows[: self.row + 1]

    def __str__(self) -> str:
        """E.g. `step 40 of 80, validation reward 0.812`."""
        score = float(self.rows[SCORE].iloc[self.row]) if SCORE in self.rows else math.nan
        shown = f", validation reward {score:.3f}" if math.isfinite(score) else ""
        return f"step {self.row + 1} of {len(self.rows)}{shown}"


def read_policy_steps(policy: Path) -> PolicySteps | None:
    """Read the steps of a model's folder; None for a model that no RL run made.

    Without the column `model` the model is the last step's; one that names none is a DataError.
    """
    path = policy / FILE
    rows = pd.read_parquet(path) if path.is_file() else pd.DataFrame()
    if rows.empty:
        return None
    if MODEL not in rows:
        return PolicySteps(rows, len(rows) - 1)
    chosen = np.flatnonzero(rows[MODEL].to_numpy(bool))
    if not len(chosen):
        raise DataError(f"{path}: no step is marked as the model's; run RL again")
    return PolicySteps(rows, int(chosen[-1]))


MODEL_REWARD = "reward_model"  # component of the reward
_COLUMNS = (f"reward/{MODEL_REWARD}", "reward/correct", "actor/kl", "response/length_mean")


@dataclass(frozen=True, slots=True)
class Overoptimisation:
    """The steps of an RL run by a reward model, `[T]` each: rollouts of the policy before it."""

    kl: np.ndarray  # from the start model, nats a completion: KL a token times mean tokens
    model_reward: np.ndarray  # mean score of the reward model
    true_reward: np.ndarray  # share of right completions, by the true reward

    @property
    def peak(self) -> int:
        """The step (from 0) at which the moving mean of the true reward is highest."""
        return int(np.argmax(smoothed(self.true_reward)))

    def metrics(self) -> dict[str, float]:
        """The first, best and last values of the moving means."""
        curves = {"true": self.true_reward, "model": self.model_reward, "kl": self.kl}
        values = {
            f"overoptimisation/{name}_{at}": float(smoothed(curve)[step])
            for name, curve in curves.items()
            for at, step in (("first", 0), ("peak", self.peak), ("last", -1))
        }
        return values | {"overoptimisation/step_peak": float(self.peak + 1)}

    def sentence(self) -> str:
        values = {key.rpartition("/")[2]: value for key, value in self.metrics().items()}
        ends = (
            f"the true reward (share of right completions) goes from {values['true_first']:.3f} to "
            f"{values['true_last']:.3f}, the reward model's from {values['model_first']:.3f} to "
            f"{values['model_last']:.3f}, at a KL of {values['kl_last']:.2f} nats a completion"
        )
        if values["true_last"] >= values["true_peak"]:
            return f"{ends}; it has its peak at the end"
        return (
            f"{ends}; its peak is {values['true_peak']:.3f} at step {self.peak + 1} of "
            f"{len(self.kl)} (KL {values['kl_peak']:.2f}, reward model {values['model_peak']:.3f})"
        )


def read_overoptimisation(policy: Path) -> Overoptimisation | None:
    """Read the steps of a policy's folder; None where no RL by a reward model made it."""
    steps = read_policy_steps(policy)
    if steps is None or not set(_COLUMNS) <= set(steps.rows):
        return None
    model, true, kl, tokens = (steps.rows[name].to_numpy(np.float64) for name in _COLUMNS)
    return Overoptimisation(kl * tokens, model, true)


def smoothed(values: np.ndarray) -> np.ndarray:
    """The centred moving mean over a tenth of the steps, `[T]`; gaps stay gaps."""
    finite = pd.Series(np.where(np.isfinite(values), values, np.nan))
    window = finite.rolling(2 * max(1, values.size // 20) + 1, center=True, min_periods=1)
    return window.mean().where(finite.notna()).to_numpy()
