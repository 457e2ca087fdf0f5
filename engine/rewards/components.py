"""Named components of a reward: their weights. What they are is the reward's own business."""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.errors import ConfigError


def ordered_weights(
    reward: str, components: tuple[str, ...], weights: Mapping[str, float]
) -> list[float]:
    """Return a weight for each component in order, 1.0 where `weights` has none.

    Without components it is [1.0], for a plain list's only column. `reward` is named in errors.
    Raises ConfigError for a weight of a component that the reward does not have, and for one that
    is not finite.

    >>> ordered_weights("answer_and_format", ("answer", "format"), {"format": 0.1})
    [1.0, 0.1]
    """
    unknown = sorted(set(weights) - set(components))
    if unknown and not components:
        raise ConfigError(
            f"reward.weights names {unknown}, but reward {reward!r} has no named components; "
            "remove reward.weights, or choose a reward that returns components"
        )
    if unknown:
        raise ConfigError(
            f"reward.weights names {unknown}, which reward {reward!r} does not have; "
            f"its components are {list(components)}"
        )
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ConfigError(f"reward.weights.{name}={weight} must be a finite number")
    return [float(weights.get(name, 1.0)) for name in components] or [1.0]
