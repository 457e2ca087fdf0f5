"""NaN out of a user's loss or its gradient names the loss; the engine's own are not checked."""

from __future__ import annotations

import pytest
import torch
from once import OwnEntries

from engine.algorithms import policy_losses as losses
from engine.algorithms import preference_losses as preference
from engine.algorithms.policy_losses import (
    LossOutput,
    PolicyLoss,
    get_policy_loss,
    register_policy_loss,
)
from engine.algorithms.preference_losses import Pairs, PreferenceOutput, register_pair_loss
from engine.errors import EngineError

MASK = torch.tensor([[1, 1, 0]])


@pytest.fixture(autouse=True)
def registries(own_entries: OwnEntries) -> None:
    for registry in (losses._registry, preference._registry):
        own_entries(registry)


def loss_of(power: float) -> PolicyLoss:
    @register_policy_loss("mine")
    def mine(log_probs, old_log_probs, advantages, mask):  # type: ignore[no-untyped-def]
        outside = torch.where(mask, 0.0, float("nan"))
        return LossOutput((log_probs - old_log_probs) ** power + outside)

    return mine


def test_a_loss_that_is_not_finite_names_its_plugin() -> None:
    old = torch.zeros(1, 3)
    new = torch.tensor([[0.0, -1.0, 5.0]], requires_grad=True)
    with pytest.raises(EngineError, match=r"policy loss 'mine' \(\w+:loss_of.* has a loss that is"):
        loss_of(0.5)(new, old, old, MASK)
    loss_of(2.0)(new, old, old, MASK).loss.sum().backward()
    assert new.grad is not None


def test_a_gradient_that_is_not_finite_names_its_plugin() -> None:
    old, new = torch.zeros(1, 3), torch.zeros(1, 3, requires_grad=True)
    loss = loss_of(0.5)(new, old, old, MASK).loss.sum()
    with pytest.raises(EngineError, match=r"policy loss 'mine' .* has a gradient that is not"):
        loss.backward()


def test_what_was_not_finite_before_is_not_its_fault() -> None:
    old = torch.full((1, 3), float("nan"))
    loss_of(2.0)(torch.zeros(1, 3), old, old, MASK)
    get_policy_loss("vanilla")(torch.zeros(1, 3), old, old, MASK)
    new = torch.ones(1, 3, requires_grad=True)
    whole = loss_of(2.0)(new, torch.zeros(1, 3), torch.zeros(1, 3), MASK).loss.sum()
    (whole * float("inf")).backward()


def test_a_preference_loss_that_is_not_finite_names_its_plugin() -> None:
    @register_pair_loss("my_pairs", needs_reference=False)
    def my_pairs(pairs: Pairs) -> PreferenceOutput:
        return PreferenceOutput((pairs.policy_chosen - pairs.policy_rejected).log(), {})

    one = torch.ones(2)
    my_pairs(Pairs(one, one - 1, one, one))
    with pytest.raises(EngineError, match=r"preference loss 'my_pairs' .* has a loss that is not"):
        my_pairs(Pairs(one, one + 1, one, one))
