"""Policy losses: from log-probs and advantages to a loss for every token.

One file an entry; a new file here that calls `@register_policy_loss` is found by itself. Code
outside this package registers the same way, before the name is looked up.
"""

from engine.algorithms.losses._base import (
    LossOutput,
    PolicyLoss,
    aggregation_mode,
    get_policy_loss,
    names,
    options,
    prepare,
    register_policy_loss,
)
from engine.algorithms.losses._ratio import log_ratio

__all__ = [
    "LossOutput",
    "PolicyLoss",
    "aggregation_mode",
    "get_policy_loss",
    "log_ratio",
    "names",
    "options",
    "prepare",
    "register_policy_loss",
]
