"""Carrying out a resharding plan on torch.distributed: bounded buckets, straight into place.

Each round is one uneven all-to-all of at most a bucket a rank each way. Slices are packed from the
trainer's storage, in the destination's dtype, and unpacked into the rollout's: no whole tensor is
ever made, and two buckets are all the memory that it takes. A run that fails leaves its target
marked: `require_intact` is what a rollout engine asks before it serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError, ModelError, RolloutError
from engine.parallel.boxes import Index
from engine.parallel.comm_buckets import Bucket, Piece, Round, make_rounds
from engine.parallel.reshard import RankPlan


@dataclass(frozen=True, slots=True)
class Moved:
    """What one run did on this rank; sizes in bytes of the target's dtypes."""

    sent: int
    received: int
    kept: int  # copied on this rank
    shared: int  # in the target's memory already, so not even copied
    rounds: int
    buffers: int  # memory that it took besides source and target


class Exchange:
    """One rank's part of a plan, ready to run after every training step."""

    def __init__(
        self,
        plan: RankPlan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 64 << 20,
        device: torch.device | str | None = None,
    ) -> None:
        """Check that tensors fit the plan and lay out the rounds; nothing is sent yet.

        source: parameter name → this rank's own part. target: storage name → tensor to fill, whose
        rows or columns beyond the plan stay as they are. Both are looked up at each run, so their
        tensors may move. bucket_bytes: of one bucket; there are two. device: of the buckets, where
        `group` works; the target's own if None. Raises ConfigError or ModelError for what doesn't
        fit.
        """
        self._plan, self._source, self._target, self._group = plan, source, target, group
        _check_group(plan, group)
        _check_source(plan, source)
        _check_target(plan, target)
        self._bucket_bytes = bucket_bytes
        self._rounds = list(make_rounds(plan, bucket_bytes))
        tensors = [*target.values(), *source.values()]
        self._device = torch.device(device or (tensors[0].device if tensors else "cpu"))
        self._flaw = "they were never filled"

    @property
    def intact(self) -> bool:
        """Whether the last run succeeded on every rank, so that the target is of one version."""
        return not self._flaw

    def require_intact(self) -> None:
        """Raise RolloutError unless the target is `intact`."""
        if self._flaw:
            raise RolloutError(
                f"rollout's weights on rank {self._plan.rank} can't be served: {self._flaw}; run "
                "the exchange again on all ranks, or start the engine anew"
            )

    @torch.no_grad()
    def run(self) -> Moved:
        """Bring the target up to the source's present values. All ranks of the plan must call it.

        Raises RolloutError, caused by what went wrong, on every rank if one of them fails: on the
        others within their group's deadline. The target may then hold old and new values, and is
        not `intact` before a run succeeds.
        """
        self._flaw = "an exchange is under way"
        try:
            moved = self._run()
            self._agree()
        except Exception as error:
            self._flaw = (
                f"an exchange failed midway ({type(error).__name__}: {error}), and left old and "
                "new values"
            )
            raise RolloutError(
                f"bringing rollout's weights on rank {self._plan.rank} of {self._plan.world_size} "
                f"up to date failed: {type(error).__name__}: {error}; they must not be served "
                "before an exchange succeeds"
            ) from error
        self._flaw = ""
        return moved

    def _run(self) -> Moved:
        kept, shared = self._keep()
        outgoing = self._buffer(r.send.elements * r.dtype.itemsize for r in self._rounds)
        incoming = self._buffer(r.receive.elements * r.dtype.itemsize for r in self._rounds)
        sent = received = 0
        for one in self._rounds:
            out, into = _part(outgoing, one, one.send), _part(incoming, one, one.receive)
            for piece in one.send.pieces:
                source = self._source[piece.parameter]
                _slot(out, piece).copy_(view(source, piece.start, piece.size))
            self._all_to_all(one, out, into)
            for piece in one.receive.pieces:
                target = self._target[self._plan.storages[piece.parameter]]
                view(target, piece.start, piece.size).copy_(_slot(into, piece))
            sent, received = sent + out.nbytes, received + into.nbytes
        buffers = outgoing.nbytes + incoming.nbytes
        return Moved(sent, received, kept, shared, len(self._rounds), buffers)

    def _agree(self) -> None:
        """Wait until all ranks have their slices: ranks decode together, so one's flaw is all's."""
        if self._plan.world_size > 1:
            done = torch.zeros(1, device=self._device)
            dist.all_reduce(done, group=self._group)
            done.item()  # waits for the device

    def _keep(self) -> tuple[int, int]:
        """Copy what this rank holds; bytes copied, and bytes that needed no copy."""
        copied = shared = 0
        for kept in self._plan.kept:
            have = view(self._source[kept.parameter], kept.source, kept.size)
            target = self._target[self._plan.storages[kept.parameter]]
            want = view(target, kept.target, kept.size)
            if _same_memory(have, want):
                shared += want.nbytes
            else:
                want.copy_(have)
                copied += want.nbytes
        return copied, shared

    def _buffer(self, sizes: Iterable[int]) -> Tensor:
        size = max(sizes, default=0)
        assert size <= self._bucket_bytes, f"a bucket of {size} bytes, not {self._bucket_bytes}"
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _all_to_all(self, one: Round, out: Tensor, into: Tensor) -> None:
        """Raw bytes travel, so that every backend carries every dtype."""
        size = one.dtype.itemsize
        dist.all_to_all_single(
            into.view(torch.uint8),
            out.view(torch.uint8),
            [count * size for count in one.receive.counts],
            [count * size for count in one.send.counts],
            group=self._group,
        )


def _part(buffer: Tensor, one: Round, bucket: Bucket) -> Tensor:
    return buffer[: bucket.elements * one.dtype.itemsize].view(one.dtype)


def _slot(buffer: Tensor, piece: Piece) -> Tensor:
    return buffer[piece.offset : piece.offset + piece.elements].view(piece.size)


def view(tensor: Tensor, start: Index, size: Index) -> Tensor:
    """The box of `size` elements that begins at index `start`."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and (a.dtype, a.stride()) == (b.dtype, b.stride())


def _check_group(plan: RankPlan, group: dist.ProcessGroup | None) -> None:
    together = dist.is_initialized()
    size = dist.get_world_size(group) if together else 1
    rank = dist.get_rank(group) if together else 0
    if (size, rank) != (plan.world_size, plan.rank):
        raise ConfigError(
            f"a plan for rank {plan.rank} of {plan.world_size} can't run as rank {rank} of {size}; "
            "give the group of all ranks that the plan was made for"
        )


def _check_source(plan: RankPlan, source: Mapping[str, Tensor]) -> None:
    needed = [(s.parameter, s.start, s.size) for s in plan.sends]
    for name, start, size in [*needed, *((k.parameter, k.source, k.size) for k in plan.kept)]:
        _check_fit(source.get(name), "trainer", name, start, size)


def _check_target(plan: RankPlan, target: Mapping[str, Tensor]) -> None:
    taken = [(s.parameter, s.start, s.size) for s in plan.receives]
    for name, start, size in [*taken, *((k.parameter, k.target, k.size) for k in plan.kept)]:
        storage, dtype = plan.storages[name], plan.dtypes[name]
        tensor = _check_fit(target.get(storage), "rollout engine", storage, start, size)
        if tensor.dtype != dtype:
            raise ModelError(
                f"the rollout engine's {storage!r} is {tensor.dtype}, the plan is for {dtype}; "
                "plan with the engine's dtype"
            )


def _check_fit(tensor: Tensor | None, whose: str, name: str, start: Index, size: Index) -> Tensor:
    end = tuple(a + n for a, n in zip(start, size, strict=True))
    shape = () if tensor is None else tuple(tensor.shape)
    if tensor is None or len(shape) != len(end) or any(map(int.__lt__, shape, end)):
        there = "has no such tensor" if tensor is None else f"has one of {list(shape)}"
        raise ModelError(
            f"the plan wants the {whose}'s {name!r} up to {list(end)} on this rank, which {there}; "
            "plan for the layout that this rank has"
        )
    return tensor
