"""Checkpoints of the warm start: one process, a model and its optimizer.

When to save is the trainer's matter; what files are written is `engine.checkpoint`'s.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.checkpoint import Checkpoint, CheckpointStore, Saver, find_latest
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.checkpoint.state_dict import StateDict
from engine.errors import CheckpointError
from engine.models import has_adapters
from engine.parallel.gather import named_tensors
from engine.runtime.optimizer import Optimizer

log = logging.getLogger(__name__)


class Saves:
    """What a run under `folder` saves, and resumes from; without a folder, nothing."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        settings: str,
        folder: str | Path | None,
        keep_last: int = 2,
    ) -> None:
        """`settings` is what a resumed run must have in common with the one that saved."""
        self._model, self._optimizer = model, optimizer
        self._settings = hashlib.sha256(settings.encode()).hexdigest()
        store = None if folder is None else CheckpointStore(folder, keep_last=keep_last)
        self.saver = None if store is None else Saver(store, {})

    def resume(self, elsewhere: str | Path | None) -> tuple[int, dict[str, float]]:
        """Go on from the newest checkpoint, here or `elsewhere`; its step and metrics (0, none)."""
        if self.saver is None:
            return 0, {}
        found = self.saver.store.latest()
        moved = found is None and elsewhere is not None
        if moved and elsewhere is not None:
            found = find_latest(elsewhere)
        if found is None:
            return 0, {}
        metrics = self._restore(found)
        log.info("resumed from %s, step %d", found.folder, found.step)
        if moved:
            self.save(found.step, metrics)  # where this attempt's own successor looks
        return found.step, metrics

    def save(self, step: int, metrics: dict[str, float]) -> None:
        """Begin to write a checkpoint; a failure is logged, and training continues."""
        if self.saver is None:
            return
        state: StateDict = {
            "settings": self._settings,
            "metrics": metrics,
            "model": self._tensors(),
            "optimizer": self._optimizer.state_dict(),
            "rng": process_rng(),
        }
        try:
            self.saver.save(step, state)
        except CheckpointError as error:
            log.warning("no checkpoint at step %d: %s; training goes on", step, error)

    def _restore(self, checkpoint: Checkpoint) -> dict[str, float]:
        state, own = checkpoint.state, self._tensors()
        if state.get("settings") != self._settings:
            raise CheckpointError(
                f"{checkpoint.folder} was written under other settings, data or start weights; "
                "resume with its own, or give another checkpoint folder"
            )
        saved: dict[str, Tensor] = state["model"]
        for name in sorted(own.keys() | saved.keys()):
            here, there = own.get(name), saved.get(name)
            if here is None or there is None or here.shape != there.shape:
                raise CheckpointError(
                    f"{checkpoint.folder} is of another model: {name!r} differs; resume with the "
                    "model that was saved, or give another checkpoint folder"
                )
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        set_process_rng(state["rng"])
        return dict(state["metrics"])

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors that training changes."""
        adapters = has_adapters(self._model)
        return {
            name: tensor
            for name, tensor in named_tensors(self._model).items()
            if tensor.requires_grad or not adapters
        }
