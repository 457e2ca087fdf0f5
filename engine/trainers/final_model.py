"""Which step's policy an RL run hands over: the best by validation, or the last.

The best step is saved when it is found, and its checkpoint is kept until there is a better one
(`engine.checkpoint.retention`), so that a run that was stopped and resumed hands over the same. Its
weights never go back into the trainer: `export` makes a model folder of the checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.errors import CheckpointError
from engine.trainers.resume import SCORE

log = logging.getLogger(__name__)

Rule = Literal["best", "last"]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class FinalModel:
    """The step whose policy a run hands over."""

    step: int
    last: int  # step of the run
    score: float | None  # mean reward on the validation rows; None: not validated at that step
    rule: Rule
    checkpoint: str = ""  # that has the policy; empty: the trainer itself does

    def __str__(self) -> str:
        """E.g. `step 40 of 80, the best by validation (0.812)`."""
        shown = "" if self.score is None else f" ({self.score:.3f})"
        why = "the best by validation" if self.rule == "best" and shown else "the last"
        return f"step {self.step} of {self.last}, {why}{shown}"

    def metrics(self) -> Metrics:
        """As metrics of the run, e.g. {"final/step": 40.0, "final/last_step": 80.0, …}."""
        score = {} if self.score is None else {"final/validation_reward": self.score}
        return {"final/step": float(self.step), "final/last_step": float(self.last), **score}


def is_new_best(history: Sequence[Metrics]) -> bool:
    """Whether the last of the steps has the highest validation reward so far, or equals it."""
    ranked = _ranked(history)
    return bool(ranked) and ranked[0] is history[-1]


def choose_final_model(
    rule: Rule, history: Sequence[Metrics], store: CheckpointStore
) -> FinalModel:
    """The step to hand over, from a finished run's history (a row a step, at least one).

    `best` is the highest validation reward, the later one of equals; without validation it is the
    last step. Where a better step's checkpoint is gone, a warning says so and the next one counts.
    """
    last = history[-1]
    end = int(last["step"])
    for place, row in enumerate(_ranked(history) if rule == "best" else ()):
        step = int(row["step"])
        checkpoint = None if row is last else store.newest_of(step)
        if row is not last and checkpoint is None:
            continue
        if place:
            log.warning(
                "step %d is handed over: of %d steps with a better validation reward there is no "
                "checkpoint (a save failed, or the folder was changed)",
                step,
                place,
            )
        address = "" if checkpoint is None else checkpoint.folder
        return FinalModel(step, end, row[SCORE], "best", address)
    return FinalModel(end, end, last.get(SCORE), rule)


def carry_best(saver: Saver, history: Sequence[Metrics], resumed: Checkpoint) -> None:
    """Copy the best step's checkpoint from the folder that a run resumed from into its own.

    Does nothing where the run resumed from the best step itself. A failure is logged: the run then
    hands over the best step of those whose checkpoints it has.
    """
    ranked = _ranked(history)
    if not ranked or ranked[0] is history[-1]:
        return
    try:
        source = CheckpointStore(resumed.folder.rpartition("/")[0])
        best = source.newest_of(int(ranked[0]["step"]))
        if best is not None:
            saver.wait()  # its commit removes folders that it doesn't know
            saver.store.adopt(best)
    except CheckpointError as error:
        log.warning("the best step so far, %d, may be lost: %s", int(ranked[0]["step"]), error)


def _ranked(history: Sequence[Metrics]) -> list[Metrics]:
    """The validated steps, best first, the later one of equals before the other."""
    measured = [row for row in history if math.isfinite(row.get(SCORE, math.nan))]
    return sorted(measured, key=lambda row: (row[SCORE], row["step"]), reverse=True)
