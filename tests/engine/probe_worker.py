"""The worker class of the controller's tests; it imports little, so that its actors start soon."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from engine.batch import Batch
from engine.data.collate import collate_completions
from engine.errors import DataError
from engine.workers.base import Dispatch, Worker, dispatch


class Probe(Worker):
    """A worker that shows what reached it and fails on demand."""

    def __init__(self, context: Any, *, fail: str = "") -> None:
        super().__init__(context)
        if fail == "data":
            raise DataError("the probe refuses its data")
        if fail:
            raise ZeroDivisionError(fail)

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
