"""A role whose whole state follows from one number, and calls on it as on a worker group.

The fuzz test's processes import this too.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.checkpoint import CheckpointStore, Saver
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.errors import CheckpointError
from engine.workers.role import Dispatch, StatefulWorker, WorkerContext, dispatch


class CountingWorker(StatefulWorker):
    """Counts; each of its tensors is filled with the count."""

    def __init__(self, context: WorkerContext, *, size: int = 1000) -> None:
        super().__init__(context)
        self.count, self.size = 0, size

    @dispatch(Dispatch.ONE_TO_ALL)
    def set(self, count: int) -> None:
        self.count = count

    @dispatch(Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, Any]:
        filled = torch.full((self.size,), float(self.count))
        return {"model": {"a": filled, "b": filled.bfloat16()}, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        count = state["count"]
        for name, tensor in state["model"].items():
            wanted = self.state_dict()["model"][name]
            if tensor.shape != wanted.shape:
                raise CheckpointError(f"{name!r} is {list(tensor.shape)} there")
            if not torch.equal(tensor, torch.full_like(tensor, count)):
                raise AssertionError(f"count {count} came with another state's {name!r}")
        self.count = count


class SilentWorker(CountingWorker):
    """Says that it has saved, and writes nothing."""

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> float:
        return 0.0


def start(size: int = 1000, critic: type[CountingWorker] = CountingWorker) -> Any:
    """Two roles of this kind in this process, each on its own."""
    classes = {"actor": CountingWorker, "critic": critic}
    specs = [RoleSpec(role, kind, {"size": size}) for role, kind in classes.items()]
    placement = Placement(pools=tuple(Pool((role,)) for role in classes), kind="local")
    return launch(placement, specs)


def saver(store: CheckpointStore, roles: Any, timeout_s: float = 30.0) -> Saver:
    return Saver(store, {"actor": roles.actor, "critic": roles.critic}, timeout_s)


def set_all(roles: Any, count: int) -> None:
    for group in (roles.actor, roles.critic):
        group.set(count).result()


def counts(roles: Any) -> list[int]:
    return [group.get().result() for group in (roles.actor, roles.critic)]
