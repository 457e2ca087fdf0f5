"""What a role with state adds to `Worker`: saving it beside the role's own work, and loading it.

What lives here: the calls that a checkpoint makes on every rank, and what a model in training
consists of. What does not: the files (`engine.checkpoint`), and when to save (the trainer).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from engine.checkpoint.background import Background
from engine.checkpoint.files import Folder
from engine.checkpoint.layout import rank_stem, read_rank, write_tree
from engine.checkpoint.rng import process_rng, set_process_rng
from engine.checkpoint.tree import Snapshot, Tree
from engine.errors import CheckpointError
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch
from engine.workers.optim import Optimizer

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
    def state_dict(self) -> Tree:
        """The role's state; tensors may be the live ones."""

    @abstractmethod
    def load_state_dict(self, state: Tree) -> None:
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
            write_tree(Folder(folder), stem, values, groups)

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
        saved = read_rank(
            folder, context.role, context.rank, context.world_size, alike=self.ranks_alike
        )
        try:
            self.load_state_dict(saved)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {self._stem()}: {error}") from error
        set_process_rng(saved["process_rng"])

    def close(self) -> None:
        """Let a write that is under way end."""
        self._writing.wait()
        super().close()

    def _stem(self) -> str:
        return rank_stem(self.context.role, self.context.rank, self.context.world_size)


def trained_state(model: nn.Module, optimizer: Optimizer, generator: torch.Generator) -> Tree:
    """The state of whatever trains a model on shuffled mini-batches; tensors are the live ones."""
    return {
        "model": _tensors(model),
        "optimizer": optimizer.state_dict(),
        "rng": {"minibatches": generator.get_state()},
    }


def load_trained_state(
    state: Tree, model: nn.Module, optimizer: Optimizer, generator: torch.Generator
) -> None:
    """Restore `trained_state`, the weights in their own storage, which others may share.

    Raises CheckpointError, before anything has changed, for the state of another model.
    """
    own, saved = _tensors(model), state["model"]
    for name in sorted(own.keys() | saved.keys()):
        there, here = _described(saved.get(name)), _described(own.get(name))
        if there != here:
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} is {there} there and {here} here; "
                "resume with the model that was saved, or save into another folder"
            )
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    generator.set_state(state["rng"]["minibatches"].clone())


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's live parameters and buffers by name; tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
