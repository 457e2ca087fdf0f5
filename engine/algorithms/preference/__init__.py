"""Preference losses: DPO and its relatives on pairs, KTO on single rows, reward-model loss.

Pair losses are registered, one file an entry, and found by themselves. `kto` and `bradley_terry`
take other inputs and are plain functions. All give a loss a row `[B]`; divide its sum by the
number of rows of the GLOBAL batch.
"""

from engine.algorithms.preference._base import (
    PairLoss,
    Pairs,
    PreferenceOutput,
    get_pair_loss,
    names,
    options,
    register_pair_loss,
    sequence_log_probs,
)
from engine.algorithms.preference.bradley_terry import bradley_terry
from engine.algorithms.preference.kto import kto, kto_reference_point

__all__ = [
    "PairLoss",
    "Pairs",
    "PreferenceOutput",
    "bradley_terry",
    "get_pair_loss",
    "kto",
    "kto_reference_point",
    "names",
    "options",
    "register_pair_loss",
    "sequence_log_probs",
]
