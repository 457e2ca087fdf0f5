"""Advantage estimators: from rewards to `advantages [B, T]` and `returns [B, T]`.

One file an entry; a new file here that calls `@register_advantage` is found by itself. Code
outside this package registers the same way, before the name is looked up.
"""

from engine.algorithms.advantages._base import (
    REQUIREMENTS,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageOutputs,
    check_group_size,
    get_advantage,
    names,
    options,
    register_advantage,
    requires,
    to_tokens,
)

__all__ = [
    "REQUIREMENTS",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageOutputs",
    "check_group_size",
    "get_advantage",
    "names",
    "options",
    "register_advantage",
    "requires",
    "to_tokens",
]
