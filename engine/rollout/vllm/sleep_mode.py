"""Which memory of a rollout engine is allocated: a pure state machine over sleep and wake calls.

On a device shared with a trainer, weights and KV cache must not be allocated while the trainer's
memory is at its peak, so calls have one order:

    serving --sleep--> asleep --wake_weights--> weights --(update)--> weights --wake_kv--> serving

"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import RolloutError

Phase = Literal["serving", "asleep", "weights"]

_WAY_OUT = {
    "serving": "call sleep first",
    "asleep": "call wake_weights first",
    "weights": "call wake_kv first",
}


@dataclass(frozen=True, slots=True)
class SleepMode:
    """Immutable: each call returns the state after it, or raises RolloutError."""

    phase: Phase = "serving"
    discarded: bool = False  # whether sleep discarded the weights: an update must load new ones

    def sleep(self, level: int) -> SleepMode:
        """Free the KV cache and the weights: to host memory (level 1) or for good (level 2)."""
        if level not in (1, 2):
            raise RolloutError(
                f"sleep(level={level}) is unknown; use 1 (weights go to host memory) or 2 (weights "
                "are discarded)"
            )
        self._require("sleep", "serving")
        return SleepMode("asleep", discarded=level == 2)

    def wake_weights(self) -> SleepMode:
        """Make room for the weights again, and bring them back after level 1."""
        self._require("wake_weights", "asleep")
        return replace(self, phase="weights")

    def update(self) -> SleepMode:
        """Take new weights."""
        if self.phase == "asleep":
            raise RolloutError("update of weights while asleep: call wake_weights first")
        return replace(self, discarded=False)

    def wake_kv(self) -> SleepMode:
        """Make room for the KV cache; then the engine serves."""
        self._require("wake_kv", "weights")
        if self.discarded:
            raise RolloutError(
                "wake_kv before new weights: sleep(level=2) discarded the old ones; call "
                "update_weights first"
            )
        return SleepMode("serving")

    def generate(self) -> SleepMode:
        """Decode."""
        self._require("generate", "serving")
        return self

    @property
    def arriving(self) -> str:
        """What vLLM does to come to this state, for messages."""
        moves = {"serving": "waking its KV cache", "asleep": "going to sleep"}
        return moves.get(self.phase, "waking its weights")

    def _require(self, call: str, phase: Phase) -> None:
        if self.phase != phase:
            raise RolloutError(f"{call} while {self._text()}: {_WAY_OUT[self.phase]}")

    def _text(self) -> str:
        names = {"serving": "serving", "asleep": "asleep", "weights": "only weights are awake"}
        return names[self.phase]
