"""What an advantage estimator is given and gives, and the registry of them.

What lives here: the input and output tables, the wrapper that checks and cleans inputs, lookup.
What does not: any formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.masked import Groups, at_least_float, mask_out, sequence_scores
from engine.algorithms.turns import Turns
from engine.errors import ConfigError, DataError
from engine.registry import Options, Registry

REQUIREMENTS: dict[str, str] = {
    "values": "a critic that gives values [B, T]",
    "reward_components": "a reward that returns named components [B, K]",
    "baseline_rewards": "one greedy rollout a prompt, whose reward is the baseline [B]",
    "old_log_probs": "the policy's log-probs before the update [B, T]",
    "sum_pi_squared": "the sum of squared probabilities of each next-token distribution [B, T]",
}
"""Fields beyond rewards, mask and groups that entries may require, and where each comes from."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Everything an estimator may read; the optional fields only where it requires them."""

    token_level_rewards: Tensor
    """`[B, T]` float."""
    response_mask: Tensor
    """`[B, T]`, non-zero on tokens the policy sampled."""
    group_ids: Tensor
    """`[B]` integer; rows with one id are completions of one prompt."""
    values: Tensor | None = None
    """`[B, T]` critic's value of the state before each token."""
    reward_components: Tensor | None = None
    """`[B, K]`, or `[B, T, K]` (summed over the mask), one column a component."""
    baseline_rewards: Tensor | None = None
    """`[B]` reward of the greedy completion of the row's prompt (ReMax)."""
    old_log_probs: Tensor | None = None
    """`[B, T]` log-probs of the policy before the update."""
    sum_pi_squared: Tensor | None = None
    """`[B, T]` Σ_v π(v)² of the distribution each token was sampled from."""
    rollout_is_weights: Tensor | None = None
    """`[B, T]` importance weights of rollout correction, where it is on."""
    episode_ids: Tensor | None = None
    """`[B]` integer; rows with one id go on from each other, as one completion; None: none do."""
    first_turn: Tensor | None = None
    """`[B]` integer: number, within the episode, of a row's first turn; None: 0."""

    @property
    def scores(self) -> Tensor:
        """S `[B]`: each completion's rewards, summed over the mask; in all rows of an episode."""
        own = sequence_scores(self.token_level_rewards, self.response_mask)
        if self.episode_ids is None:
            return own
        episode = torch.unique(self.episode_ids, return_inverse=True)[1]
        return torch.zeros_like(own).index_add(0, episode, own)[episode]

    @property
    def groups(self) -> Groups:
        """Groups of the rows that have at least one token inside the mask; one of an episode's."""
        rows = self.response_mask.bool().any(1)
        if self.episode_ids is not None:
            rows = rows & (_order_within(self.episode_ids, rows) == 0)
        return Groups.of(self.group_ids, rows)

    @property
    def turns(self) -> Turns:
        """The turns of the responses."""
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

    advantages: Tensor
    """`[B, T]`."""
    returns: Tensor
    """`[B, T]` value targets where there is a critic; else what the advantage was made from."""


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
    "advantage estimator",
    "algorithm.adv_estimator",
    "engine.algorithms.advantages",
    "@register_advantage(name)",
)


def register_advantage(
    name: str,
    *aliases: str,
    requires: tuple[str, ...] = (),
    min_group_size: int = 1,
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
        own = Options(f"advantage estimator {name!r}", formula)
        entry = AdvantageEstimator(name, formula, frozenset(requires), min_group_size, own)
        _registry.add(name, entry, formula, aliases=aliases, options=own)
        return entry

    return decorate


get_advantage = _registry.get
names = _registry.names
options = _registry.options


def requires(name: str) -> frozenset[str]:
    """Fields of AdvantageInputs that the trainer must fill for `name`."""
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


def _order_within(ids: Tensor, rows: Tensor) -> Tensor:
    """For each of `rows` `[B]` (bool), how many rows of the same id `[B]` are before it."""
    same = (ids[:, None] == ids) & rows
    return same.tril(-1).sum(1)


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
    read = entry.requires | {"token_level_rewards", "rollout_is_weights"}
    cleaned: dict[str, Any] = {
        name: None if value is None else _clean_field(name, value, mask)
        for name in (item.name for item in fields(inputs))
        if name not in ("response_mask", "group_ids", "episode_ids", "first_turn")
        for value in [getattr(inputs, name) if name in read else None]
    }
    return replace(inputs, **cleaned)


def _clean_field(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """A float tensor that is 0 outside the mask and finite inside; raise DataError otherwise."""
    by_token = name not in ("baseline_rewards", "reward_components") or value.dim() == 3
    inside = mask.bool() if by_token else mask.bool().any(1)
    if value.shape[: inside.dim()] != inside.shape:
        raise DataError(
            f"{name} has shape {list(value.shape)} but response_mask {list(mask.shape)}"
        )
    while inside.dim() < value.dim():
        inside = inside[..., None]
    kept = mask_out(inside, at_least_float(value.detach()))
    broken = ~kept.isfinite()
    if bool(broken.any()):
        row = int(broken.nonzero()[0, 0])
        raise DataError(
            f"{name} is NaN or infinite inside the mask, first in row {row}; "
            "drop that row or repair what computed it"
        )
    return kept
