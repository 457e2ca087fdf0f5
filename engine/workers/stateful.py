"""What a role with state adds to `Worker`: saving it beside the role's own work, and loading it.

What lives here: the calls that a checkpoint makes on every rank. What does not: the state of a
model in training (`trained`), the files (`engine.checkpoint`), and when to save (the trainer).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from engine.checkpoint.background import Background
from engine.checkpoint.format import rank_file_prefix, write_state
from engine.checkpoint.rank_state import RankState, read_role_states, state_of_rank
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.checkpoint.state_dict import Snapshot, StateDict
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.storage.folder import Folder
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch

WRITE_TIMEOUT_S = 1800.0  # a rank's whole write


class StatefulWorker(Worker, ABC):
    """A role whose state belongs into checkpoints.

    It defines `state_dict` and `load_state_dict`; each first-level part of its state with tensors
    becomes a file. The process's random generators are saved and restored with it.
    """

    ranks_alike = False  # whether a rank may take another one's state, and their number change

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._snapshot = Snapshot()
        what = f"{context.role} rank {context.rank}: writing its state"
        self._writing = Background(what, WRITE_TIMEOUT_S)

    @abstractmethod
    def state_dict(self) -> StateDict:
        """The role's state; tensors may be the live ones."""

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Take over a saved state; raise CheckpointError, changing nothing, if it doesn't fit."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> float:
        """Copy the state and return how long that took, in s; files are written meanwhile.

        Raises CheckpointError when the write before this one failed.
        """
        begin = time.perf_counter()
        self._writing.wait()
        values, groups = self._snapshot.take(self.state_dict() | {"process_rng": process_rng()})
        stem = self._stem()

        def write() -> None:
            write_state(Folder(folder), stem, values, groups)

        self._writing.start(write)
        return time.perf_counter() - begin

    @dispatch(Dispatch.ONE_TO_ALL)
    def wait_saved(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for the write; raise CheckpointError, once, when it failed."""
        self._writing.wait(timeout_s)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Take over this rank's state from a complete checkpoint.

        Raises DamagedCheckpointError for a torn or changed one, CheckpointError for one of
        another model or another number of ranks; the role is as it was then.
        """
        context = self.context
        try:
            saved = read_role_states(folder, context.role)
            own = state_of_rank(saved, context.rank, context.world_size, any_rank=self.ranks_alike)
            self.load_sharded_state(own, saved)
        except DamagedCheckpointError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {self._stem()}: {error}") from error
        set_process_rng(own.get("process_rng"))

    def load_sharded_state(self, own: RankState, saved: list[RankState]) -> None:
        """Take over `own`, one of `saved`; overridden where a rank needs what others wrote."""
        self.load_state_dict(own.state_dict())

    def close(self) -> None:
        """Let a write that is under way end."""
        self._writing.wait()
        super().close()

    def _stem(self) -> str:
        return rank_file_prefix(self.context.role, self.context.rank, self.context.world_size)
