"""Which dataflow and passes a configuration runs, and the arithmetic between the roles' calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.algorithms import advantages, policy_losses, shaping
from engine.algorithms.advantages import AdvantageInputs, get_advantage
from engine.algorithms.aggregation import compute_means
from engine.algorithms.correction import correct_rollout, gap_metrics
from engine.algorithms.divergences import AdaptiveKL, FixedKL, kl_estimate
from engine.algorithms.masked import mask_out, masked_mean, masked_whiten
from engine.algorithms.shaping import groups_with_signal
from engine.batch import Batch, Future, LazyBatch
from engine.checkpoint.state_dict import StateDict
from engine.config import AlgorithmConfig, RLConfig
from engine.controller.timeline import span
from engine.errors import ConfigError, DataError, EpisodeError, RewardError
from engine.registry import Registry
from engine.workers.algorithm_options import advantage_options, policy_loss_options

if TYPE_CHECKING:
    from engine.controller.groups import Roles

    Step = Callable[[Roles, Batch, "Algo"], "StepResult"]

# What an estimator may need that any dataflow provides: log-probs come with rollout and actor,
# components with the reward.
_EVERYWHERE = frozenset({"old_log_probs", "sum_pi_squared", "reward_components"})


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A step of an algorithm and the roles that it calls."""

    name: str
    step: Step  # step(roles, prompts, algo) -> StepResult
    roles: Collection[str]  # always called, e.g. {"actor", "rollout", "reward"}
    optional: Collection[str] = ()  # called where the settings need it, e.g. {"reference"}
    provides: Collection[str] = ()  # inputs of advantage estimators, e.g. {"values"}
    uses_advantages: bool = True  # False: learns from something else
    uses_reference: Callable[[RLConfig], bool] | None = None  # None: where a KL term is on
    refills: bool = False  # does dynamic sampling
    pairs: bool = False  # the actor learns from two completions of a prompt, not from all

    def rows_an_update(self, config: RLConfig) -> int:
        """Completions that one update of the actor learns from, at most."""
        return config.trainer.train_batch_size * (2 if self.pairs else config.rollout.n)


_registry: Registry[Dataflow] = Registry(
    "dataflow",
    "algorithm.dataflow",
    ("engine.dataflows.recipes",),
    "@register_dataflow(name, roles)",
)


def register_dataflow(name: str, roles: Collection[str], **options: Any) -> Callable[[Step], Step]:
    """Make `step(roles, prompts, algo)` selectable as `algorithm.dataflow=<name>`.

    `roles` are those it calls; `options` are further fields of `Dataflow`. A name can be taken
    once.
    """

    def add(step: Step) -> Step:
        _registry.add(name, Dataflow(name, step, roles, **options), step)
        return step

    return add


def choose_dataflow(config: AlgorithmConfig) -> Dataflow:
    """The dataflow that `algorithm.dataflow` names, or the one its estimator runs on.

    Its step has the options of `algorithm.dataflow_options`. Raises ConfigError for an unknown name
    or option, and where the estimator needs what the dataflow doesn't provide.
    """
    needed = advantages.requires(config.adv_estimator) - _EVERYWHERE
    name = _by_estimator(config, needed) if config.dataflow == "auto" else config.dataflow
    dataflow = _registry.get(name)
    missing = needed.difference(dataflow.provides)
    if missing and dataflow.uses_advantages:
        need = "; ".join(f"{field}: {advantages.REQUIREMENTS[field]}" for field in sorted(missing))
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs what dataflow "
            f"{dataflow.name!r} doesn't provide ({need}); set algorithm.dataflow=auto"
        )
    options = _registry.options(name).parse(config.dataflow_options, "algorithm.dataflow_options")
    return replace(dataflow, step=partial(dataflow.step, **options)) if options else dataflow


def _by_estimator(config: AlgorithmConfig, needed: frozenset[str]) -> str:
    names = _registry.names()
    if config.filter_groups.enable:
        return "dapo"
    if config.adv_estimator in names:
        return config.adv_estimator
    if not needed:
        return "grpo"
    able = [dataflow.name for dataflow in _registry.values() if needed.issubset(dataflow.provides)]
    if not able:
        raise ConfigError(
            f"algorithm.adv_estimator={config.adv_estimator} needs {sorted(needed)}, which no "
            f"dataflow here provides; choose one of {', '.join(names)}, or register one"
        )
    return able[0]


@dataclass(frozen=True, slots=True)
class RequiredPasses:
    """What a step computes beyond rollout, reward and update."""

    reference: bool = False  # some role compares with the frozen reference
    ref_log_probs: bool = False  # the reference's log-probs of the sampled tokens are read
    ref_kl: bool = False  # the exact KL from the reference is part of the reward
    old_log_probs: bool = False  # the trainer's own from before the update are read
    sum_pi_squared: bool = False  # the sums of squared probabilities are read with them

    def roles(self, dataflow: Dataflow) -> frozenset[str]:
        return frozenset(dataflow.roles).union(dataflow.optional if self.reference else ())

    @staticmethod
    def of(config: RLConfig, dataflow: Dataflow) -> RequiredPasses:
        """The passes that the settings require.

        Truncated sampling's log-probs are not the policy's; rollout correction compares both; R2
        replays what routers chose in the trainer's pass.
        """
        algorithm, actor = config.algorithm, config.actor
        if dataflow.uses_reference is not None:
            compares = dataflow.uses_reference(config)
            return RequiredPasses(reference=compares, ref_log_probs=compares)
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


def teacher_weights(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """Shares `[B, T]` of T teachers, by `weight` or `route_by`; DataError for a row without one."""
    teachers, column = config.teachers, config.distillation.route_by
    if not column:
        shares = torch.tensor([teacher.weight for teacher in teachers])
        return (shares / shares.sum()).repeat(len(batch), 1)
    setting = f"algorithm.distillation.route_by={column!r}"
    if column not in batch.columns:
        raise DataError(
            f"{setting} is no column of the data; name one of {', '.join(sorted(batch.columns))}"
        )
    names = [teacher.rows for teacher in teachers]
    values = [str(value) for value in batch.columns[column]]
    if strange := sorted(set(values) - set(names)):
        raise DataError(
            f"{setting} is {strange[0]!r} in a row, and no teacher has rows={strange[0]!r}; there "
            f"are teachers for {', '.join(names)}"
        )
    chosen = torch.tensor([names.index(value) for value in values])
    return torch.nn.functional.one_hot(chosen, len(names)).float()


@dataclass
class StepResult:
    batch: LazyBatch
    updates: list[Future[dict[str, float]]] = field(default_factory=list)


class Algo:
    """The arithmetic between the roles' calls, which has the global batch.

    Group statistics, whitening, selections by covariance and edited masks are computed here once,
    before rows are split over ranks and micro-batches.
    """

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

        `token_level_rewards`, `advantages`, `returns`, and the `response_mask` to train with: rows
        whose reward failed, truncated ones with `mask_truncated` and what correction rejects are
        out. With correction `rollout_is_weights`, and what the policy loss prepares.
        """
        batch = lazy.resolve()
        with span("advantages"):
            return Batch(self._advantages(batch))

    def _advantages(self, batch: Batch) -> dict[str, Tensor]:
        present = _mask_without_failures(batch)
        rewards = self._rewards_with_kl(self.shaped_rewards(batch, present), batch, present)
        fields, mask = self._rollout_correction(batch, present)
        # Estimators see the mask before rejection: a reward on a rejected token still counts.
        known = batch | fields
        optional = {name: known[name] for name in _OPTIONAL_INPUTS if name in known}
        if "old_log_probs" in self.estimator.requires:
            optional["old_log_probs"] = _old_log_probs(batch)
        inputs = AdvantageInputs(rewards, present, batch["group_ids"], **optional)
        out = self.estimator(inputs, **self._options)
        if self.config.algorithm.mask_truncated:
            mask = shaping.without_truncated(mask, batch["truncated"])
        advantages = mask_out(mask, out.advantages.float())
        fields |= {
            "token_level_rewards": rewards,
            "advantages": advantages,
            "returns": mask_out(mask, out.returns.float()),
            "response_mask": mask,
        }
        return fields | self._prepared(batch, advantages, mask)

    def _prepared(self, batch: Batch, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        name, options, old = self._loss_mode, self._loss_options, _old_log_probs(batch)
        return policy_losses.prepare(
            name, old, advantages, mask, generator=self.generator, **options
        )

    def shaped_rewards(self, batch: Batch, mask: Tensor) -> Tensor:
        """Scores, clipped and less the penalty for length, `[B, R]`, before any KL."""
        rewards, penalty = self._shaped_and_penalty(batch, mask)
        if penalty is not None:
            self.metrics["reward/overlong_penalty"] = float(penalty.mean())
        return rewards

    def rows_with_signal(self, batch: Batch) -> Tensor:
        """Rows `[B]` (bool) of groups that differ in `filter_groups.metric`; writes no metrics."""
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
        """`advantages [B, R]` = log π_teacher − log π: the gradient of the reverse KL, by token."""
        batch = lazy.resolve()
        mask = batch["response_mask"]
        gap = mask_out(mask, batch["ref_log_probs"] - _old_log_probs(batch))
        self.metrics["distillation/reverse_kl"] = float(masked_mean(-gap, mask))
        return Batch({"advantages": gap} | self._prepared(batch, gap, mask))

    def state_dict(self) -> StateDict:
        """The adaptive KL coefficient and the generator."""
        return {"kl": self.kl_control.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: StateDict) -> None:
        self.kl_control.load_state_dict(state["kl"])
        self.generator.set_state(state["generator"].clone())

    def take_metrics(self) -> dict[str, float]:
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
            kind = config.kl_penalty
            kl = (
                batch["ref_kl"]
                if kind == "full"
                else kl_estimate(_old_log_probs(batch), batch["ref_log_probs"], kind, mask=mask)
            )
            rewards = shaping.kl_in_reward(rewards, kl, mask, self.kl_control.value)
            mean = float(masked_mean(kl, mask))
            self.metrics |= {"reward/kl": mean, "reward/kl_coef": self.kl_control.value}
            self.kl_control.update(mean, len(batch))
        if self.config.reward.whiten:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        return mask_out(mask, rewards)

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


# Without rewards, mask and groups, and the log-probs, which `_old_log_probs` chooses.
_OPTIONAL_INPUTS = [f.name for f in fields(AdvantageInputs)[3:] if f.name != "old_log_probs"]


def _old_log_probs(batch: Batch) -> Tensor:
    return batch["old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"]


def _mask_without_failures(batch: Batch) -> Tensor:
    """The mask without rows whose reward failed; raises where that is every row."""
    mask = batch["response_mask"]
    if "reward_failed" not in batch:
        return mask
    if not bool(batch["reward_failed"].all()):
        return mask_out(~batch["reward_failed"][:, None], mask)
    if "episode_failed" in batch and bool(batch["episode_failed"].all()):
        why = "a limit ended them (rollout.agent.on_limit=drop)"
        if errors := [error for error in batch.columns["episode_error"] if error]:
            why = f"{len(errors)} failed, the first with: {errors[0]}"
        raise EpisodeError(
            f"none of the {len(batch)} episodes of a step can be learned from: {why}"
        )
    raise RewardError(
        f"the reward failed for all {len(batch)} completions of a step; its log has the cause"
    )
