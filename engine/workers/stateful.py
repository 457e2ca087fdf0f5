"""Roles with state: a checkpoint's calls on every rank, to save in the background and to load."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial

from engine.checkpoint import format as checkpoint_format
from engine.checkpoint.saver import Background
from engine.checkpoint.state_dict import CpuStager, StateDict, process_rng, set_process_rng
from engine.errors import CheckpointError, DamagedCheckpointError, DivergedError
from engine.storage.folder import Folder
from engine.workers.role import Dispatch, Worker, WorkerContext, dispatch

WRITE_TIMEOUT_S = 1800.0  # a rank's whole write


class StatefulWorker(Worker, ABC):
    """A role whose state is saved in checkpoints.

    It defines `state_dict` and `load_state_dict`; each first-level entry of its state with tensors
    becomes a file. The process's random generators are saved and restored with it.
    """

    ranks_alike = False  # whether any rank may load any rank's state

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._stager = CpuStager()
        self._name = f"{context.role} rank {context.rank}"
        self._writing = Background(f"{self._name}: writing its state", WRITE_TIMEOUT_S)

    @abstractmethod
    def state_dict(self) -> StateDict:
        """The role's state; tensors may be the live ones."""

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Load a saved state; raise CheckpointError, changing nothing, if it doesn't fit."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> float:
        """Copy the state, write it in the background, and return the seconds that the copy took.

        Raises CheckpointError if the write before failed, DivergedError for weights not finite.
        """
        begin = time.perf_counter()
        self._writing.wait()
        try:
            values, groups = self._stager.stage(self.state_dict() | {"process_rng": process_rng()})
        except DivergedError as error:
            raise DivergedError(f"{self._name}: {error}") from error
        write = partial(checkpoint_format.write_state, Folder(folder), self._stem(), values, groups)
        self._writing.start(write)
        return time.perf_counter() - begin

    @dispatch(Dispatch.ONE_TO_ALL)
    def wait_saved(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Wait for the write; raise CheckpointError, once, if it failed."""
        self._writing.wait(timeout_s)

    @dispatch(Dispatch.ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Load this rank's state from a complete checkpoint.

        Raises DamagedCheckpointError for a torn or changed one, CheckpointError for one of another
        model or another number of ranks; the role is as it was then.
        """
        context = self.context
        try:
            saved = self.read_saved(folder)
            own = checkpoint_format.state_of_rank(
                saved, context.rank, context.world_size, any_rank=self.ranks_alike
            )
            self.load_sharded_state(own, saved)
        except DamagedCheckpointError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {self._stem()}: {error}") from error
        set_process_rng(own.get("process_rng"))

    def read_saved(self, folder: str) -> list[checkpoint_format.RankState]:
        """What every rank of this role has saved in a complete checkpoint."""
        return checkpoint_format.read_role_states(folder, self.context.role)

    def load_sharded_state(
        self, own: checkpoint_format.RankState, saved: list[checkpoint_format.RankState]
    ) -> None:
        """Load `own`, one of `saved`; overridden where a rank needs what other ranks wrote."""
        self.load_state_dict(own.state_dict())

    def close(self) -> None:
        self._writing.wait()
        super().close()

    def _stem(self) -> str:
        return checkpoint_format.rank_file_prefix(
            self.context.role, self.context.rank, self.context.world_size
        )
