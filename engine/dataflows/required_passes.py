"""Which forward passes over a batch a configuration asks for, known before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.algorithms import advantages
from engine.config import RLConfig
from engine.dataflows.registry import Dataflow


@dataclass(frozen=True, slots=True)
class RequiredPasses:
    """What a step computes beyond rollout, reward and update."""

    reference: bool
    """Some role compares with the frozen reference."""
    ref_log_probs: bool
    """The reference's log-probs of the sampled tokens are read."""
    ref_kl: bool
    """The exact KL from the reference is part of the reward."""
    old_log_probs: bool
    """The trainer's own log-probs from before the update are read, not those of sampling."""
    sum_pi_squared: bool
    """The sums of squared probabilities are read with `old_log_probs`."""

    def roles(self, dataflow: Dataflow) -> frozenset[str]:
        """The roles to start."""
        return dataflow.roles | (dataflow.optional if self.reference else frozenset())

    @staticmethod
    def of(config: RLConfig, dataflow: Dataflow) -> RequiredPasses:
        """The passes that the settings require.

        Truncated sampling (top-k, top-p) renormalises, so its log-probs are not the policy's;
        rollout correction compares both; R2 replays what routers chose in the trainer's pass.
        """
        algorithm, actor = config.algorithm, config.actor
        if dataflow.uses_reference is not None:
            compares = dataflow.uses_reference(config)
            return RequiredPasses(compares, compares, False, False, False)
        estimates = dataflow.uses_advantages
        in_reward = estimates and algorithm.use_kl_in_reward
        in_loss = estimates and actor.use_kl_loss
        squares = estimates and "sum_pi_squared" in advantages.requires(algorithm.adv_estimator)
        truncated = config.rollout.top_k > 0 or config.rollout.top_p < 1.0
        return RequiredPasses(
            reference=in_reward or in_loss,
            ref_log_probs=(in_reward and algorithm.kl_penalty != "full")
            or (in_loss and actor.kl_loss_type != "full"),
            ref_kl=in_reward and algorithm.kl_penalty == "full",
            old_log_probs=actor.old_log_probs == "trainer"
            or (actor.old_log_probs == "auto" and truncated)
            or algorithm.rollout_correction.enabled
            or actor.router_replay.mode == "R2"
            or squares,
            sum_pi_squared=squares,
        )
