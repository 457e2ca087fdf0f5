"""Rollout workers that note which weights they have, and to whom deltas come damaged.

Ray's workers import this module.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from engine.batch import Batch
from engine.weight_transfer import BroadcastRound, WeightSender
from engine.workers.role import Dispatch, WorkerContext, dispatch
from engine.workers.rollout_worker import RolloutWorker, StreamRolloutWorker

FAULTS = ("flip", "stale", "exit")


def digest_of(model: Any) -> str:
    """A digest of a policy's weights."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sent = WeightSender(deltas=True).send(parameters.items(), 0)
    return bytes(sent["digest"][0].tolist()).hex()


class Notes:
    """A file that each worker adds its loads to; survives the worker's process."""

    def __init__(self, folder: str, role: str) -> None:
        self._file, self._once = Path(folder) / f"{role}.jsonl", Path(folder) / f"{role}.fault"

    def first(self) -> bool:
        """Whether nobody has asked before."""
        try:
            self._once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def add(self, **facts: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(facts) + "\n")


class _Noting:
    """Notes every load; one fault happens to the first delta."""

    def __init__(
        self, context: WorkerContext, *, notes: str, faults: dict[str, str], **options: Any
    ) -> None:
        super().__init__(context, **options)
        self.notes, self.fault = Notes(notes, context.role), faults.get(context.role, "")  # type: ignore[call-arg]

    def noted(self, load: Any, sent: Batch) -> int:
        kind = "whole" if "weights" in sent else "delta"
        if kind == "delta" and self.fault and self.notes.first():
            sent = self.broken(sent)
            kind = self.fault
        try:
            version: int = load(sent)
        except BaseException as error:
            self.notes.add(kind=kind, version=None, error=str(error), pid=os.getpid())
            raise
        model = self.context.process.policy.module  # type: ignore[attr-defined]
        self.notes.add(kind=kind, version=version, digest=digest_of(model), pid=os.getpid())
        return version

    def broken(self, sent: Batch) -> Batch:
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "stale":  # what it is put on is not what the actor put it on
            parameter = next(self.context.process.policy.module.parameters())  # type: ignore[attr-defined]
            parameter.data.view(-1)[0] += 1.0
            return sent
        changed = sent["delta"].clone()
        changed[0, changed.shape[1] // 2] ^= 16
        return sent | {"delta": changed}


class NotingStream(_Noting, StreamRolloutWorker):
    @dispatch(Dispatch.RANK_ZERO)
    def load_weights(self, weights: Batch) -> int:
        return self.noted(super().load_weights, weights)


class ReceivingStream(_Noting, StreamRolloutWorker):
    """Notes what it serves after each broadcast; `exit`: it ends while it receives one."""

    @dispatch(Dispatch.RANK_ZERO)
    def receive_weights(self, broadcast: BroadcastRound) -> None:
        if self.fault == "exit" and broadcast.version == 2 and self.notes.first():
            os._exit(3)
        super().receive_weights(broadcast)

    @dispatch(Dispatch.RANK_ZERO)
    def load_received(self, version: int) -> int:
        super().load_received(version)
        assert self.policy.engine.shares_storage, "else the policy's weights are not those served"
        self.notes.add(version=version, digest=bytes_digest(self.policy.pack_weights()))
        return version


class NotingRollout(_Noting, RolloutWorker):
    @dispatch(Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: Batch) -> int:
        return self.noted(super().load_weights, weights)


def weights_digest(sent: Batch) -> str:
    """The digest of whole weights, as the actor sent them."""
    assert sent["weights"].dtype == torch.uint8
    return bytes(sent["digest"][0].tolist()).hex()


def bytes_digest(sent: Batch) -> str:
    """A digest of whole weights that were sent without one."""
    return blake3(sent["weights"].numpy().tobytes()).hexdigest()
