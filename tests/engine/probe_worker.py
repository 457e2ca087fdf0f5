"""The worker class of the controller's tests; it imports little, so that its actors start soon."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.data.collate import collate_completions
from engine.errors import DataError
from engine.workers.role import Dispatch, Metric, Worker, dispatch


class Payload:
    """A value that notes, in a file, each process that unpickles it."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickle_payload, (self.notes,)


def unpickle_payload(notes: str) -> Payload:
    with Path(notes).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return Payload(notes)


class Probe(Worker):
    """A worker that shows what reached it and fails on demand."""

    def __init__(self, context: Any, *, fail: str = "") -> None:
        super().__init__(context)
        if fail == "data":
            raise DataError("the probe refuses its data")
        if fail:
            raise ZeroDivisionError(fail)

    @dispatch(Dispatch.RANK_ZERO)
    def make(self, mib: int) -> Batch:
        return Batch({"big": torch.ones(64, mib * (1 << 20) // 4 // 64)})

    @dispatch(Dispatch.RANK_ZERO)
    def where(self, batch: Batch) -> tuple[str, int, float]:
        """The memory that a batch lies in, its bytes and its sum."""
        tensor = batch["big"]
        for line in Path("/proc/self/maps").read_text().splitlines():
            low, high = (int(number, 16) for number in line.split()[0].split("-"))
            if low <= tensor.data_ptr() < high:
                return line, tensor.nbytes, float(tensor.sum())
        raise AssertionError("memory that the process doesn't have")

    @dispatch(Dispatch.DATA_PARALLEL)
    def double(self, batch: Batch) -> Batch:
        rank = torch.full((len(batch),), self.context.rank)
        return Batch({"doubled": batch["x"] * 2, "rank": rank}, {"tag": batch.columns["tag"]})

    @dispatch(Dispatch.DATA_PARALLEL)
    def answer(self, batch: Batch) -> Batch:
        """Completions whose width differs from rank to rank."""
        lengths = batch["x"].long().tolist()
        source = Batch(
            {"group_ids": torch.arange(len(batch))}, {"prompt_ids": [[5] * n for n in lengths]}
        )
        return collate_completions(
            source,
            range(len(batch)),
            [[7] * (n + 1) for n in lengths],
            [[-1.0] * (n + 1) for n in lengths],
            pad_token_id=0,
        )

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def measure(self, batch: Batch) -> dict[str, float]:
        return {"mean": float(batch["x"].mean()), "seen": float(len(batch))}

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def measure_all(self, batch: Batch) -> dict[str, float | Metric]:
        """One metric of each kind; the rank's own rows are 1, 2 or 3, 4, 5 on two ranks."""
        x = batch["x"]
        tokens = 3.0 if self.context.rank == 0 else 1.0
        metrics: dict[str, float | Metric] = {
            "mean": float(x.mean()),
            "sum": Metric(float(x.sum()), "sum"),
            "max": Metric(float(x.max()), "max"),
            "min": Metric(float(x.min()), "min"),
            "by_tokens": Metric(float(x.mean()), weight=tokens),
        }
        return metrics | ({"only_last": 7.0} if float(x.max()) == 5 else {})

    @dispatch(Dispatch.DATA_PARALLEL, pad=True)
    def padded(self, batch: Batch) -> Batch:
        """Two rows for each; notes how many rows the rank got and how many tokens they have."""
        rows = torch.arange(len(batch)).repeat_interleave(2)
        seen = torch.full((2 * len(batch),), len(batch))
        tokens = torch.full((2 * len(batch),), float(batch["response_mask"].sum()))
        return Batch({"x": batch["x"][rows], "seen": seen, "tokens": tokens})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, pad=True)
    def padded_measure(self, batch: Batch) -> dict[str, float]:
        """The mean over real rows; NaN on a rank without any."""
        mask = batch["response_mask"][:, 0]
        return {"mean": float((batch["x"] * mask).sum() / mask.sum())}

    @dispatch(Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, int]:
        assert self.context.layout is not None
        return self.context.layout.coordinates(self.context.rank)

    @dispatch(Dispatch.DATA_PARALLEL)
    def pid(self) -> int:
        """Each rank's, for who asks its actor; a group can't merge them."""
        return os.getpid()

    @dispatch(Dispatch.RANK_ZERO)
    def threads(self) -> int:
        """Threads that torch computes with, after a computation."""
        torch.rand(64, 64) @ torch.rand(64, 64)
        return torch.get_num_threads()

    @dispatch(Dispatch.RANK_ZERO)
    def node(self) -> str:
        """The id of the Ray node that it runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    @dispatch(Dispatch.RANK_ZERO)
    def wrap(self, notes: str, size: int = 1) -> Batch:
        """A batch with a payload that notes who unpickles it, of `size` floats."""
        return Batch({"x": torch.zeros(1, size)}, {"payload": [Payload(notes)]})

    @dispatch(Dispatch.RANK_ZERO)
    def unwrap(self, batch: Batch) -> tuple[str, int]:
        return type(batch.columns["payload"][0]).__name__, os.getpid()

    @dispatch(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, seconds: float) -> None:
        """One rank raises at once, the others take some time."""
        if self.context.rank == rank:
            raise KeyError("teapot")
        time.sleep(seconds)

    @dispatch(Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @dispatch(Dispatch.RANK_ZERO)
    def meet(self, folder: str) -> Batch:
        """Ends once two roles are in it, each of which notes that in `folder`."""
        (Path(folder) / self.context.role).touch()
        until = time.monotonic() + 50
        while len(os.listdir(folder)) < 2:
            if time.monotonic() > until:
                raise TimeoutError("nobody else came; calls of two roles don't overlap")
            time.sleep(0.005)
        return Batch({"x": torch.tensor([0.5])}, {"tag": [0]})

    @dispatch(Dispatch.ONE_TO_ALL)
    def spin(self, seconds: float) -> None:
        """Run Python for that long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    @dispatch(Dispatch.ONE_TO_ALL)
    def total(self, batch: Batch, factor: float) -> float:
        return float(batch["x"].sum()) * factor + self.context.rank

    @dispatch(Dispatch.RANK_ZERO)
    def whoami(self) -> tuple[str, int, int, int]:
        return self.context.role, self.context.rank, self.context.world_size, os.getpid()

    @dispatch(Dispatch.ONE_TO_ALL)
    def fail(self, kind: str) -> None:
        if kind == "data":
            raise DataError("row 3 is wrong; repair it")
        raise KeyError(kind)

    @dispatch(Dispatch.DATA_PARALLEL)
    def slow(self, batch: Batch) -> Batch:
        time.sleep(float(batch["x"][0]))
        return batch

    def unmarked(self) -> int:
        return 1
