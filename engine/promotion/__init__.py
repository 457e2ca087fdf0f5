"""Which model is the champion: rules, evidence, and moves of the alias that can't cross.

`rules` decides on evidence alone; `evidence` measures it from rows and `contamination` from texts;
`checks` refuses what was tampered with. `lock` lets one process at a time move a model's alias,
`history` is the record of such moves, and `champions` makes them. `__main__` is the command.
"""

from engine.promotion.champions import Champions
from engine.promotion.history import Move
from engine.promotion.rules import Decision, Evidence, Outcome, decide

__all__ = ["Champions", "Decision", "Evidence", "Move", "Outcome", "decide"]
