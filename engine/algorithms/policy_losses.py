"""Policy losses turn log-probs and advantages into a loss for every token.

How losses of tokens become one number is in `aggregation`, the critic's loss in `critic_loss`.
A loss is a function of its own row only. What needs a view of the whole batch (a covariance, a
rank) is computed once over the global batch by `prepare`, as a `[B, T]` tensor that is cut into
micro-batches with the rest. Therefore every cut of a batch adds up to the same gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.algorithms import checks
from engine.algorithms.aggregation import MeanAccumulator, accumulate_mean, check_mode
from engine.algorithms.masked import at_least_float, mask_out, masked_mean
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry, keyword_defaults

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped to ± this, so that exponentials stay finite


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return Δ = log π − log π_old `[B, T]`, clamped to ±20 (the gradient is 0 beyond)."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bounds(
    clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None
) -> tuple[float, float]:
    """Return ε_l and ε_h; `clip_ratio` sets each one that is None."""
    low, high = (clip_ratio if e is None else e for e in (clip_ratio_low, clip_ratio_high))
    return low, high


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return max(−Aρ, −A·clip(ρ, 1−ε_l, 1+ε_h)) `[B, T]`, and where the clip decides (bool)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), clipped > free


def check_clip(*, clip_ratio_c: float | None = None, **ranges: Any) -> None:
    """Raise ConfigError when a bound is negative or the dual-clip constant is not above 1."""
    checks.not_negative(**ranges)
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ConfigError(
            f"clip_ratio_c={clip_ratio_c} must be above 1, since it caps ratios well outside the "
            "clip range; set 3.0, or null for none"
        )


def fraction(condition: Tensor, mask: Tensor) -> MeanAccumulator:
    """Count the tokens inside the mask that fulfil `condition [B, T]`."""
    return accumulate_mean(condition.double(), mask)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss for every token and metrics as sums and counts."""

    loss: Tensor  # [B, T], 0 outside the mask
    metrics: Mapping[str, MeanAccumulator] = field(default_factory=dict)


Formula = Callable[..., LossOutput]
Prepare = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered formula with its metadata; call it like the formula.

    >>> old = torch.zeros(1, 2)
    >>> out = get_policy_loss("vanilla")(old, old, torch.ones(1, 2), torch.tensor([[1, 0]]))
    >>> out.loss
    tensor([[-1.,  0.]])
    """

    name: str
    formula: Formula
    options: Options
    default_mode: str  # the aggregation that the method was published with
    fixed: bool  # another aggregation would make it another method
    regularized: bool  # it has a gradient where advantages are 0
    sequence_weights: bool  # importance weights enter as one geometric mean a completion
    prepare: Prepare | None  # computes `prepared` tensors over the global batch
    prepared: tuple[str, ...]
    validate: Callable[..., None] | None  # raises ConfigError for options that contradict

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        rollout_is_weights: Tensor | None = None,
        **options: Any,
    ) -> LossOutput:
        """Compute a micro-batch's loss. All tensors `[B, T]`; gradient flows into `log_probs` only.

        `options` have the tensors that `prepare` made, too. Raises ConfigError for wrong options,
        DataError for unequal shapes, and EngineError for a plugin's loss that is not finite.
        """
        tensors = {k: v for k, v in options.items() if k in self.prepared}
        self.check_options({k: v for k, v in options.items() if k not in self.prepared})
        if missing := set(self.prepared) - tensors.keys():
            raise DataError(
                f"policy loss {self.name!r} needs {min(missing)} [B, T]; call "
                "policy_losses.prepare over the global batch and cut its tensors with the rest"
            )
        mask = response_mask.bool()
        inputs = {
            "log_probs": log_probs,
            "old_log_probs": old_log_probs.detach(),
            "advantages": advantages.detach(),
        }
        extra = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
        checks.shapes(inputs | tensors | extra, mask)
        new, old, advantages = (mask_out(mask, at_least_float(x)) for x in inputs.values())
        read = keyword_defaults(self.formula)
        used = {k: v for k, v in options.items() if k in read or k in tensors}
        out = self.formula(new, old, advantages, mask, **used)
        loss = out.loss
        owner = f"policy loss {self.name!r}"
        checks.finite_loss(owner, self.formula, loss, new, old, advantages, mask=mask)
        if rollout_is_weights is not None:
            loss = loss * self._weights(rollout_is_weights.detach().to(loss.dtype), mask)
        kl = accumulate_mean(old - new, mask)
        return LossOutput(mask_out(mask, loss), {"ppo_kl": kl, **out.metrics})

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise ConfigError for options that this loss doesn't read or that contradict."""
        self.options.require_known(options)
        if self.validate is not None:
            self.validate(**(dict(self.options) | dict(options)))

    def _weights(self, weights: Tensor, mask: Tensor) -> Tensor:
        if not self.sequence_weights:
            return mask_out(mask, weights)
        # A floor in the logarithm, so that one masked-out token doesn't erase its completion.
        logs = mask_out(mask, weights).clamp(min=1e-10).log()
        return masked_mean(logs, mask, 1).exp()[:, None].expand(mask.shape)


_registry: Registry[PolicyLoss] = Registry(
    "policy loss", "actor.policy_loss.loss_mode", (), "@register_policy_loss(name)"
)


def register_policy_loss(
    name: str,
    *aliases: str,
    default_mode: str = "token-mean",
    fixed: bool = False,
    regularized: bool = False,
    sequence_weights: bool = False,
    prepare: Prepare | None = None,
    prepared: tuple[str, ...] = (),
    validate: Callable[..., None] | None = None,
) -> Callable[[Formula], PolicyLoss]:
    """Register `formula(log_probs, old_log_probs, advantages, mask, *, option=default, …)`.

    The formula sees cleaned inputs (float32 or float64, 0 outside a boolean mask) and returns a
    LossOutput whose row i depends on row i alone. `prepare(old_log_probs, advantages, mask,
    generator, *, option=default, …)` returns the `[B, T]` tensors named in `prepared`. For the
    other arguments see PolicyLoss.
    """
    check_mode(default_mode)

    def decorate(formula: Formula) -> PolicyLoss:
        functions = (formula, prepare) if prepare else (formula,)
        accepted = Options(f"policy loss {name!r}", *functions)
        facts = (default_mode, fixed, regularized, sequence_weights, prepare, prepared, validate)
        entry = PolicyLoss(name, formula, accepted, *facts)
        _registry.add(name, entry, formula, aliases=aliases, options=accepted)
        return entry

    return decorate


get_policy_loss = _registry.get
names = _registry.names
options = _registry.options


def aggregation_mode(name: str, requested: str | None = None) -> str:
    """Return the mode to aggregate the loss `name` with: as requested, else as published.

    Raises ConfigError when another mode than the method's own would make it another method.
    """
    entry = _registry.get(name)
    if requested is None:
        return entry.default_mode
    check_mode(requested)
    if entry.fixed and requested != entry.default_mode:
        raise ConfigError(
            f"loss_agg_mode={requested!r} with loss_mode={name!r}: the method is defined with "
            f"{entry.default_mode!r}; set that, or leave loss_agg_mode out"
        )
    return requested


def prepare(
    name: str,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    generator: torch.Generator | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """Compute the tensors `[B, T]` that the loss `name` needs of the GLOBAL batch; often none.

    Call it once before the update, with the loss's options, and cut the tensors into micro-batches
    with the other fields. `generator` draws at random. Raises ConfigError for wrong options.
    """
    entry = _registry.get(name)
    entry.check_options(options)
    if entry.prepare is None:
        return {}
    mask = response_mask.bool()
    read = keyword_defaults(entry.prepare)
    with torch.no_grad():
        return entry.prepare(
            mask_out(mask, at_least_float(old_log_probs)),
            mask_out(mask, at_least_float(advantages)),
            mask,
            generator,
            **{k: v for k, v in options.items() if k in read},
        )


def token_covariance(old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A − mean A)·(log π_old − mean log π_old) `[B, T]`, means over the global mask.

    Log-probs are those before the update, the same in every micro-batch. Source: arXiv 2505.22617.
    """
    centered = advantages - masked_mean(advantages, mask)
    return mask_out(mask, centered * (old_log_probs - masked_mean(old_log_probs, mask)))


def trust_region_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    inside: Tensor,
    clip_ratio_c: float | None,
) -> LossOutput:
    """Return −A·sg(min(ρ, C))·log π on tokens `inside [B, T]` the trust region, else 0."""
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio if clip_ratio_c is None else ratio.clamp(max=clip_ratio_c)
    loss = torch.where(inside, -advantages * weight * log_probs, torch.zeros_like(log_probs))
    metrics = {"pg_clipfrac": fraction(~inside, mask)}
    if clip_ratio_c is not None:
        metrics["pg_clipfrac_lower"] = fraction((ratio > clip_ratio_c) & inside, mask)
    return LossOutput(loss, metrics)


@register_policy_loss("vanilla", validate=check_clip)
def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> LossOutput:
    """PPO's clipped surrogate with asymmetric bounds and dual clip.

    c = max(−Aρ, −A·clip(ρ, 1−ε_l, 1+ε_h)); where A < 0: min(c, −A·C). All `[B, T]`.

    `clip_ratio` sets both bounds unless they are given (ε_h > ε_l: DAPO's clip-higher);
    `clip_ratio_c=None` turns the dual clip off.
    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    metrics = {"pg_clipfrac": fraction(clipped, mask)}
    if clip_ratio_c is not None:
        ceiling, negative = -advantages * clip_ratio_c, advantages < 0
        metrics["pg_clipfrac_lower"] = fraction((loss > ceiling) & negative, mask)
        loss = torch.where(negative, torch.minimum(loss, ceiling), loss)
    return LossOutput(loss, metrics)


@register_policy_loss("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> LossOutput:
    """REINFORCE, and GPG, which is the same with the `gpg` advantage, as in verl.

    −A·log π. No trust region: for one update a batch, or with importance weights.
    Source: Williams (1992); with rollout weights, the policy gradient of verl's bypass mode; GPG:
    Chu et al., arXiv 2504.02546.
    """
    return LossOutput(-advantages * log_probs)


gpg = register_policy_loss("gpg")(reinforce.formula)


@register_policy_loss("gspo", default_mode="seq-mean-token-mean", fixed=True, validate=check_clip)
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 3e-4,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """GSPO: one ratio a completion, its length-normalised likelihood ratio.

    s_t = exp(sg(mean_t Δ) + log π − sg(log π)), then PPO's clip on s.

    Every token has the value of the completion's ratio and the gradient of its own log-prob (the
    paper's token variant). A mean over a completion moves little: bounds are far below PPO's.
    Source: Zheng et al., arXiv 2507.18071, eq. 7 and 14.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    mean = masked_mean(log_probs - old_log_probs, mask, 1).detach()
    mean = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = (mean[:, None] + log_probs - log_probs.detach()).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    return LossOutput(loss, {"pg_clipfrac": fraction(clipped, mask)})


@register_policy_loss(
    "geo_mean",
    default_mode="seq-mean-token-mean",
    fixed=True,
    sequence_weights=True,
    validate=check_clip,
)
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.4,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """GMPO: the geometric mean of token ratios, each clipped in log space.

    L_i = −Ā_i·exp(mean_t Δ'), Δ' = s·min(s·Δ, s·clip(Δ, −ε_l, ε_h)), s = sign(A).

    The completion's loss stands on each of its tokens, so that aggregation gives the mean over
    completions whatever the micro-batches are. Bounds are in log space; Ā is the mean advantage.
    Source: Zhao et al., arXiv 2507.20673.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    delta = log_ratio(log_probs, old_log_probs)
    sign = advantages.sign()
    near = delta.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * delta, sign * near)
    ratio = masked_mean(pessimistic, mask, 1).exp()
    loss = -masked_mean(advantages, mask, 1) * ratio
    outside = delta != near
    metrics = {
        "pg_clipfrac": fraction(outside & (advantages > 0), mask),
        "pg_clipfrac_lower": fraction(outside & (advantages < 0), mask),
    }
    return LossOutput(loss[:, None].expand(mask.shape), metrics)


@register_policy_loss("cispo", validate=check_clip)
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """CISPO: clip the importance weight, keep every token's gradient.

    −A·sg(clip(ρ, 1−ε_l, 1+ε_h))·log π: rare tokens outside the range still learn.
    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -advantages * weight * log_probs
    return LossOutput(loss, {"pg_clipfrac": fraction(weight != ratio, mask)})


@register_policy_loss("sapo", default_mode="seq-mean-token-mean", validate=checks.positive)
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> LossOutput:
    """SAPO: a smooth gate in place of the clip.

    −A·(4/τ)·σ(τ(ρ − 1)), τ = tau_pos where A > 0, else tau_neg.

    At ρ = 1 the gradient is that of Aρ; away from it, it fades smoothly. `tau_neg > tau_pos`
    fades negative advantages sooner.
    Source: Gao et al., arXiv 2511.20347.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    return LossOutput(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)))


@register_policy_loss("dro", regularized=True, validate=checks.positive)
def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    dro_beta: float = 0.1,
) -> LossOutput:
    """DRO: policy gradient with a quadratic pull to the old policy.

    −(A·log π − β/2·Δ²): no ratio, so old data can't blow it up.
    Source: Richemond et al., arXiv 2405.19107, with the advantage in place of r − V.
    """
    delta = log_ratio(log_probs, old_log_probs)
    return LossOutput(-(advantages * log_probs - 0.5 * dro_beta * delta.square()))


def _select_clip_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator | None,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> dict[str, Tensor]:
    """Draw max(1, ratio·N) of the tokens whose covariance lies between the bounds."""
    covariance = token_covariance(old_log_probs, advantages, mask)
    inside = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & mask
    candidates = inside.flatten().nonzero().squeeze(1)
    count = max(1, int(clip_cov_ratio * int(mask.sum())))
    order = torch.randperm(len(candidates), generator=generator)[:count]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[candidates[order.to(candidates.device)]] = True
    return {"cov_selected": chosen.view(mask.shape)}


def _check_clip_cov(
    *, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float, **ranges: Any
) -> None:
    check_clip(**ranges)
    checks.positive(clip_cov_ratio=clip_cov_ratio)
    if clip_cov_lb >= clip_cov_ub:
        raise ConfigError(f"clip_cov_lb={clip_cov_lb} must be below clip_cov_ub={clip_cov_ub}")


@register_policy_loss(
    "clip_cov", prepare=_select_clip_cov, prepared=("cov_selected",), validate=_check_clip_cov
)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_selected: Tensor,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> LossOutput:
    """Clip-Cov: PPO, with a few tokens of high covariance left out to keep entropy.

    PPO's clip, 0 on the tokens in `cov_selected [B, T]` (from `policy_losses.prepare`).
    Source: Cui et al., arXiv 2505.22617.
    """
    selected = cov_selected.bool()
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio(log_probs, old_log_probs).exp()
    loss, clipped = clipped_surrogate(ratio, advantages, low, high)
    metrics = {
        "pg_clipfrac": fraction(clipped & ~selected, mask),
        "cov_selected_frac": fraction(selected, mask),
    }
    return LossOutput(mask_out(~selected, loss), metrics)


def _select_kl_cov(
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator | None,
    *,
    kl_cov_ratio: float = 0.0002,
) -> dict[str, Tensor]:
    """Take the max(1, ratio·N) tokens of the highest covariance."""
    tokens = int(mask.sum())
    count = min(tokens, max(1, int(kl_cov_ratio * tokens)))
    covariance = token_covariance(old_log_probs, advantages, mask)
    ranked = mask_out(mask, covariance, -torch.inf).flatten()
    chosen = torch.zeros_like(ranked, dtype=torch.bool)
    chosen[ranked.topk(count).indices] = True
    return {"cov_selected": chosen.view(mask.shape)}


def _check_kl_cov(*, kl_cov_ratio: float, ppo_kl_coef: float, **_: object) -> None:
    if not 0 < kl_cov_ratio <= 1:
        raise ConfigError(f"kl_cov_ratio={kl_cov_ratio} must be above 0 and at most 1")
    checks.not_negative(ppo_kl_coef=ppo_kl_coef)


@register_policy_loss(
    "kl_cov",
    regularized=True,
    prepare=_select_kl_cov,
    prepared=("cov_selected",),
    validate=_check_kl_cov,
)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_selected: Tensor,
    ppo_kl_coef: float = 1.0,
) -> LossOutput:
    """KL-Cov: policy gradient, with a KL penalty on the tokens of highest covariance.

    −Aρ, plus coef·|Δ| on the tokens in `cov_selected [B, T]` (from `policy_losses.prepare`).
    Source: Cui et al., arXiv 2505.22617.
    """
    delta = log_ratio(log_probs, old_log_probs)
    loss = -advantages * delta.exp() + mask_out(cov_selected, ppo_kl_coef * delta.abs())
    return LossOutput(loss, {"cov_selected_frac": fraction(cov_selected, mask)})


@register_policy_loss("dppo_kl", validate=check_clip)
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 20.0,
) -> LossOutput:
    """DPPO with a bound on the binary KL divergence of a token.

    −A·sg(min(ρ, C))·log π where the token moves back or its divergence is in bounds, else 0.

    The divergence is KL(π_old ‖ π) of "this token or any other"; its bound is ε_h for A > 0 (only
    growing probabilities are bound) and ε_l for A ≤ 0 (only shrinking ones).
    Source: arXiv 2602.04879, DPPO with the binary KL divergence.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    new = log_probs.detach()
    divergence = binary_kl(old_log_probs, new)
    grows = torch.where(advantages > 0, new > old_log_probs, new < old_log_probs)
    limit = torch.full_like(advantages, low).masked_fill(advantages > 0, high)
    inside = ~grows | (divergence <= limit)
    return trust_region_loss(log_probs, old_log_probs, advantages, mask, inside, clip_ratio_c)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p·log(p/q) + (1−p)·log((1−p)/(1−q)) of two Bernoulli log-probabilities, any shape."""
    # Probabilities stay below 1 by what the dtype can tell apart, so that no logarithm diverges.
    ceiling = 1 - 2 * torch.finfo(log_p.dtype).eps
    p, q = log_p.exp().clamp(max=ceiling), log_q.exp().clamp(max=ceiling)
    return p * (log_p - log_q) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


@register_policy_loss("dppo_tv", validate=check_clip)
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 20.0,
) -> LossOutput:
    """DPPO with a bound on the change of a token's probability (total variation).

    −A·sg(min(ρ, C))·log π where π − π_old ≤ ε_h (A > 0) or ≥ −ε_l (A ≤ 0), else 0.

    The bounds are on probabilities: a rare token may multiply its ratio many times over.
    Source: arXiv 2602.04879, DPPO with the binary TV divergence.
    """
    low, high = bounds(clip_ratio, clip_ratio_low, clip_ratio_high)
    change = log_probs.detach().exp() - old_log_probs.exp()
    inside = torch.where(advantages > 0, change <= high, change >= -low)
    return trust_region_loss(log_probs, old_log_probs, advantages, mask, inside, clip_ratio_c)
