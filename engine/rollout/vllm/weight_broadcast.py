"""Broadcast of a policy's weights from a trainer to all samplers at once, by NCCL or gloo.

In a round rank 0, the trainer's, sends whole tensors in chunks as it gathers them, and each vLLM
worker of each sampler receives them. Contents of chunks go through a store (torch's TCPStore) that
the controller serves, and so does the cause when anyone fails: every wait looks for it and has a
deadline, so a round ends with its cause for all members. Members keep their group, and its NCCL or
gloo communicator, until a round fails or has other members.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, Store

from engine.errors import WeightSyncError
from engine.rollout.vllm.engine_launch import unchanged
from engine.rollout.vllm.engine_weights import BucketEntry, chunks, nothing
from engine.weight_transfer import BroadcastRound, end_round
from engine.worker_process import on_daemon_thread

Named = Iterable[tuple[str, Tensor]]
Done = Callable[[], bool]

CPU = torch.device("cpu")
CHUNK_BYTES = 256 << 20  # NCCL's full speed, and little of a sampler's memory
_POLL_S, _CAUSE_S = 0.002, 0.1  # how often a wait looks for its end, and for a cause
_CONNECT_S = 60.0  # for members that are all there to connect to each other


class Communicator(NamedTuple):
    start: Callable[[Tensor], Done]  # broadcasts rank 0's bytes; what is returned may raise
    abort: Callable[[], object]


class FormingStore(Store):
    """A round's store while a communicator forms: its waits end with the round's cause.

    One of torch's own waits in C++, and a process that ended meanwhile would abort.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: str) -> None:
        self._channel.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._channel.store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._channel.wait(lambda: self._channel.store.check(keys), self._channel.forming)


def _gloo(channel: Channel) -> Communicator:
    round, wait = channel.round, timedelta(seconds=channel.round.deadline_s)
    connect = min(wait, timedelta(seconds=_CONNECT_S))
    group: Any = ProcessGroupGloo(FormingStore(channel), channel.rank, round.size, connect)
    group._set_default_timeout(wait)
    options = BroadcastOptions()
    options.rootRank = 0

    def start(data: Tensor) -> Done:
        work = group.broadcast([data], options)
        return lambda: work.is_completed() and work.wait()

    def keep() -> None:  # its destructor waits for what is under way, whatever was aborted
        group.abort()
        time.sleep(round.deadline_s)

    return Communicator(start, lambda: on_daemon_thread(keep))


def _nccl(channel: Channel) -> Communicator:
    """Form vLLM's own, which has no watchdog that would end the trainer with a sampler."""
    with unchanged() if "vllm" not in sys.modules else nullcontext():  # in the trainer's process
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

    round = channel.round
    with unpinned_nccl_env():
        group = StatelessProcessGroup(channel.rank, round.size, FormingStore(channel))
        nccl = PyNcclCommunicator(group, channel.device)
    if nccl.disabled:
        raise WeightSyncError("vLLM finds no NCCL library; set trainer.weight_transfer=store")
    stream = torch.cuda.Stream(channel.device)  # of its own, as gathers wait for the trainer's

    def start(data: Tensor) -> Done:
        stream.wait_stream(torch.cuda.current_stream())
        data.record_stream(stream)
        nccl.broadcast(data, src=0, stream=stream)
        return stream.record_event().query

    return Communicator(start, nccl.destroy)


class Channel:
    """A rank's part in one round."""

    def __init__(self, round: BroadcastRound, rank: int) -> None:
        self.round, self.rank, self.store = round, rank, round.open_store()
        on_gpu = round.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU

    def wait(self, done: Done, what: Callable[[], str]) -> None:
        """Wait for `done`; raise WeightSyncError with the round's cause, or at the deadline."""
        deadline, look = time.monotonic() + self.round.deadline_s, 0.0
        with _as_sync_error():
            while not done():
                now = time.monotonic()
                if now >= look:
                    look = now + _CAUSE_S
                    if self.store.check(["cause"]):
                        raise WeightSyncError(self.store.get("cause").decode())
                if now >= deadline:
                    raise WeightSyncError(f"{what()} not within {self.round.deadline_s:g} s")
                time.sleep(_POLL_S)

    def wait_for(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until all `ranks` have set their `key`."""
        late = list(ranks)

        def done() -> bool:
            late[:] = [rank for rank in late if not self.store.check([f"{key}{rank}"])]
            return not late

        self.wait(done, lambda: f"{', '.join(map(self.round.label, late))} {key}")

    def receive_head(self, number: int) -> tuple[list[BucketEntry], int]:
        """Receive what a chunk has, and the sum of its bytes."""
        key = f"head{number}"
        self.wait(lambda: self.store.check([key]), lambda: f"the trainer sent chunk {number}")
        entries, total = json.loads(self.store.get(key))
        return [BucketEntry(n, tuple(s), d, at) for n, s, d, at in entries], total

    def form(self) -> Communicator:
        """Form the group's communicator, with all members at once."""
        with _as_sync_error():
            if self.round.backend == "gloo":
                return _gloo(self)
            forming = on_daemon_thread(_nccl, self)  # NCCL has no deadline
            self.wait(forming.done, self.forming)
            return forming.result()

    def forming(self) -> str:
        return f"{self.round.size} ranks formed a group"

    def start(self, communicator: Communicator, data: Tensor) -> Callable[[], None]:
        """Start to broadcast rank 0's `data`; what is returned waits for its end."""
        with _as_sync_error():
            done = communicator.start(data)
        return partial(self.wait, done, lambda: f"{data.nbytes} bytes arrived")


@contextmanager
def _as_sync_error() -> Iterator[None]:
    """Raise what torch and NCCL raise of the network as WeightSyncError."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"the broadcast failed: {error}") from error


def _buffer(entries: list[BucketEntry], device: torch.device) -> Tensor:
    """A chunk's bytes, in whole words."""
    words = -(-entries[-1].end // 8) if entries else 0
    return torch.empty(words, dtype=torch.int64, device=device).view(torch.uint8)


def _sum(data: Tensor) -> int:
    return int(data.view(torch.int64).sum())  # 0.1 s/GiB on one CPU thread; of bytes it is 7 s


class Member:
    """One rank's membership, from round to round."""

    def __init__(self) -> None:
        self._group = 0
        self._communicator: Communicator | None = None

    def send(
        self, round: BroadcastRound, version: int, named: Named, dtype: torch.dtype | None = None
    ) -> None:
        """Broadcast whole tensors, floating point as `dtype`; all receivers have them then.

        Raises WeightSyncError if a receiver does not join, is lost, or fails.
        """
        with self._joined(round, 0) as (channel, communicator):
            if version != round.version:
                raise WeightSyncError(f"the round is of version {round.version}, not {version}")
            heads, wait_sent = list[str](), nothing
            for parts in chain(chunks(named, dtype, CHUNK_BYTES), [[]]):  # no parts: the end
                entries = [entry for entry, _ in parts]
                data = _buffer(entries, channel.device)
                for entry, tensor in parts:
                    entry.view(data).copy_(tensor)
                wait_sent()
                heads.append(f"head{len(heads)}")
                content = [astuple(entry) for entry in entries], _sum(data)
                channel.store.set(heads[-1], json.dumps(content))
                if entries:
                    wait_sent = channel.start(communicator, data)
            channel.wait_for("received", range(1, round.size))
            for head in heads:
                channel.store.delete_key(head)

    def receive(self, round: BroadcastRound, rank: int, load: Callable[[Named], None]) -> None:
        """Give `load` the tensors of each chunk as it arrives; they are gone when it returns."""
        with self._joined(round, rank) as (channel, communicator):
            for number in count():
                entries, total = channel.receive_head(number)
                if not entries:
                    break
                data = _buffer(entries, channel.device)
                channel.start(communicator, data)()
                if _sum(data) != total:
                    raise WeightSyncError(f"chunk {number} did not arrive as it was sent")
                load((entry.name, entry.view(data)) for entry in entries)
            channel.store.set(f"received{rank}", "")

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    @contextmanager
    def _joined(self, round: BroadcastRound, rank: int) -> Iterator[tuple[Channel, Communicator]]:
        """Join the others in the round; whatever fails in the block ends it for all members."""
        channel = Channel(round, rank)
        try:
            if self._group != round.group:
                self.close()
            if rank:
                channel.store.set(f"joined{rank}", "")
                channel.wait_for("joined", [0])
            else:  # the last, so that none begins before all are there
                channel.wait_for("joined", range(1, round.size))
                channel.store.set("joined0", "")
            if self._communicator is None:
                self._communicator, self._group = channel.form(), round.group
            yield channel, self._communicator
        except BaseException as error:
            with suppress(RuntimeError):  # the store may have ended with the run
                end_round(channel.store, f"{round.label(rank)}: {error}")
            self.close()
            raise
