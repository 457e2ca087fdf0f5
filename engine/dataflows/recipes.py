"""The algorithms as they read in a paper: one short function each over roles."""

from collections.abc import Iterator

import torch

from engine.algorithms.preference_losses import get_pair_loss
from engine.algorithms.shaping import first_groups
from engine.batch import Batch, ConcatFuture, LazyBatch
from engine.controller.groups import Roles
from engine.dataflows.algo import Algo, StepResult, register_dataflow


def generate_and_score(roles: Roles, prompts: Batch, algo: Algo) -> LazyBatch:
    """Sample and score; with `rollout.parts`, finished parts are scored while others decode."""
    count = min(algo.config.rollout.parts, len(prompts))
    if count == 1:
        batch = LazyBatch(roles.rollout.generate(prompts))
        return algo.sampled(batch | roles.reward.score(batch))
    roles.rollout.begin(prompts)
    parts = [roles.rollout.next_part(left) for left in range(count, 0, -1)]
    scores = [roles.reward.score_part(part) for part in parts]
    return algo.sampled(LazyBatch(ConcatFuture(parts), ConcatFuture(scores)))


def add_log_probs(roles: Roles, batch: LazyBatch, algo: Algo) -> LazyBatch:
    """Add what the loss and the reward compare with: the reference's and the old log-probs."""
    if algo.needs.ref_log_probs:
        batch |= roles.reference.log_probs(batch)
    if algo.needs.ref_kl:
        batch |= roles.reference.full_kl(batch)
    if algo.needs.old_log_probs:
        batch |= roles.actor.log_probs(batch)
    return batch


class DynamicSampling:
    """Collects groups with signal over several rollouts of one step, `wanted` of them at most.

    If `max_num_gen_batches` rollouts have no group with signal, the last one is used whole: its
    advantages are zero, so only a KL term changes the policy (metric `sampling/groups_kept` is 0).
    """

    def __init__(self, algo: Algo, wanted: int) -> None:
        self._algo, self._wanted = algo, wanted
        self._kept: list[Batch] = []
        self._last: Batch | None = None
        self._rollouts = self._groups = self._sampled = 0

    def rounds(self, prompts: Batch) -> Iterator[Batch]:
        """Prompts to sample next, first `prompts`; call `add` for each."""
        limit = self._algo.config.algorithm.filter_groups.max_num_gen_batches
        more = self._algo.more_prompts
        yield prompts
        while more and self._groups < self._wanted and self._rollouts < limit:
            yield more()

    def add(self, lazy: LazyBatch) -> None:
        """Keep the groups with signal of one rollout; waits for its scores."""
        batch = lazy.resolve()
        # Each rollout numbers its groups from 0; here the numbers must be unique.
        batch = batch | {"group_ids": batch["group_ids"] + self._sampled}
        self._sampled += len(batch["group_ids"].unique())
        keep = self._algo.rows_with_signal(batch)
        self._rollouts += 1
        self._last = batch
        self._groups += len(batch["group_ids"][keep].unique())
        if bool(keep.any()):
            self._kept.append(batch.rows(keep))

    def batch(self) -> Batch:
        """The first `wanted` groups with signal, or the last rollout where there are none."""
        assert self._last is not None, "a step samples at least once"
        metrics = self._algo.metrics
        metrics["sampling/rollouts"] = float(self._rollouts)
        metrics["sampling/groups_sampled"] = float(self._sampled)
        metrics["sampling/groups_kept"] = float(min(self._groups, self._wanted))
        if not self._kept:
            return self._last
        groups = Batch.concat(self._kept)
        rows = torch.ones(len(groups), dtype=torch.bool)
        return groups.rows(first_groups(groups["group_ids"], rows, self._wanted))


def preference_pairs(lazy: LazyBatch, algo: Algo) -> Batch:
    """Rows 2i and 2i+1: the best and the worst completion of a group, by shaped reward.

    A group of equal rewards gives none. Rows that are empty or whose reward failed are left out,
    truncated ones with `mask_truncated`.
    """
    batch = lazy.resolve()
    rewards = algo.shaped_rewards(batch, batch["response_mask"]).sum(1)
    usable = batch["response_mask"].bool().any(1)
    if "reward_failed" in batch:
        usable &= ~batch["reward_failed"]
    if algo.config.algorithm.mask_truncated:
        usable &= ~batch["truncated"]
    chosen: list[int] = []
    for group in batch["group_ids"].unique():
        rows = ((batch["group_ids"] == group) & usable).nonzero().squeeze(1)
        if not len(rows):
            continue
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        if rewards[best] > rewards[worst]:
            chosen += [int(best), int(worst)]
    groups = len(batch["group_ids"].unique())
    algo.metrics["preference/pairs"] = len(chosen) / 2
    algo.metrics["preference/groups_with_pair"] = len(chosen) / 2 / groups
    return batch.rows(torch.tensor(chosen, dtype=torch.long))


@register_dataflow("rloo", roles={"actor", "rollout", "reward"}, optional={"reference"})
@register_dataflow("grpo", roles={"actor", "rollout", "reward"}, optional={"reference"})
def grpo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """GRPO (arXiv:2402.03300), and RLOO (arXiv:2402.14740) with its own estimator; no critic."""
    batch = generate_and_score(roles, prompts, algo)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])


@register_dataflow(
    "remax",
    roles={"actor", "rollout", "reward"},
    optional={"reference"},
    provides={"baseline_rewards"},
)
def remax(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """ReMax (arXiv:2310.10505): the baseline is the reward of one greedy completion a prompt."""
    batch = LazyBatch(roles.rollout.generate(prompts))
    greedy = LazyBatch(roles.rollout.generate_greedy(prompts))
    batch |= roles.reward.score(batch)
    greedy |= roles.reward.score(greedy)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.baseline(batch, greedy)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])


@register_dataflow(
    "dapo", roles={"actor", "rollout", "reward"}, optional={"reference"}, refills=True
)
def dapo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """DAPO (arXiv:2503.14476, 3.2): sample until enough groups have signal, then as GRPO."""
    sampling = DynamicSampling(algo, wanted=len(prompts))
    for requested in sampling.rounds(prompts):
        sampling.add(generate_and_score(roles, requested, algo))
    batch = add_log_probs(roles, LazyBatch(sampling.batch()), algo)
    batch |= algo.advantages(batch)
    return StepResult(batch, [roles.actor.update(batch)])


@register_dataflow(
    "ppo",
    roles={"actor", "rollout", "reward", "critic"},
    optional={"reference"},
    provides={"values"},
)
def ppo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """PPO (arXiv:1707.06347): a critic values each state (GAE, arXiv:1506.02438)."""
    batch = generate_and_score(roles, prompts, algo)
    batch |= roles.critic.values(batch)
    batch = add_log_probs(roles, batch, algo)
    batch |= algo.advantages(batch)
    critic = roles.critic.update(batch)
    policy = roles.actor.update(batch) if algo.policy_learns else roles.actor.skip_update()
    return StepResult(batch, [critic, policy])


@register_dataflow(
    "online_dpo",
    roles={"actor", "rollout", "reward"},
    optional={"reference"},
    uses_advantages=False,
    uses_reference=lambda config: get_pair_loss(config.algorithm.preference.loss).needs_reference,
    pairs=True,
)
def online_dpo(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """Online DPO (arXiv:2402.04792): learn to prefer each group's best completion to its worst."""
    batch = generate_and_score(roles, prompts, algo)
    pairs = LazyBatch(preference_pairs(batch, algo))
    if not len(pairs):
        return StepResult(batch)
    if algo.needs.ref_log_probs:
        pairs |= roles.reference.log_probs(pairs)
    return StepResult(batch, [roles.actor.update_pairs(pairs)])


@register_dataflow(
    "distillation", roles={"actor", "rollout", "teacher", "reward"}, uses_advantages=False
)
def distillation(roles: Roles, prompts: Batch, algo: Algo) -> StepResult:
    """On-policy distillation (arXiv:2306.13649): the reward only measures the student."""
    algo.teacher_weights(prompts)  # a row without a teacher is refused before anything is sampled
    batch = generate_and_score(roles, prompts, algo)
    batch |= algo.teacher_weights(batch.resolve())
    settings = algo.config.algorithm.distillation
    if settings.loss == "policy_gradient":
        batch |= roles.teacher.log_probs(batch)
        batch = add_log_probs(roles, batch, algo)
        batch |= algo.distillation_advantages(batch)
        return StepResult(batch, [roles.actor.update(batch)])
    if settings.top_k:
        batch |= roles.teacher.top_k(batch)
    return StepResult(batch, [roles.actor.update_distilled(batch)])
