"""Dynamic loss scaling: small float16 gradients must not vanish (arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

GROWTH_INTERVAL = 2000  # updates without an overflow until the scale doubles, as torch's GradScaler
LARGEST = 2.0**24


class LossScale:
    """The factor that a loss is multiplied with, and its gradients divided by.

    It halves where gradients overflow, which skips the update, and doubles after
    `GROWTH_INTERVAL` updates in a row.
    """

    def __init__(self, value: float = 2.0**16) -> None:
        self.value, self.updates = value, 0

    def grow(self) -> None:
        """An update was taken."""
        self.updates += 1
        if self.updates >= GROWTH_INTERVAL:
            self.value, self.updates = min(2 * self.value, LARGEST), 0

    def back_off(self) -> bool:
        """Gradients were not finite: halve; False at 1, where it isn't the scale's fault."""
        if self.value <= 1.0:
            return False
        self.value, self.updates = self.value / 2, 0
        return True

    def state_dict(self) -> dict[str, float]:
        """The scale, and the updates since it changed."""
        return {"value": self.value, "updates": float(self.updates)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict`."""
        self.value, self.updates = float(state["value"]), int(state["updates"])


def update_metrics(norms: Sequence[float], scale: LossScale | None) -> dict[str, float]:
    """`grad_norm`, the mean over updates; with a scale `loss_scale` and `skipped_updates`."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    metrics = {"grad_norm": sum(finite) / len(finite)} if finite else {}
    if scale is not None:
        skipped = float(len(norms) - len(finite))
        metrics |= {"loss_scale": scale.value, "skipped_updates": skipped}
    return metrics
