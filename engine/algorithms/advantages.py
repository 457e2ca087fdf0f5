"""Advantage estimators turn rewards into `advantages [B, T]` and `returns [B, T]`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.masked import (
    Groups,
    Turns,
    at_least_float,
    mask_out,
    masked_sum,
    masked_whiten,
    reward_to_go,
    safe_divide,
)
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry

# Fields beyond rewards, mask and groups that entries may require, and where each comes from.
REQUIREMENTS = {
    "values": "a critic that gives values [B, T]",
    "reward_components": "a reward that returns named components [B, K]",
    "baseline_rewards": "one greedy rollout a prompt, whose reward is the baseline [B]",
    "old_log_probs": "the policy's log-probs before the update [B, T]",
    "sum_pi_squared": "the sum of squared probabilities of each next-token distribution [B, T]",
}


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Everything an estimator may read; the optional fields only where it requires them."""

    token_level_rewards: Tensor  # [B, T] float
    response_mask: Tensor  # [B, T], non-zero on tokens the policy sampled
    group_ids: Tensor  # [B] integer; rows with one id are completions of one prompt
    values: Tensor | None = None  # [B, T]; the critic's, of the state before each token
    reward_components: Tensor | None = None  # [B, K], or [B, T, K], which is summed over the mask
    baseline_rewards: Tensor | None = None  # [B]; of the greedy completion of the row's prompt
    old_log_probs: Tensor | None = None  # [B, T]; of the policy before the update
    sum_pi_squared: Tensor | None = None  # [B, T]; Σ_v π(v)² where each token was sampled from
    rollout_is_weights: Tensor | None = None  # [B, T]; of rollout correction, where it is on
    # [B] integer; rows with one id go on from each other, as one completion; None: none do.
    episode_ids: Tensor | None = None
    first_turn: Tensor | None = None  # [B] integer; a row's first turn in its episode; None: 0

    @property
    def scores(self) -> Tensor:
        """S `[B]`: the rewards inside the mask, summed by completion, or by episode."""
        scores = masked_sum(self.token_level_rewards, self.response_mask, 1)
        if self.episode_ids is None:
            return scores
        episode = torch.unique(self.episode_ids, return_inverse=True)[1]
        return torch.zeros_like(scores).index_add(0, episode, scores)[episode]

    @property
    def groups(self) -> Groups:
        """The groups of rows with a token inside the mask; of an episode, its first row."""
        rows = self.response_mask.bool().any(1)
        if self.episode_ids is not None:
            same = (self.episode_ids[:, None] == self.episode_ids) & rows
            rows = rows & (same.tril(-1).sum(1) == 0)  # the first row of each episode
        return Groups.of(self.group_ids, rows)

    @property
    def turns(self) -> Turns:
        return Turns.of(self.response_mask, self.episode_ids, self.first_turn)

    def need(self, name: str) -> Tensor:
        """Return an optional field; raise DataError when it is missing."""
        value = getattr(self, name)
        if value is None:
            raise DataError(f"{name} is missing; it needs {REQUIREMENTS.get(name, name)}")
        return value


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """What the losses train on; both are 0 outside the mask and carry no gradient."""

    advantages: Tensor  # [B, T]
    returns: Tensor  # [B, T]; value targets with a critic; else what advantages were made from


Formula = Callable[..., AdvantageOutputs]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A registered formula with what it needs; call it like the formula.

    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
    >>> inputs = AdvantageInputs(rewards, mask, torch.tensor([7, 7]))
    >>> get_advantage("grpo")(inputs, norm_adv_by_std_in_grpo=False).advantages
    tensor([[ 0.5000,  0.5000],
            [-0.5000, -0.5000]])
    """

    name: str
    formula: Formula
    requires: frozenset[str]
    min_group_size: int
    options: Options

    def __call__(self, inputs: AdvantageInputs, **options: object) -> AdvantageOutputs:
        """Estimate over the whole batch; raise ConfigError or DataError before computing."""
        self.options.require_known(options)
        with torch.no_grad():
            out = self.formula(_clean(self, inputs), **options)
        mask = inputs.response_mask
        return AdvantageOutputs(mask_out(mask, out.advantages), mask_out(mask, out.returns))


_registry: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", "algorithm.adv_estimator", (), "@register_advantage(name)"
)


def register_advantage(
    name: str, *aliases: str, requires: tuple[str, ...] = (), min_group_size: int = 1
) -> Callable[[Formula], AdvantageEstimator]:
    """Register `formula(inputs, *, option=default, …) -> AdvantageOutputs` under `name`.

    `requires` names optional fields of AdvantageInputs; `min_group_size` is the least number of
    completions a prompt for which the estimator means something. The formula sees cleaned inputs:
    float32 or float64, 0 outside the mask.
    """
    unknown = set(requires) - set(REQUIREMENTS)
    if unknown:
        raise ConfigError(
            f"advantage estimator {name!r} requires unknown {sorted(unknown)}; "
            f"known: {', '.join(REQUIREMENTS)}"
        )

    def decorate(formula: Formula) -> AdvantageEstimator:
        accepted = Options(f"advantage estimator {name!r}", formula)
        entry = AdvantageEstimator(name, formula, frozenset(requires), min_group_size, accepted)
        _registry.add(name, entry, formula, aliases=aliases, options=accepted)
        return entry

    return decorate


get_advantage = _registry.get
names = _registry.names
options = _registry.options


def requires(name: str) -> frozenset[str]:
    """Return the fields of AdvantageInputs that the trainer must fill for `name`."""
    return _registry.get(name).requires


def check_group_size(name: str, n: int) -> None:
    """Raise ConfigError when `n` completions a prompt are too few for the estimator `name`."""
    least = _registry.get(name).min_group_size
    if n < least:
        raise ConfigError(
            f"rollout.n={n} with algorithm.adv_estimator={name}: an advantage is relative to the "
            f"prompt's other completions; set rollout.n to {least} or more"
        )


def to_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Give every token inside the mask its completion's score: `[B]` → `[B, T]`."""
    return mask_out(mask, scores[:, None].expand(mask.shape))


def _on_tokens(scores: Tensor, mask: Tensor) -> AdvantageOutputs:
    """Return scores `[B]` as the advantages and returns of their completions' tokens."""
    tokens = to_tokens(scores, mask)
    return AdvantageOutputs(tokens, tokens)


def _clean(entry: AdvantageEstimator, inputs: AdvantageInputs) -> AdvantageInputs:
    """Check presence, shapes and values; zero what lies outside the mask; drop what isn't read."""
    mask = inputs.response_mask
    if mask.dim() != 2:
        raise DataError(f"response_mask must be [B, T], not {list(mask.shape)}")
    if inputs.group_ids.shape != mask.shape[:1]:
        raise DataError(
            f"group_ids has shape {list(inputs.group_ids.shape)}, not [{mask.shape[0]}]"
        )
    for name in sorted(entry.requires):
        if getattr(inputs, name) is None:
            raise DataError(
                f"advantage estimator {entry.name!r} needs {name}: {REQUIREMENTS[name]}"
            )
    cleaned: dict[str, Any] = dict.fromkeys(REQUIREMENTS)
    for name in ("token_level_rewards", "rollout_is_weights", *entry.requires):
        if (value := getattr(inputs, name)) is not None:
            cleaned[name] = _clean_field(name, value, mask)
    return replace(inputs, **cleaned)


def _clean_field(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """Return floats, 0 outside the mask; raise DataError where they are not finite inside."""
    by_token = name not in ("baseline_rewards", "reward_components") or value.dim() == 3
    inside = mask.bool() if by_token else mask.bool().any(1)
    if value.shape[: inside.dim()] != inside.shape:
        raise DataError(
            f"{name} has shape {list(value.shape)} but response_mask {list(mask.shape)}"
        )
    inside = inside.reshape(*inside.shape, *[1] * (value.dim() - inside.dim()))
    cleaned = mask_out(inside, at_least_float(value.detach()))
    broken = ~cleaned.isfinite()
    if name == "reward_components":  # NaN: the component doesn't apply to the row
        broken &= ~cleaned.isnan()
    if bool(broken.any()):
        row = int(broken.nonzero()[0, 0])
        raise DataError(
            f"{name} is NaN or infinite inside the mask, first in row {row}; "
            "drop that row or repair what computed it"
        )
    return cleaned


@register_advantage("gae", requires=("values",))
def gae(
    inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> AdvantageOutputs:
    """Generalised advantage estimation, with a critic.

    δ_t = r_t + γV⁺ − V_t; L_t = δ_t + γλL⁺; returns = L + V; A = whiten(L).

    V⁺ and L⁺ belong to the policy's next token: masked tokens (a tool's or user's turn) pass
    them on unchanged. `whiten=False` keeps A = L.
    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """
    values, mask = inputs.need("values"), inputs.response_mask.bool()
    advantages = _gae(inputs.token_level_rewards, values, mask, gamma, lam)
    returns = advantages + values
    return AdvantageOutputs(masked_whiten(advantages, mask) if whiten else advantages, returns)


def _gae(rewards: Tensor, values: Tensor, present: Tensor, gamma: float, lam: float) -> Tensor:
    """Return L over the actions that are `present`, in columns; others pass it on."""
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_value = torch.where(present[:, t], values[:, t], next_value)
        next_advantage = torch.where(present[:, t], advantages[:, t], next_advantage)
    return advantages


@register_advantage("gae_turn", requires=("values",))
def gae_turn(
    inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> AdvantageOutputs:
    """Generalised advantage estimation over turns: a turn is one action.

    δ_k = r_k + γV_{k+1} − V_k; L_k = δ_k + γλL_{k+1}; A = whiten(L), R = L + V.

    r_k is the sum of turn k's rewards and V_k the value before its first token; all tokens of a
    turn get its A and R. γ and λ discount turns, not tokens.
    Source: the turn level of VAGEN's Bi-Level GAE, arXiv 2510.16907; GAE as `gae`.
    """
    turns = inputs.turns
    rewards = turns.sum(inputs.token_level_rewards)
    values = turns.first(inputs.need("values"))
    advantages = _gae(rewards, values, turns.present, gamma, lam)
    tokens = turns.to_tokens(advantages)
    returns = turns.to_tokens(advantages + values)
    return AdvantageOutputs(masked_whiten(tokens, turns.mask) if whiten else tokens, returns)


@register_advantage("grpo", "grpo_vectorized", min_group_size=2)
def grpo(
    inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> AdvantageOutputs:
    """GRPO and Dr. GRPO: a completion's score relative to its group.

    A = (S − μ_g)/(σ_g + ε) on every token; without the division: Dr. GRPO.

    σ has Bessel's correction. A group of equal scores gives exactly 0; a group of one gives S
    (μ = 0, σ = 1), as verl has it. Completions without tokens count in no statistic.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.
    """
    normed = grpo_scores(inputs.scores, inputs.groups, norm_adv_by_std_in_grpo, epsilon)
    return _on_tokens(normed, inputs.response_mask)


def grpo_scores(scores: Tensor, groups: Groups, by_std: bool, epsilon: float) -> Tensor:
    """Return (S − μ_g)/(σ_g + ε) of scores `[B]`, or S − μ_g; for a group of one, S."""
    centered = _center(scores, groups, by_std, epsilon)
    return scores.where((groups.size == 1)[groups.index], centered)


@register_advantage("grpo_turn", min_group_size=2)
def grpo_turn(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    turn_weight: float = 1.0,
) -> AdvantageOutputs:
    """GRPO with credit by turn: an episode relative to its group, and each turn to the group's.

    A_k = A^E + ω·A^T_k on the tokens of turn k.

    A^E is GRPO's advantage of the episode's whole reward. A^T_k compares G_k = Σ_{j≥k} γ^{j−k} r_j
    of turns' rewards r_j with G_k of the group's other episodes that have a turn k: (G_k − μ)/(σ +
    ε), 0 where there is no other.
    Source: the two levels are GiGPO's, arXiv 2505.10978, eq. 8; rewards by turn MT-GRPO's, arXiv
    2505.11821. Both group by what is comparable: here, the number of the turn.
    """
    turns = inputs.turns
    returns = reward_to_go(turns.sum(inputs.token_level_rewards), turns.present, gamma)
    by_std = norm_adv_by_std_in_grpo
    episodes = grpo_scores(inputs.scores, inputs.groups, by_std, epsilon)
    group_of = torch.zeros(len(turns.present), dtype=torch.long, device=returns.device)
    group_of[turns.episode] = inputs.group_ids
    relative = torch.zeros_like(returns)
    for k in range(returns.shape[1]):
        others = Groups.of(group_of, turns.present[:, k])
        compared = others.rows & (others.size > 1)[others.index]
        relative[:, k] = mask_out(compared, _center(returns[:, k], others, by_std, epsilon))
    tokens = turns.to_tokens(turn_weight * relative)
    tokens = tokens + turns.mask * episodes[:, None]
    return AdvantageOutputs(tokens, turns.to_tokens(returns))


def _center(x: Tensor, groups: Groups, by_std: bool, epsilon: float) -> Tensor:
    centered = x - groups.mean(x)[groups.index]
    return safe_divide(centered, groups.std(x)[groups.index] + epsilon) if by_std else centered


@register_advantage("grpo_passk", min_group_size=2)
def grpo_passk(
    inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> AdvantageOutputs:
    """GRPO for pass@k: only a group's best completion is pushed, by its lead over the second.

    A = (S_max − S_second)/(σ_g + ε) for the best of each group, 0 for the others.

    A tie for the best, and a group of one, give 0 throughout.
    Source: arXiv 2503.19595.
    """
    scores, groups = inputs.scores, inputs.groups
    best = groups.max(scores)[groups.index]
    is_best = (scores == best) & groups.rows
    unique = groups.sum(is_best.to(scores.dtype))[groups.index] == 1
    second = groups.max(scores.masked_fill(is_best, -torch.inf))[groups.index]
    leads = is_best & unique & second.isfinite()
    lead = torch.where(leads, best - second, torch.zeros_like(scores))
    if norm_adv_by_std_in_grpo:
        lead = safe_divide(lead, groups.std(scores)[groups.index] + epsilon)
    return _on_tokens(lead, inputs.response_mask)


@register_advantage("gdpo", requires=("reward_components",), min_group_size=2)
def gdpo(
    inputs: AdvantageInputs,
    *,
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> AdvantageOutputs:
    """GDPO: several reward components, each normalised within the group before they are added.

    A = whiten(Σ_k w_k·GRPO(component k)) over all tokens inside the mask. A component that doesn't
    apply to a row (NaN) adds nothing there, nor to its group's statistics.

    Weights default to 1 each. So a component of small scale is not drowned by a large one.
    Source: arXiv 2601.05242.
    Raises ConfigError when the number of weights is not the number of components.
    """
    components = inputs.need("reward_components")
    if components.dim() == 3:
        components = components.sum(1)
    count = components.shape[1]
    weights = [1.0] * count if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != count:
        raise ConfigError(
            f"gdpo_reward_weights has {len(weights)} entries but the reward returns {count} "
            "components; give one weight a component"
        )
    total = torch.zeros_like(components[:, 0])
    for component, weight in zip(components.unbind(1), weights, strict=True):
        applies = ~component.isnan()
        groups = Groups.of(inputs.groups.index, inputs.groups.rows & applies)
        # A row that is left alone in its group has nothing to be compared with.
        applies &= ((groups.size != 1) | (inputs.groups.size == 1))[groups.index]
        known = mask_out(applies, component)
        normed = grpo_scores(known, groups, norm_adv_by_std_in_grpo, epsilon)
        total = total + weight * mask_out(applies, normed)
    tokens = masked_whiten(to_tokens(total, inputs.response_mask), inputs.response_mask)
    return AdvantageOutputs(tokens, tokens)


@register_advantage("gpg", min_group_size=2)
def gpg(inputs: AdvantageInputs, *, f_norm: float = 1.0) -> AdvantageOutputs:
    """GPG: group-centred scores, scaled up by the share of completions that earned something.

    A = α·(S − μ_g)/f_norm with α = B/max(#{S ≠ 0}, 1).

    B and # count completions with tokens. A group of one has baseline 0, as in verl.
    Source: Chu et al., arXiv 2504.02546.
    """
    scores, groups = inputs.scores, inputs.groups
    nonzero = ((scores != 0) & groups.rows).sum().clamp(min=1)
    alpha = groups.rows.sum() / nonzero
    centered = grpo_scores(scores, groups, by_std=False, epsilon=0.0)
    return _on_tokens(alpha.to(scores.dtype) * centered / f_norm, inputs.response_mask)


@register_advantage("maxrl", min_group_size=2)
def maxrl(inputs: AdvantageInputs, *, epsilon: float = 1e-6) -> AdvantageOutputs:
    """MaxRL: score relative to the group's mean, an estimator of the gradient of log pass-rate.

    A = (S − μ_g)/μ_g where μ_g > ε, else 0. For scores that are 0 or more.

    Dividing by the pass rate weighs hard prompts up, as maximum likelihood does; a group
    without success (or of one) gives 0.
    Source: Maximum Likelihood Reinforcement Learning, arXiv 2602.02710.
    """
    scores, groups = inputs.scores, inputs.groups
    mean = groups.mean(scores)[groups.index]
    relative = mask_out(mean > epsilon, safe_divide(scores - mean, mean))
    return _on_tokens(relative, inputs.response_mask)


@register_advantage("opo", min_group_size=2)
def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """OPO: the variance-optimal baseline of a group when gradients grow with length.

    A_i = S_i − Σ_g len·S / Σ_g len, with len in tokens inside the mask.

    A group of equal scores gives exactly 0; a group of one gives S (baseline 0, as in verl).
    Source: Hao et al., arXiv 2505.23585.
    """
    scores, groups, mask = inputs.scores, inputs.groups, inputs.response_mask
    lengths = mask.bool().sum(1).to(scores.dtype)
    # Weighing differences to the group's smallest score keeps equal scores exact.
    origin = groups.min(scores)
    weighted = groups.sum(lengths * (scores - origin[groups.index]))
    baseline = origin + weighted / groups.sum(lengths).clamp(min=1)
    alone = (groups.size == 1)[groups.index]
    return _on_tokens(scores.where(alone, scores - baseline[groups.index]), mask)


@register_advantage(
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    requires=("old_log_probs", "sum_pi_squared"),
    min_group_size=2,
)
def optimal_token_baseline(
    inputs: AdvantageInputs, *, handle_zero_tail: bool = True, epsilon: float = 1e-8
) -> AdvantageOutputs:
    """Optimal token baseline: one baseline a group and token, weighed by gradient energy.

    w_t = (1 − 2π_t + Σπ²)·ρ²; W = cumsum(w); b_t = Σ_g G_t W_t/(Σ_g W_t + ε); A = G − b.

    w_t is the squared norm of the score at the logits; ρ the rollout correction's weight, if any.
    Token t is the policy's t-th: masked turns are skipped. `handle_zero_tail`: where only one
    completion is that long, its baseline is 0, not its own return. Returns are G.
    Source: verl's optimal token baseline; the optimal baseline of Greensmith et al. (2004).
    """
    mask, groups = inputs.response_mask.bool(), inputs.groups
    returns = reward_to_go(inputs.token_level_rewards, mask)
    energy = 1 - 2 * inputs.need("old_log_probs").exp() + inputs.need("sum_pi_squared")
    if inputs.rollout_is_weights is not None:
        energy = energy * inputs.rollout_is_weights.square()
    path = mask_out(mask, energy).cumsum(1)
    order = mask.long().cumsum(1) - 1
    packed = [_pack(mask_out(mask, x), order, mask) for x in (returns * path, path)]
    baseline = groups.sum(packed[0]) / (groups.sum(packed[1]) + epsilon)
    longer = groups.sum(_pack(mask.to(returns.dtype), order, mask))
    shared = longer > 1 if handle_zero_tail else (longer > 0) & (groups.size > 1)[:, None]
    baseline = mask_out(shared, baseline)[groups.index]
    return AdvantageOutputs(returns - baseline.gather(1, order.clamp(min=0)), returns)


def _pack(x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """Move the entries inside the mask to the left, in order: `[B, T]` → `[B, T]`."""
    # Entries outside the mask are 0 and are added to where they change nothing.
    return torch.zeros_like(x).scatter_add(1, order.clamp(min=0), mask_out(mask, x))


@register_advantage("rloo", "rloo_vectorized", min_group_size=2)
def rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """RLOO: the mean of the other completions as the baseline.

    A_i = S_i − mean of the group's other scores = n/(n−1)·(S_i − μ_g).

    A group of one has no others and gives 0 (verl's two variants disagree there).
    Source: Ahmadian et al., arXiv 2402.14740.
    """
    scores, groups = inputs.scores, inputs.groups
    factor = groups.size / (groups.size - 1).clamp(min=1)
    centered = scores - groups.mean(scores)[groups.index]
    return _on_tokens(factor.to(scores.dtype)[groups.index] * centered, inputs.response_mask)


@register_advantage("remax", requires=("baseline_rewards",))
def remax(inputs: AdvantageInputs) -> AdvantageOutputs:
    """ReMax: the reward of a greedy completion as the baseline.

    A_t = G_t − b: G the undiscounted reward-to-go, b the greedy completion's reward.
    Source: Li et al., arXiv 2310.10505.
    """
    returns = reward_to_go(inputs.token_level_rewards, inputs.response_mask)
    return AdvantageOutputs(returns - inputs.need("baseline_rewards")[:, None], returns)


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> AdvantageOutputs:
    """REINFORCE++: discounted reward-to-go, whitened over the batch.

    R_t = r_t + γR⁺ over the policy's tokens; A = whiten(R).

    Masked tokens carry R across. No groups, no critic.
    Source: Hu, arXiv 2501.03262.
    """
    returns = reward_to_go(inputs.token_level_rewards, inputs.response_mask, gamma)
    return AdvantageOutputs(masked_whiten(returns, inputs.response_mask), returns)


@register_advantage("reinforce_plus_plus_baseline", min_group_size=2)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> AdvantageOutputs:
    """REINFORCE++ with the group's mean as the baseline.

    A = whiten((S − μ_g)·m) over all tokens of the batch; a group of one has baseline 0.
    Source: Hu, arXiv 2501.03262, the variant with a group baseline.
    """
    centered = grpo_scores(inputs.scores, inputs.groups, by_std=False, epsilon=0.0)
    tokens = to_tokens(centered, inputs.response_mask)
    white = masked_whiten(tokens, inputs.response_mask)
    return AdvantageOutputs(white, white)
