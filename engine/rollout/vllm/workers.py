"""vLLM's worker processes seen from the trainer's: sending weights, and noticing deaths.

Weights travel whole tensor by whole tensor in two halves of one mapped file: one is filled while
the workers load from the other. The other end is `worker.py`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.vllm import shared_memory
from engine.rollout.vllm.buckets import Mapping, Piece, place

_END_S = 10.0  # for a killed process to be gone
_DEADLINE_S = 120.0  # for one bucket, by all workers


class WorkerDied(RolloutError):
    """A worker process is gone, or gave no answer; the engine is of no use any more."""


class Watch:
    """Ends all worker processes when one dies: its peers would wait for it in a collective."""

    def __init__(self, executor: Any) -> None:
        self.cause: str | None = None  # why the workers are gone, e.g. "VllmWorker-1 (pid 7) …"
        self._executor = executor
        self._processes = [handle.proc for handle in executor.workers]
        self._closing = threading.Event()
        self._seen = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="hybridflyte-vllm-watch").start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [process.pid for process in self._processes]

    def end(self) -> None:
        """End the workers. They hold nothing that their own way out would save, and it is slow."""
        self._closing.set()
        self._executor.shutting_down = True  # so that vLLM takes it for no failure
        for handle in self._executor.workers:
            if handle.death_writer is not None:
                handle.death_writer.close()
                handle.death_writer = None
            handle.proc.kill()
        for process in self._processes:
            process.join(_END_S)

    def died(self, wait_s: float = 1.0) -> str | None:
        """Why the workers are gone, waiting for a death that vLLM just noticed; else None."""
        self._seen.wait(wait_s)
        return self.cause

    def kill(self, cause: str) -> None:
        """End all workers at once, for `cause`."""
        if self.cause is None:
            self.cause = cause
        for process in self._processes:
            if process.is_alive():
                process.kill()

    def _watch(self) -> None:
        dead = wait([process.sentinel for process in self._processes])
        if self._closing.is_set():
            return
        process = next(p for p in self._processes if p.sentinel == dead[0])
        process.join(1.0)
        self.kill(f"{process.name} (pid {process.pid}) {_ending(process.exitcode)}")
        self._seen.set()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"exited with code {code}"


class Channel:
    """The way of tensors to all workers of one engine."""

    def __init__(self, executor: Any, watch: Watch, bucket_bytes: int, dtype: torch.dtype) -> None:
        self._executor, self._watch, self._dtype = executor, watch, dtype
        self._half = bucket_bytes
        self._mapping: Mapping | None = None

    def forget_names(self) -> None:
        """Take away the names of vLLM's shared memory, which a killed process would leave."""
        for queue in (self._executor.rpc_broadcast_mq, *self._executor.response_mqs):
            shared_memory.forget_queue_name(queue)
        self._call("forget_names")

    def send(self, kind: str, named: Iterable[tuple[str, Tensor]], *finish: Any) -> None:
        """Send tensors; the workers' `<kind>_begin`, `_take` and `_finish` get them.

        Raises WorkerDied if a worker is lost, RolloutError with the first worker's words if one
        can't take them.
        """
        self._open(self._half)
        self._call(f"{kind}_begin")
        sender = _Sender(self, f"{kind}_take")
        for name, tensor in named:
            sender.add(name, tensor)
        sender.flush()
        self._call(f"{kind}_finish", *finish)

    def _open(self, half: int) -> Mapping:
        if self._mapping is None or half > self._half:
            mapping = Mapping.create(2 * half)
            try:
                self._call("weights_open", mapping.path, mapping.size)
            finally:
                mapping.unlink()
            self._mapping, self._half = mapping, half
        return self._mapping

    def _call(self, method: str, *arguments: Any) -> None:
        self.result(self.start(method, *arguments))

    def start(self, method: str, *arguments: Any) -> Callable[[], list[str | None]]:
        """Begin a call of all workers; what is returned waits for their answers."""
        if self._watch.cause is not None:
            raise WorkerDied(self._watch.cause)
        future: Future[list[str | None]] = self._guarded(
            lambda: self._executor.collective_rpc(
                method, timeout=_DEADLINE_S, args=arguments, non_block=True
            )
        )
        return lambda: self._guarded(future.result)

    def result(self, answers: Callable[[], list[str | None]]) -> None:
        for rank, error in enumerate(answers()):
            if error is not None:
                raise RolloutError(f"vLLM's worker {rank} failed: {error}")

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TimeoutError as error:  # a late answer would be taken for the next call's
            self._watch.kill(f"a worker gave no answer within {_DEADLINE_S:g} s")
            raise WorkerDied(str(self._watch.cause)) from error
        except Exception as error:
            cause = self._watch.died()
            raise WorkerDied(cause or f"vLLM's workers can't be reached: {error}") from error


class _Sender:
    """Fills one half of the file while the workers read the other."""

    def __init__(self, channel: Channel, method: str) -> None:
        self._channel, self._method = channel, method
        self._pieces: list[Piece] = []
        self._side, self._at = 0, 0
        self._reading: Callable[[], list[str | None]] | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        channel = self._channel
        assert channel._mapping is not None
        piece = place(name, tensor, channel._dtype, self._at)
        if piece.start + piece.nbytes > (self._side + 1) * channel._half:
            self.flush(last=False)
            piece = place(name, tensor, channel._dtype, self._at)
            if piece.nbytes > channel._half:
                self._finish_reading()
                channel._open(-(-piece.nbytes // 4096) * 4096)
                self._side = self._at = 0
                piece = place(name, tensor, channel._dtype, 0)
        channel._mapping.write(piece, tensor)
        self._pieces.append(piece)
        self._at = piece.start + piece.nbytes

    def flush(self, last: bool = True) -> None:
        """Hand over what was written; with `last`, wait until all is read."""
        if self._pieces:
            self._finish_reading()  # then that half may be written
            self._reading = self._channel.start(self._method, self._pieces)
            self._side = 1 - self._side
            self._at, self._pieces = self._side * self._channel._half, []
        if last:
            self._finish_reading()

    def _finish_reading(self) -> None:
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._channel.result(reading)
