"""Preference losses: DPO and its relatives on pairs, KTO on rows, and the reward model's loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.algorithms import checks
from engine.algorithms.aggregation import MeanAccumulator, accumulate_mean
from engine.algorithms.masked import at_least_float, masked_sum
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry


@dataclass(frozen=True, slots=True)
class Pairs:
    """B pairs: log-probs of whole responses, summed over their tokens, all `[B]` float."""

    policy_chosen: Tensor
    policy_rejected: Tensor
    chosen_length: Tensor  # tokens of the response, 1 or more
    rejected_length: Tensor
    ref_chosen: Tensor | None = None  # the reference's; None for losses without one
    ref_rejected: Tensor | None = None

    def log_ratios(self, per_token: bool = False) -> tuple[Tensor, Tensor]:
        """Return log π − log π_ref of chosen and rejected; divided by length when `per_token`."""
        assert self.ref_chosen is not None, "checked by PairLoss"
        assert self.ref_rejected is not None, "checked by PairLoss"
        chosen = self.policy_chosen - self.ref_chosen
        rejected = self.policy_rejected - self.ref_rejected
        if per_token:
            return chosen / self.chosen_length, rejected / self.rejected_length
        return chosen, rejected

    def per_token(self) -> tuple[Tensor, Tensor]:
        """Return the mean log-prob of a token of chosen and rejected."""
        return self.policy_chosen / self.chosen_length, self.policy_rejected / self.rejected_length


@dataclass(frozen=True, slots=True)
class PreferenceOutput:
    """A loss for each row, and metrics as sums and counts (`rewards/…`: implicit rewards)."""

    loss: Tensor  # [B]
    metrics: Mapping[str, MeanAccumulator]


Formula = Callable[..., PreferenceOutput]


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A registered formula on pairs; call it like the formula."""

    name: str
    formula: Formula
    options: Options
    needs_reference: bool
    validate: Callable[..., None] | None

    def __call__(self, pairs: Pairs, **options: object) -> PreferenceOutput:
        """Compute the loss of B pairs; gradient flows into the policy's log-probs only.

        Raises ConfigError for wrong options, DataError for missing or ill-shaped inputs, and
        EngineError for a plugin's loss that is not finite.
        """
        self.check_options(options)
        clean = self._checked(pairs)
        out = self.formula(clean, **options)
        inputs = clean.policy_chosen, clean.policy_rejected
        mask = torch.ones_like(clean.policy_chosen, dtype=torch.bool)
        owner = f"preference loss {self.name!r}"
        checks.finite_loss(owner, self.formula, out.loss, *inputs, mask=mask)
        return out

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise ConfigError for options that this loss doesn't read or that are out of range."""
        self.options.require_known(options)
        merged: dict[str, Any] = {**self.options, **options}
        if "beta" in merged:
            checks.positive(beta=merged["beta"])
        if not 0 <= merged.get("label_smoothing", 0.0) < 0.5:
            raise ConfigError(
                f"label_smoothing={merged['label_smoothing']} must be at least 0 and below 0.5"
            )
        if self.validate is not None:
            self.validate(**merged)

    def _checked(self, pairs: Pairs) -> Pairs:
        if self.needs_reference and (pairs.ref_chosen is None or pairs.ref_rejected is None):
            raise DataError(
                f"preference loss {self.name!r} compares with a reference model; give ref_chosen "
                "and ref_rejected [B]"
            )
        cleaned, rows = dict[str, Tensor](), pairs.policy_chosen.shape[:1]
        for name in (field.name for field in fields(pairs)):
            if (value := getattr(pairs, name)) is None:
                continue
            if value.shape != rows:
                raise DataError(f"{name} has shape {list(value.shape)}, not {list(rows)}")
            wide = at_least_float(value)
            cleaned[name] = wide if name.startswith("policy") else wide.detach()
        for name in ("chosen_length", "rejected_length"):
            if bool((cleaned[name] < 1).any()):
                raise DataError(f"{name} has an empty response; drop that pair")
        return Pairs(**cleaned)


_registry: Registry[PairLoss] = Registry(
    "preference loss", "algorithm.preference.loss", (), "@register_pair_loss(name)"
)


def register_pair_loss(
    name: str,
    *aliases: str,
    needs_reference: bool = True,
    validate: Callable[..., None] | None = None,
) -> Callable[[Formula], PairLoss]:
    """Register `formula(pairs, *, option=default, …) -> PreferenceOutput` under `name`."""

    def decorate(formula: Formula) -> PairLoss:
        accepted = Options(f"preference loss {name!r}", formula)
        entry = PairLoss(name, formula, accepted, needs_reference, validate)
        _registry.add(name, entry, formula, aliases=aliases, options=accepted)
        return entry

    return decorate


get_pair_loss = _registry.get
names = _registry.names
options = _registry.options


def sequence_log_probs(log_probs: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of log-probs `[B]` and number of tokens `[B]` of `log_probs [B, T]`."""
    summed = masked_sum(at_least_float(log_probs), response_mask, 1)
    return summed, response_mask.bool().sum(1).to(summed.dtype)


def reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, MeanAccumulator]:
    """Accumulate implicit rewards `[B]` under TRL's names."""
    rows = chosen.new_ones(chosen.shape)
    return {
        "rewards/chosen": accumulate_mean(chosen, rows),
        "rewards/rejected": accumulate_mean(rejected, rows),
        "rewards/margins": accumulate_mean(chosen - rejected, rows),
        "rewards/accuracies": accumulate_mean((chosen > rejected).double(), rows),
    }


@register_pair_loss("sigmoid", "dpo")
def sigmoid(
    pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0, length_normalize: bool = False
) -> PreferenceOutput:
    """DPO: logistic loss on the difference of implicit rewards.

    −(1−ε)·log σ(βh) − ε·log σ(−βh), h = log-ratio of chosen − log-ratio of rejected, `[B]`.

    ε > 0 (conservative DPO): labels are wrong with that probability. `length_normalize` divides
    each log-ratio by its length.
    Source: Rafailov et al., arXiv 2305.18290, eq. 7; lengths: Tülu 3, arXiv 2411.15124.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))


@register_pair_loss("ipo")
def ipo(pairs: Pairs, *, beta: float = 0.1, length_normalize: bool = True) -> PreferenceOutput:
    """IPO: a squared loss that pulls the difference to a finite target.

    (h − 1/(2β))², `[B]`: the difference is not driven to infinity on certain preferences.

    By default h is of log-ratios a token, as its authors advise and TRL does; the paper's formula
    has whole responses (`length_normalize=False`).
    Source: Azar et al., arXiv 2310.12036, eq. 17.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    loss = (chosen - rejected - 1 / (2 * beta)).square()
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))


@register_pair_loss("hinge")
def hinge(pairs: Pairs, *, beta: float = 0.1, length_normalize: bool = False) -> PreferenceOutput:
    """Hinge loss on the difference of implicit rewards.

    max(0, 1 − βh), h as in DPO, `[B]`: pairs beyond the margin stop pulling.
    Source: SLiC-HF, arXiv 2305.10425, and RSO, arXiv 2309.06657.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    loss = (1 - beta * (chosen - rejected)).clamp(min=0)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))


@register_pair_loss("robust")
def robust(
    pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1, length_normalize: bool = False
) -> PreferenceOutput:
    """Robust DPO: unbiased under labels that are flipped with a known probability.

    (−(1−ε)·log σ(βh) + ε·log σ(−βh))/(1 − 2ε), h as in DPO, ε = `label_smoothing`, `[B]`.
    Source: Chowdhury et al., arXiv 2403.00409.
    """
    chosen, rejected = pairs.log_ratios(length_normalize)
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    loss = loss / (1 - 2 * label_smoothing)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))


@register_pair_loss("simpo", needs_reference=False, validate=checks.not_negative)
def simpo(
    pairs: Pairs, *, beta: float = 2.0, simpo_gamma: float = 0.5, label_smoothing: float = 0.0
) -> PreferenceOutput:
    """SimPO: the mean log-prob of a token as the reward, with a margin and no reference.

    −log σ(β·(log π(chosen)/len − log π(rejected)/len) − γ), `[B]`; ε as in conservative DPO.
    Source: Meng et al., arXiv 2405.14734, eq. 6.
    """
    chosen, rejected = pairs.per_token()
    logits = beta * (chosen - rejected) - simpo_gamma
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))


@register_pair_loss("orpo", needs_reference=False)
def orpo(pairs: Pairs, *, beta: float = 0.1) -> PreferenceOutput:
    """ORPO: supervised loss plus a log-odds ratio, no reference.

    −log p(chosen) − β·log σ(log odds(chosen) − log odds(rejected)), `[B]`.

    p is the geometric-mean probability of a token, odds = p/(1 − p); β is the paper's λ.
    Source: Hong et al., arXiv 2403.07691, eq. 6 to 7.
    """
    chosen, rejected = pairs.per_token()
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    preference = -logsigmoid(log_odds)
    metrics = reward_metrics(beta * chosen, beta * rejected)
    metrics |= {
        "nll_loss": accumulate_mean(-chosen, torch.ones_like(chosen)),
        "log_odds_ratio": accumulate_mean(log_odds, torch.ones_like(chosen)),
    }
    return PreferenceOutput(-chosen + beta * preference, metrics)


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − e^x) for x ≤ 0, exact at both ends; x is kept a dtype's epsilon below 0.

    Source: Mächler (2012), "Accurately computing log(1 − exp(−|a|))", eq. 7.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    # Each branch sees inputs of its own side only, so that neither makes a NaN gradient.
    small = torch.log(-torch.expm1(torch.where(near, x, torch.full_like(x, -0.5))))
    large = torch.log1p(-torch.exp(torch.where(near, torch.full_like(x, -1.0), x)))
    return torch.where(near, small, large)


def kto_reference_point(policy_kl: Tensor, ref_kl: Tensor) -> Tensor:
    """Return KTO's z₀ = max(0, mean(log π − log π_ref)) of the GLOBAL batch, without gradient.

    `policy_kl`, `ref_kl` `[B]` are log-probs of completions paired with other rows' prompts.
    """
    gap = at_least_float(policy_kl.detach()) - at_least_float(ref_kl.detach())
    return gap.mean().clamp(min=0)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceOutput:
    """KTO: each completion alone is good or bad, measured against a reference point.

    λ_D·(1 − σ(β(ρ − z₀))) for good rows, λ_U·(1 − σ(β(z₀ − ρ))) for bad ones, `[B]`.

    ρ = log π − log π_ref of whole responses `[B]`, `desirable [B]` bool, z₀ from
    `kto_reference_point`, once for the global batch.
    Source: Ethayarajh et al., arXiv 2402.01306.
    Raises ConfigError for beta ≤ 0 or negative weights, DataError for unequal shapes.
    """
    checks.positive(beta=beta)
    checks.not_negative(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    checks.same_shape(policy=policy, reference=reference, desirable=desirable)
    good = desirable.bool()
    ratio = at_least_float(policy) - at_least_float(reference.detach())
    away = torch.where(good, ratio - reference_point, reference_point - ratio)
    weight = torch.full_like(ratio, undesirable_weight).masked_fill(good, desirable_weight)
    metrics = {
        "rewards/chosen": accumulate_mean(beta * ratio, good),
        "rewards/rejected": accumulate_mean(beta * ratio, ~good),
    }
    return PreferenceOutput(weight * torch.sigmoid(-beta * away), metrics)


def bradley_terry(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | None = None,
    *,
    center_rewards_coefficient: float = 0.0,
) -> PreferenceOutput:
    """The reward model's loss: the chosen response should score higher.

    −log σ(s_chosen − s_rejected − margin) + c·(s_chosen + s_rejected)², all `[B]`.

    The second term keeps scores around 0, which the first leaves open.
    Source: Llama 2, arXiv 2307.09288, eq. 2; centring: Eisenstein et al., arXiv 2312.09244.
    Raises ConfigError for a negative coefficient, DataError for unequal shapes.
    """
    checks.not_negative(center_rewards_coefficient=center_rewards_coefficient)
    margins = {} if margin is None else {"margin": margin}
    checks.same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores, **margins)
    chosen, rejected = at_least_float(chosen_scores), at_least_float(rejected_scores)
    gap = chosen - rejected
    if margin is not None:
        gap = gap - at_least_float(margin.detach())
    loss = -logsigmoid(gap) + center_rewards_coefficient * (chosen + rejected).square()
    return PreferenceOutput(loss, reward_metrics(chosen, rejected))


@register_pair_loss("likelihood", needs_reference=False, validate=checks.not_negative)
def likelihood(
    pairs: Pairs, *, beta: float = 1.0, sft_weight: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceOutput:
    """A language model as a reward model: its log-prob of a response is the score.

    −log σ(β·(log π(chosen) − log π(rejected))) − w·log π(chosen)/len, `[B]`; ε as in DPO.

    Bradley-Terry's loss with log-probs as scores, and the language model's loss of the chosen
    response beside it, which keeps what the model knows.
    Source: of the second term, Yang et al. (GRM), arXiv 2406.10216, eq. 8.
    """
    chosen, rejected = pairs.policy_chosen, pairs.policy_rejected
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    loss = loss - sft_weight * pairs.per_token()[0]
    return PreferenceOutput(loss, reward_metrics(beta * chosen, beta * rejected))
