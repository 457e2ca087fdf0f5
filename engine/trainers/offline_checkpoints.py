"""The checkpoints of training on rows: what they hold, and what a run resumes from.

A single rank's state is the controller's own; of several, each writes its part. Either resumes from
the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.checkpoint import Checkpoint, CheckpointStore, Saver
from engine.checkpoint.dcp_metadata import BOXES
from engine.checkpoint.rank_state import RankState
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.checkpoint.state_dict import StateDict
from engine.config import OfflineConfig
from engine.errors import CheckpointError
from engine.trainers.run_settings import changed_settings, flat
from engine.workers.sft import OfflineWorker

log = logging.getLogger(__name__)

OnResume = Callable[[str, int], None]  # the checkpoint's address, its step
# Read again at every start and part of no saved state.
MAY_CHANGE = ("optim", "max_tokens_per_micro_batch")
# How long, where and how a run is done: not recorded.
MAY_DIFFER = {
    "skip",
    "reference_cache",
    "save_freq",
    "max_checkpoints_to_keep",
    "max_attempts",
    "on_damaged_checkpoints",
    "preemption_grace_s",
    "threads",
    "parallel",
    "placement",
    "pools",
    "start_timeout_s",
    "step_timeout_s",
}


def recorded(config: OfflineConfig) -> dict[str, object]:
    """The settings of a section that a checkpoint records, by dotted name, e.g. "sft.packing"."""
    return flat({config.section: config.model_dump(mode="json", exclude=MAY_DIFFER)})


@dataclass(frozen=True, slots=True)
class OfflineCheckpoints:
    """Where the state of one `fit` is saved."""

    worker: OfflineWorker | None  # in this process; None: the saver's groups have the state
    saver: Saver | None  # None: nothing is saved
    section: str  # of the settings, e.g. "sft"
    settings: dict[str, object]  # that a checkpoint records
    defaults: dict[str, object]  # of those that come from a configuration
    on_resume: OnResume
    changed_settings: list[StateDict] = field(default_factory=list)  # when it was resumed

    def resume(self, elsewhere: CheckpointStore | None) -> tuple[int, dict[str, float]]:
        """Load the newest checkpoint, own or `elsewhere`; return its step and metrics (0, {})."""
        if self.saver is None:
            return 0, {}
        found, own = self.saver.store.latest(), True
        if found is None and elsewhere is not None:
            found, own = elsewhere.latest(), False
        if found is None:
            return 0, {}
        metrics = self._load(self.saver, found)
        self.on_resume(found.folder, found.step)
        if not own:
            self.save(found.step, metrics)  # where this attempt's successor looks
        return found.step, metrics

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Begin to write a checkpoint; a failure is logged, and training continues."""
        if self.saver is None:
            return
        state: StateDict = {
            "settings": self.settings,
            "changed_settings": self.changed_settings,
            "metrics": metrics,
            "process_rng": process_rng(),
        }
        if self.worker is not None:
            state |= self.worker.state_dict()
        try:
            self.saver.save(step, state)
        except CheckpointError as error:
            log.warning("no checkpoint at step %d: %s; training continues", step, error)

    def _load(self, saver: Saver, checkpoint: Checkpoint) -> dict[str, float]:
        state = checkpoint.state
        may_change = [f"{self.section}.{name}" for name in MAY_CHANGE]
        changed = changed_settings(checkpoint, self.settings, may_change, self.defaults)
        if self.worker is None:
            saver.restore(checkpoint)
        elif BOXES in state:
            own = RankState.of(state)
            try:
                self.worker.load_sharded_state(own, [own])
            except CheckpointError as error:
                raise CheckpointError(f"{checkpoint.folder}: {error}") from error
            set_process_rng(state["process_rng"])
        else:
            self.worker.load_state(checkpoint.folder)
        self.changed_settings[:] = changed
        return dict(state["metrics"])
