"""Which model is the champion: rules, measurements, and moves of the alias under a lock.

`gate` judges a version against the champion and moves the alias; the stages say how to judge.
`rules` decides on measurements alone; `measurements` takes them from rows and `contamination` from
texts; `checks` refuses what was tampered with. `lock` lets one process at a time move a model's
alias, `history` is the record of such moves, and `champions` makes them. `__main__` is the command.
"""

from engine.promotion.champions import AliasMove, Champions
from engine.promotion.rules import Decision, Measurements, RuleOutcome, decide, decide_on_sets

__all__ = [
    "AliasMove",
    "Champions",
    "Decision",
    "Measurements",
    "RuleOutcome",
    "decide",
    "decide_on_sets",
]
