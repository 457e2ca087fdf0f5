"""The arithmetic between the roles' calls: rewards, correction, advantages.

It has the global batch: group statistics, whitening, selections by covariance and edited masks are
computed here once, before the batch is split over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from engine.algorithms import losses, shaping
from engine.algorithms.advantages import AdvantageInputs, get_advantage
from engine.algorithms.correction import correct_rollout, gap_metrics
from engine.algorithms.dynamic_sampling import groups_with_signal
from engine.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from engine.algorithms.masked import mask_out, masked_mean
from engine.algorithms.metrics import compute_means
from engine.batch import Batch
from engine.config import RLConfig
from engine.controller.timeline import span
from engine.dataflows.required_passes import RequiredPasses
from engine.dataflows.teacher_weights import teacher_weights
from engine.errors import EpisodeError, RewardError
from engine.futures import Future, LazyBatch
from engine.workers.algorithm_options import advantage_options, policy_loss_options


class AlgoState(TypedDict):
    """What a checkpoint has of `Algo`."""

    kl: dict[str, float]  # of the KL controller
    generator: Tensor  # uint8


@dataclass
class StepResult:
    """The result of one step of a dataflow: its batch, and the metrics of its updates."""

    batch: LazyBatch
    updates: list[Future[dict[str, float]]] = field(default_factory=list)


class Algo:
    """Advantages by configuration. Its state (KL coefficient, generator) is checkpointed."""

    def __init__(
        self,
        config: RLConfig,
        needs: RequiredPasses,
        *,
        max_response_length: int,
        seed: int = 0,
        more_prompts: Callable[[], Batch] | None = None,
    ) -> None:
        self.config, self.max_response_length = config, max_response_length
        self.needs = needs
        self.more_prompts = more_prompts
        self.metrics: dict[str, float] = {}
        self.step = 1  # that is computed, from 1; the trainer's
        self._sampled: list[LazyBatch] = []
        self.generator = torch.Generator().manual_seed(seed)
        self.estimator = get_advantage(config.algorithm.adv_estimator)
        self._options = advantage_options(config.algorithm)
        self._loss_mode = config.actor.policy_loss.loss_mode
        self._loss_options = policy_loss_options(config.actor)
        control = config.algorithm.kl_ctrl
        self.kl_control: FixedKL | AdaptiveKL = (
            FixedKL(control.kl_coef)
            if control.type == "fixed"
            else AdaptiveKL(control.kl_coef, control.target_kl, control.horizon)
        )

    @property
    def policy_learns(self) -> bool:
        """Whether this step updates the policy, and not the critic alone (`critic_warmup`)."""
        return self.step >= self.config.trainer.critic_warmup

    def sampled(self, batch: LazyBatch) -> LazyBatch:
        """Keep a rollout of this step with its scores, for `take_sampled`; return it."""
        self._sampled.append(batch)
        return batch

    def take_sampled(self) -> list[LazyBatch]:
        """All rollouts since the last call, also of groups that no update learns from."""
        sampled, self._sampled = self._sampled, []
        return sampled

    def advantages(self, lazy: LazyBatch) -> Batch:
        """The fields that the updates read, all `[B, R]`; waits for the batch.

        `token_level_rewards`, `advantages`, `returns`, and the `response_mask` to train with:
        rows whose reward failed and what rollout correction rejects are out of it. With
        correction `rollout_is_weights`, and what the policy loss prepares over the global batch.
        """
        batch = lazy.resolve()
        with span("advantages"):
            return self._advantages(batch)

    def _advantages(self, batch: Batch) -> Batch:
        present = _mask_without_failures(batch)
        rewards = self._rewards_with_kl(self.shaped_rewards(batch, present), batch, present)
        fields, mask = self._rollout_correction(batch, present)
        # Estimators see the mask before rejection: a reward on a rejected token still counts.
        out = self.estimator(
            self._estimator_inputs(batch | fields, rewards, present), **self._options
        )
        fields |= {
            "token_level_rewards": rewards,
            "advantages": mask_out(mask, out.advantages.float()),
            "returns": mask_out(mask, out.returns.float()),
            "response_mask": mask,
        }
        fields |= losses.prepare(
            self._loss_mode,
            _old_log_probs(batch),
            fields["advantages"],
            mask,
            generator=self.generator,
            **self._loss_options,
        )
        return Batch(fields)

    def shaped_rewards(self, batch: Batch, mask: Tensor) -> Tensor:
        """Scores, clipped and less the penalty for length, `[B, R]`, before any KL."""
        rewards, penalty = self._shaped_and_penalty(batch, mask)
        if penalty is not None:
            self.metrics["reward/overlong_penalty"] = float(penalty.mean())
        return rewards

    def rows_with_signal(self, batch: Batch) -> Tensor:
        """Rows `[B]` (bool) of groups that differ in `filter_groups.metric`; none whose reward
        failed. Writes no metrics: asynchronous rollout calls it from its own thread."""
        metric = batch["token_level_scores"]
        if self.config.algorithm.filter_groups.metric == "reward":
            metric, _ = self._shaped_and_penalty(batch, batch["response_mask"])
        rows = ~batch["reward_failed"] if "reward_failed" in batch else None
        return groups_with_signal(metric.sum(1), batch["group_ids"], rows)

    def baseline(self, sampled: LazyBatch, greedy: LazyBatch) -> Batch:
        """`baseline_rewards [B]`: for each sampled row the reward of its prompt's greedy one."""
        rows, source = sampled.resolve(), greedy.resolve()
        reward = self.shaped_rewards(source, source["response_mask"]).sum(1)
        where = {group: i for i, group in enumerate(source["group_ids"].tolist())}
        index = [where[group] for group in rows["group_ids"].tolist()]
        return Batch({"baseline_rewards": reward[index]})

    def teacher_weights(self, batch: Batch) -> Batch:
        """`teacher_weights [B, T]`, a row's sum being 1; DataError where a row has no teacher."""
        return Batch({"teacher_weights": teacher_weights(self.config.algorithm, batch)})

    def distillation_advantages(self, lazy: LazyBatch) -> Batch:
        """`advantages [B, R]` = log π_teacher − log π: their policy gradient is the gradient of
        the reverse KL to the teacher, token by token."""
        batch = lazy.resolve()
        mask = batch["response_mask"]
        gap = mask_out(mask, batch["ref_log_probs"] - _old_log_probs(batch))
        self.metrics["distillation/reverse_kl"] = float(masked_mean(-gap, mask))
        prepared = losses.prepare(
            self._loss_mode,
            _old_log_probs(batch),
            gap,
            mask,
            generator=self.generator,
            **self._loss_options,
        )
        return Batch({"advantages": gap} | prepared)

    def state_dict(self) -> AlgoState:
        """The adaptive KL coefficient and the generator."""
        return {"kl": self.kl_control.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: AlgoState) -> None:
        """Restore `state_dict`."""
        self.kl_control.load_state_dict(state["kl"])
        self.generator.set_state(state["generator"].clone())

    def take_metrics(self) -> dict[str, float]:
        """The metrics since the last call."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    def _shaped_and_penalty(self, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """`shaped_rewards`, and the penalty for length `[B]`, if there is one."""
        config, rewards = self.config.reward, batch["token_level_scores"]
        if config.clip is not None:
            total = rewards.sum(1)
            change = shaping.clip_rewards(total, *config.clip) - total
            rewards = rewards + shaping.on_last_token(change, mask)
        if not config.overlong_buffer.enable:
            return rewards, None
        penalty = shaping.overlong_penalty(
            batch["response_mask"].sum(1),
            self.max_response_length,
            config.overlong_buffer.len,
            config.overlong_buffer.penalty_factor,
        )
        return rewards + shaping.on_last_token(penalty, mask), penalty

    def _rewards_with_kl(self, rewards: Tensor, batch: Batch, mask: Tensor) -> Tensor:
        """Rewards less β·KL and whitened, as configured."""
        config = self.config.algorithm
        if config.use_kl_in_reward:
            kl = self._reward_kl(batch, mask)
            rewards = shaping.kl_in_reward(rewards, kl, mask, self.kl_control.value)
            mean = float(masked_mean(kl, mask))
            self.metrics |= {"reward/kl": mean, "reward/kl_coef": self.kl_control.value}
            self.kl_control.update(mean, len(batch))
        if self.config.reward.whiten:
            rewards = shaping.whiten_rewards(rewards, mask)
        return mask_out(mask, rewards)

    def _reward_kl(self, batch: Batch, mask: Tensor) -> Tensor:
        kind = self.config.algorithm.kl_penalty
        if kind == "full":
            return batch["ref_kl"]
        return kl_estimate(_old_log_probs(batch), batch["ref_log_probs"], kind, mask=mask)

    def _rollout_correction(self, batch: Batch, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Importance weights, if configured, and the mask after rejection."""
        settings = self.config.algorithm.rollout_correction
        if "old_log_probs" in batch and "rollout_log_probs" in batch:
            gap = gap_metrics(batch["old_log_probs"], batch["rollout_log_probs"], mask)
            self.metrics |= compute_means(gap)
        if not settings.enabled:
            return {}, mask
        out = correct_rollout(
            batch["old_log_probs"], batch["rollout_log_probs"], mask, **settings.model_dump()
        )
        self.metrics |= {f"rollout_corr/{name}": value for name, value in out.metrics.items()}
        fields = {} if out.weights is None else {"rollout_is_weights": out.weights.float()}
        return fields, out.response_mask

    def _estimator_inputs(self, batch: Batch, rewards: Tensor, mask: Tensor) -> AdvantageInputs:
        optional = {name: batch[name] for name in _OPTIONAL_INPUTS if name in batch}
        if "old_log_probs" in self.estimator.requires:
            optional["old_log_probs"] = _old_log_probs(batch)
        return AdvantageInputs(rewards, mask, batch["group_ids"], **optional)


_OPTIONAL_INPUTS = (
    "values",
    "reward_components",
    "baseline_rewards",
    "sum_pi_squared",
    "rollout_is_weights",
    "episode_ids",
    "first_turn",
)


def _old_log_probs(batch: Batch) -> Tensor:
    return batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]


def _mask_without_failures(batch: Batch) -> Tensor:
    """The mask without rows whose reward failed; raise RewardError where that is every row, and
    EpisodeError where these are episodes that failed."""
    mask = batch["response_mask"]
    if "reward_failed" not in batch:
        return mask
    if bool(batch["reward_failed"].all()):
        if "episode_failed" in batch and bool(batch["episode_failed"].all()):
            raise EpisodeError(_why_none_is_left(batch))
        raise RewardError(
            f"the reward failed for all {len(batch)} completions of a step; its log has the cause"
        )
    return mask_out(~batch["reward_failed"][:, None], mask)


def _why_none_is_left(batch: Batch) -> str:
    """A sentence for a step whose episodes are all left out."""
    errors = [error for error in batch.columns["episode_error"] if error]
    why = "a limit ended them (rollout.agent.on_limit=drop)"
    if errors:
        why = f"{len(errors)} failed, the first with: {errors[0]}"
    return f"none of the {len(batch)} episodes of a step can be learned from: {why}"
