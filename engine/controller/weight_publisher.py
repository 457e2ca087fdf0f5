"""The policy's weights as rollout processes get them: published once a version, taken as fits each.

The whole weights and the delta against the version before stay in the object store; of the two only
what is taken is moved. So whoever has missed a version, or starts anew, finds the whole there while
the trainer is busy. What a delta is, and how it is checked, is the workers' matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.controller.groups import WorkerGroup
from engine.futures import Future


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the weights."""

    version: int
    whole: Future
    delta: Future | None = None  # onto version `base`
    base: int = -1

    def since(self, version: int) -> Future:
        """What a process with weights of `version` needs (-1: none)."""
        return self.delta if self.delta is not None and version == self.base else self.whole


class Publisher:
    """Publishes an actor's weights; the first time whole, then with a delta where `deltas`."""

    def __init__(self, actor: WorkerGroup, *, deltas: bool) -> None:
        self._actor, self._deltas = actor, deltas
        self._base: int | None = None

    def publish(self, version: int) -> Published:
        """The weights that the actor has now, as `version`."""
        base, self._base = self._base, version
        whole = self._actor.weights()
        if base is None or not self._deltas:
            return Published(version, whole)
        return Published(version, whole, self._actor.weights_delta(), base)
