"""What a policy loss is given and gives, and the registry of them.

What lives here: the wrapper that checks and cleans inputs and multiplies importance weights in;
lookup. What does not: any formula, and any reduction to one number (`algorithms.aggregation`).

A loss is a function of its own row only. What needs a view of the whole batch (a covariance, a
rank) is computed once over the global batch by `prepare`, as a `[B, T]` tensor that is cut into
micro-batches with the rest. Therefore every cut of a batch adds up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.aggregation import check_mode
from engine.algorithms.masked import at_least_float, mask_out, masked_mean
from engine.algorithms.metrics import MeanAccumulator, accumulate_mean
from engine.algorithms.plugin_loss import require_finite_loss
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry, keyword_defaults


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss for every token and metrics as sums and counts."""

    loss: Tensor
    """`[B, T]`, 0 outside the mask."""
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
    default_mode: str
    """The aggregation that the method was published with."""
    fixed: bool
    """Whether another aggregation would make it another method."""
    regularized: bool
    """Whether it has a gradient where advantages are 0."""
    sequence_weights: bool
    """Whether importance weights enter as one geometric mean a completion."""
    prepare: Prepare | None
    """Computes `prepared` tensors over the global batch; None: nothing to prepare."""
    prepared: tuple[str, ...]
    validate: Callable[..., None] | None
    """Raises ConfigError for options that contradict each other."""

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
        """Loss of one micro-batch. All tensors `[B, T]`; gradient flows into `log_probs` only.

        Options include the tensors that `prepare` made. Entries outside the mask may be NaN.
        Raises ConfigError for unknown or contradictory options, DataError for unequal shapes, and
        EngineError for a plugin's loss that is not finite.
        """
        tensors = {k: v for k, v in options.items() if k in self.prepared}
        self.check_options({k: v for k, v in options.items() if k not in self.prepared})
        mask = response_mask.bool()
        given = {
            "log_probs": log_probs,
            "old_log_probs": old_log_probs.detach(),
            "advantages": advantages.detach(),
        }
        extra = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
        self._check_tensors(given | tensors | extra, mask)
        clean = {name: mask_out(mask, at_least_float(tensor)) for name, tensor in given.items()}
        read = keyword_defaults(self.formula)
        own = {k: v for k, v in options.items() if k in read or k in tensors}
        out = self.formula(*clean.values(), mask, **own)
        loss = out.loss
        owner = f"policy loss {self.name!r}"
        require_finite_loss(owner, self.formula, loss, *clean.values(), mask=mask)
        if rollout_is_weights is not None:
            loss = loss * self._weights(rollout_is_weights.detach().to(loss.dtype), mask)
        kl = accumulate_mean(clean["old_log_probs"] - clean["log_probs"], mask)
        return LossOutput(mask_out(mask, loss), {"ppo_kl": kl, **out.metrics})

    def check_options(self, options: Mapping[str, object]) -> None:
        """Raise ConfigError for options that this loss doesn't read or that contradict."""
        self.options.require_known(options)
        if self.validate is not None:
            self.validate(**(dict(self.options) | dict(options)))

    def _check_tensors(self, tensors: Mapping[str, Tensor], mask: Tensor) -> None:
        for name in self.prepared:
            if name not in tensors:
                raise DataError(
                    f"policy loss {self.name!r} needs {name} [B, T]; call losses.prepare over "
                    "the global batch and cut its tensors into micro-batches with the rest"
                )
        for name, tensor in tensors.items():
            if tensor.shape != mask.shape:
                raise DataError(
                    f"{name} has shape {list(tensor.shape)} but response_mask {list(mask.shape)}"
                )

    def _weights(self, weights: Tensor, mask: Tensor) -> Tensor:
        if not self.sequence_weights:
            return mask_out(mask, weights)
        # A floor in the logarithm, so that one masked-out token doesn't erase its completion.
        logs = mask_out(mask, weights).clamp(min=1e-10).log()
        return masked_mean(logs, mask, 1).exp()[:, None].expand(mask.shape)


_registry: Registry[PolicyLoss] = Registry(
    "policy loss",
    "actor.policy_loss.loss_mode",
    "engine.algorithms.losses",
    "@register_policy_loss(name)",
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
    generator, *, option=default, …)` returns the `[B, T]` tensors named in `prepared`. The fields
    of PolicyLoss say what the other arguments mean.
    """
    check_mode(default_mode)

    def decorate(formula: Formula) -> PolicyLoss:
        functions = (formula, prepare) if prepare else (formula,)
        own = Options(f"policy loss {name!r}", *functions)
        entry = PolicyLoss(
            name=name,
            formula=formula,
            options=own,
            default_mode=default_mode,
            fixed=fixed,
            regularized=regularized,
            sequence_weights=sequence_weights,
            prepare=prepare,
            prepared=prepared,
            validate=validate,
        )
        _registry.add(name, entry, formula, aliases=aliases, options=own)
        return entry

    return decorate


get_policy_loss = _registry.get
names = _registry.names
options = _registry.options


def aggregation_mode(name: str, requested: str | None = None) -> str:
    """The mode to aggregate the loss `name` with: as requested, else as published.

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
    """Tensors `[B, T]` that the loss `name` needs from a view of the GLOBAL batch; often none.

    Call it once before the update, with the same options as the loss, and cut the tensors into
    micro-batches with the other fields. `generator` draws where a method draws at random.
    Raises ConfigError for wrong options.
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
