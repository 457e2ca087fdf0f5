"""The policy's weights for rollout processes: full weights and a delta, published per version.

Both stay in the object store and only the one a process needs is transferred: the delta if it has
the version before, the full weights if it missed a version or has just started. Works while the
trainer is busy. Workers compute, check and apply deltas (`engine.weight_transfer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.batch import Batch
from engine.futures import Future

if TYPE_CHECKING:
    from engine.controller.roles import ActorGroup


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """One version of the weights."""

    version: int
    full: Future[Batch]
    delta: Future[Batch] | None = None  # against version `base`
    base: int = -1

    def update_from(self, version: int) -> Future[Batch]:
        """The update for a process with weights of `version` (-1: none)."""
        return self.delta if self.delta is not None and version == self.base else self.full


class WeightPublisher:
    """Publishes an actor's weights, with `deltas` also as a delta against the version before."""

    def __init__(self, actor: ActorGroup, *, deltas: bool) -> None:
        self._actor, self._deltas = actor, deltas
        self._base: int | None = None

    def publish(self, version: int) -> PublishedWeights:
        """Publish the actor's current weights as `version`."""
        base, self._base = self._base, version
        full = self._actor.weights()
        if base is None or not self._deltas:
            return PublishedWeights(version, full)
        return PublishedWeights(version, full, self._actor.weights_delta(), base)
