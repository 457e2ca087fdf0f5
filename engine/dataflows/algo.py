"""The arithmetic between the roles' calls: rewards less KL, then advantages. No waiting, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.algorithms import advantages
from engine.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from engine.algorithms.masked import masked_mean
from engine.algorithms.shaping import kl_in_reward
from engine.batch import Batch
from engine.config import AlgorithmConfig
from engine.controller.futures import Future, LazyBatch
from engine.workers.options import advantage_options


@dataclass
class StepResult:
    """What one step of a dataflow leaves: the batch it learned from and metrics under way."""

    batch: LazyBatch
    updates: list[Future] = field(default_factory=list)


class Algo:
    """Advantages by configuration; keeps the state of an adaptive KL coefficient."""

    def __init__(self, config: AlgorithmConfig, *, recompute_old_log_probs: bool = False) -> None:
        self.config = config
        self.recompute_old_log_probs = recompute_old_log_probs
        self.estimator = advantages.get_advantage(config.adv_estimator)
        self.options = advantage_options(config)
        control = config.kl_ctrl
        self.kl_control: FixedKL | AdaptiveKL = (
            FixedKL(control.kl_coef)
            if control.type == "fixed"
            else AdaptiveKL(control.kl_coef, control.target_kl, control.horizon)
        )

    def advantages(self, lazy: LazyBatch) -> Batch:
        """`token_level_rewards`, `advantages`, `returns`, all `[B, R]`; waits for what it reads."""
        batch = lazy.resolve()
        rewards, mask = batch["token_level_scores"], batch["response_mask"]
        if self.config.use_kl_in_reward:
            old = batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]
            kl = kl_estimate(old, batch["ref_log_probs"], self.config.kl_penalty, mask=mask)
            rewards = kl_in_reward(rewards, kl, mask, self.kl_control.value)
            self.kl_control.update(float(masked_mean(kl, mask)), len(batch))
        optional = {name: batch[name] for name in ("values", "old_log_probs") if name in batch}
        out = self.estimator(
            advantages.AdvantageInputs(rewards, mask, batch["group_ids"], **optional),
            **self.options,
        )
        return Batch(
            {
                "token_level_rewards": rewards,
                "advantages": out.advantages.float(),
                "returns": out.returns.float(),
            }
        )
