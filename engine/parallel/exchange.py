"""Running a resharding plan on torch.distributed, in bounded buckets.

Each uneven all-to-all moves at most one bucket a rank each way. Slices are packed from the
trainer's tensors, in the target's dtype, and unpacked into the rollout's: no full tensor is made,
and two buckets are all the memory needed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError, ModelError, RolloutError
from engine.parallel.reshard import AllToAll, Bucket, BucketSlice, RankPlan, make_all_to_alls
from engine.parallel.shard_maps import Index


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """What one run did on this rank, in bytes of the target's dtypes."""

    sent: int
    received: int
    copied: int  # on this rank
    shared: int  # in the target's memory already, so not copied
    buffers: int  # memory taken besides source and target


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
        """Check that tensors fit the plan and plan the all-to-alls; nothing is sent yet.

        source: parameter name → this rank's own part. target: storage name → tensor to fill, whose
        rows or columns beyond the plan stay as they are. Both are looked up at each run. Of the two
        buckets each has `bucket_bytes`, on `device`, where `group` works; None: the target's own.
        Raises ConfigError or ModelError for what doesn't fit.
        """
        self._plan, self._source, self._target, self._group = plan, source, target, group
        _check_group(plan, group)
        _check_tensors(plan, source, target)
        self._bucket_bytes = bucket_bytes
        self._all_to_alls = list(make_all_to_alls(plan, bucket_bytes))
        tensors = [*target.values(), *source.values()]
        self._device = torch.device(device or (tensors[0].device if tensors else "cpu"))
        self._failure = "they were never filled"

    def require_intact(self) -> None:
        """Raise RolloutError unless the last run succeeded on all ranks, so that versions agree."""
        if self._failure:
            raise RolloutError(
                f"rollout's weights on rank {self._plan.rank} can't be served: {self._failure}; "
                "run the exchange again on all ranks, or restart the engine"
            )

    @torch.no_grad()
    def run(self) -> ExchangeStats:
        """Update the target to the source's current values. All ranks of the plan must call it.

        Raises RolloutError, caused by what went wrong, on every rank if one fails: on the others
        within their group's deadline. The target may then hold old and new values, until a run
        succeeds.
        """
        self._failure = "an exchange is under way"
        try:
            stats = self._run()
            if self._plan.world_size > 1:  # ranks decode together, so all fail with one
                signal = torch.zeros(1, device=self._device)
                dist.all_reduce(signal, group=self._group)
                signal.item()  # waits for the device
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._failure = f"an exchange failed midway ({why}), and left old and new values"
            raise RolloutError(
                f"bringing rollout's weights on rank {self._plan.rank} of {self._plan.world_size} "
                f"up to date failed: {why}; they must not be served until an exchange succeeds"
            ) from error
        self._failure = ""
        return stats

    def _run(self) -> ExchangeStats:
        copied, shared = self._copy_local()
        outgoing = self._buffer(r.send.elements * r.dtype.itemsize for r in self._all_to_alls)
        incoming = self._buffer(r.receive.elements * r.dtype.itemsize for r in self._all_to_alls)
        sent = received = 0
        for step in self._all_to_alls:
            sent_view = _bucket(outgoing, step, step.send)
            received_view = _bucket(incoming, step, step.receive)
            for part in step.send.slices:
                source = self._source[part.parameter]
                _bucket_view(sent_view, part).copy_(view(source, part.start, part.size))
            self._all_to_all(step, sent_view, received_view)
            for part in step.receive.slices:
                target = self._target[self._plan.storages[part.parameter]]
                view(target, part.start, part.size).copy_(_bucket_view(received_view, part))
            sent, received = sent + sent_view.nbytes, received + received_view.nbytes
        buffers = outgoing.nbytes + incoming.nbytes
        return ExchangeStats(sent, received, copied, shared, buffers)

    def _copy_local(self) -> tuple[int, int]:
        """Copy what this rank has; return bytes copied, and bytes that needed no copy."""
        copied = shared = 0
        for local in self._plan.local_copies:
            source = view(self._source[local.parameter], local.source, local.size)
            target = self._target[self._plan.storages[local.parameter]]
            target_view = view(target, local.target, local.size)
            ours, theirs = ((t.data_ptr(), t.dtype, t.stride()) for t in (source, target_view))
            if ours == theirs:
                shared += target_view.nbytes
            else:
                target_view.copy_(source)
                copied += target_view.nbytes
        return copied, shared

    def _buffer(self, sizes: Iterable[int]) -> Tensor:
        size = max(sizes, default=0)
        assert size <= self._bucket_bytes, f"a bucket of {size} bytes, not {self._bucket_bytes}"
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _all_to_all(self, step: AllToAll, sent: Tensor, received: Tensor) -> None:
        """Exchange raw bytes, so that every backend carries every dtype."""
        size = step.dtype.itemsize
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [count * size for count in step.receive.counts],
            [count * size for count in step.send.counts],
            group=self._group,
        )


def _bucket(buffer: Tensor, step: AllToAll, bucket: Bucket) -> Tensor:
    return buffer[: bucket.elements * step.dtype.itemsize].view(step.dtype)


def _bucket_view(buffer: Tensor, part: BucketSlice) -> Tensor:
    return buffer[part.offset : part.offset + part.elements].view(part.size)


def view(tensor: Tensor, start: Index, size: Index) -> Tensor:
    """Return the box of `size` elements that begins at index `start`."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def _check_group(plan: RankPlan, group: dist.ProcessGroup | None) -> None:
    initialized = dist.is_initialized()
    size = dist.get_world_size(group) if initialized else 1
    rank = dist.get_rank(group) if initialized else 0
    if (size, rank) != (plan.world_size, plan.rank):
        raise ConfigError(
            f"a plan for rank {plan.rank} of {plan.world_size} can't run as rank {rank} of {size}; "
            "give the group of all ranks that the plan was made for"
        )


def _check_tensors(
    plan: RankPlan, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    for name, start, size in plan.source_boxes():
        _check_fit(source.get(name), "trainer", name, start, size)
    for name, start, size in plan.target_boxes():
        storage, dtype = plan.storages[name], plan.dtypes[name]
        tensor = _check_fit(target.get(storage), "rollout engine", storage, start, size)
        if tensor.dtype != dtype:
            raise ModelError(
                f"the rollout engine's {storage!r} is {tensor.dtype}, the plan is for {dtype}; "
                "plan with the engine's dtype"
            )


def _check_fit(tensor: Tensor | None, owner: str, name: str, start: Index, size: Index) -> Tensor:
    end = tuple(a + n for a, n in zip(start, size, strict=True))
    shape = () if tensor is None else tuple(tensor.shape)
    if tensor is None or len(shape) != len(end) or any(map(int.__lt__, shape, end)):
        problem = "has no such tensor" if tensor is None else f"has one of {list(shape)}"
        raise ModelError(
            f"the plan wants the {owner}'s {name!r} up to {list(end)} on this rank, which "
            f"{problem}; plan for the layout that this rank has"
        )
    return tensor
