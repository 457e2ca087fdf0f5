"""Lazy batches wait only when read, and hand their pieces on; what any call's future promises."""

from __future__ import annotations

import torch

from engine.batch import Batch, Future, LazyBatch, Ready


class Counted(Ready[Batch]):
    """A future that counts how often it was waited for."""

    waits = 0

    def result(self, until: float | None = None) -> Batch:
        self.waits += 1
        return super().result()


def test_waits_once_and_only_when_read() -> None:
    y = Counted(Batch({"y": torch.tensor([2.0, 3.0])}))
    lazy = LazyBatch(Batch({"x": torch.zeros(2)}))
    lazy |= y
    assert y.waits == 0
    assert lazy["y"].tolist() == [2.0, 3.0]
    assert len(lazy) == 2
    assert "x" in lazy.resolve()
    assert y.waits == 1


def test_later_pieces_win_and_pieces_stay() -> None:
    first, last = Batch({"x": torch.zeros(1)}), Ready(Batch({"x": torch.ones(1)}))
    lazy = LazyBatch(first) | last
    assert lazy["x"].item() == 1.0
    assert lazy.pieces == [first, last], "a group must still get the future, not its value"
    more = lazy | LazyBatch(Batch({"x": torch.full((1,), 7.0)})) | {"z": torch.zeros(1)}
    assert more["x"].item() == 7.0
    assert more["z"].item() == 0.0
    assert lazy["x"].item() == 1.0


def test_what_counts_as_a_future() -> None:
    assert isinstance(Ready(1), Future)
    assert not isinstance(LazyBatch(), Future), "it is resolved piece by piece"
    assert not isinstance(Batch({"x": torch.zeros(1)}), Future)
