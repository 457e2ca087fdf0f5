"""The trainer's side of vLLM's worker processes: sending weights, and monitoring for deaths.

Whole tensors are sent in two halves of one mapped file: one is filled while the workers load from
the other. The workers' side is `worker_extension.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import RolloutError
from engine.rollout.vllm import shared_memory
from engine.rollout.vllm.shared_memory import BucketEntry, SharedBuffer, bucket_entry
from engine.rollout.vllm.vllm_types import Executor

T = TypeVar("T")
_END_S = 10.0  # for a killed process to be gone
_DEADLINE_S = 120.0  # for one bucket, by all workers


class WorkerDied(RolloutError):
    """A worker process died or gave no answer; the engine can't be used any more."""


class WorkerMonitor:
    """Ends all worker processes when one dies: its peers would wait for it in a collective."""

    def __init__(self, executor: Executor) -> None:
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
        """Kill the workers: a clean exit is slow and saves nothing."""
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
        # vLLM collects it as well; who comes second learns the exit code a moment later.
        until = time.monotonic() + 1.0
        while process.exitcode is None and time.monotonic() < until:
            time.sleep(0.01)
        self.kill(f"{process.name} (pid {process.pid}) {_ending(process.exitcode)}")
        self._seen.set()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"exited with code {code}"


class WeightChannel:
    """Sends tensors to all workers of one engine."""

    def __init__(
        self, executor: Executor, monitor: WorkerMonitor, bucket_bytes: int, dtype: torch.dtype
    ) -> None:
        self._executor, self._monitor, self._dtype = executor, monitor, dtype
        self._half = bucket_bytes
        self._buffer: SharedBuffer | None = None

    def unlink_names(self) -> None:
        """Unlink vLLM's shared memory, which a killed process would leave behind."""
        for queue in (self._executor.rpc_broadcast_mq, *self._executor.response_mqs):
            shared_memory.unlink_queue_name(queue)
        self._call("unlink_names")

    def send(self, kind: str, named: Iterable[tuple[str, Tensor]], *finish: object) -> None:
        """Send tensors; the workers' `<kind>_begin`, `_load` and `_finish` get them.

        Raises WorkerDied if a worker is lost, RolloutError with the first worker's error if one
        can't load them.
        """
        self._open(self._half)
        self._call(f"{kind}_begin")
        sender = _Sender(self, f"{kind}_load")
        for name, tensor in named:
            sender.add(name, tensor)
        sender.flush()
        self._call(f"{kind}_finish", *finish)

    def _open(self, half: int) -> SharedBuffer:
        if self._buffer is None or half > self._half:
            mapping = SharedBuffer.create(2 * half)
            try:
                self._call("weights_open", mapping.path, mapping.size)
            finally:
                mapping.unlink()
            self._buffer, self._half = mapping, half
        return self._buffer

    def _call(self, method: str, *arguments: object) -> None:
        self.result(self.start(method, *arguments))

    def start(self, method: str, *arguments: object) -> Callable[[], list[str | None]]:
        """Call all workers; the function returned waits for their answers."""
        if self._monitor.cause is not None:
            raise WorkerDied(self._monitor.cause)
        future: Future[list[str | None]] = self._guarded(
            lambda: self._executor.collective_rpc(
                method, timeout=_DEADLINE_S, args=arguments, non_block=True
            )
        )
        return lambda: self._guarded(future.result)

    def result(self, answers: Callable[[], list[str | None]]) -> None:
        """Wait for `answers`; raises RolloutError for the first that is an error."""
        for rank, error in enumerate(answers()):
            if error is not None:
                raise RolloutError(f"vLLM's worker {rank} failed: {error}")

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TimeoutError as error:  # a late answer would be taken for the next call's
            self._monitor.kill(f"a worker gave no answer within {_DEADLINE_S:g} s")
            raise WorkerDied(str(self._monitor.cause)) from error
        except Exception as error:
            cause = self._monitor.died()
            raise WorkerDied(cause or f"vLLM's workers can't be reached: {error}") from error


class _Sender:
    """Fills one half of the file while the workers read the other."""

    def __init__(self, channel: WeightChannel, method: str) -> None:
        self._channel, self._method = channel, method
        self._entries: list[BucketEntry] = []
        self._side, self._at = 0, 0
        self._reading: Callable[[], list[str | None]] | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        channel = self._channel
        assert channel._buffer is not None
        entry = bucket_entry(name, tensor, channel._dtype, self._at)
        if entry.start + entry.nbytes > (self._side + 1) * channel._half:
            self.flush(last=False)
            entry = bucket_entry(name, tensor, channel._dtype, self._at)
            if entry.nbytes > channel._half:
                self._finish_reading()
                channel._open(-(-entry.nbytes // 4096) * 4096)
                self._side = self._at = 0
                entry = bucket_entry(name, tensor, channel._dtype, 0)
        channel._buffer.write(entry, tensor)
        self._entries.append(entry)
        self._at = entry.start + entry.nbytes

    def flush(self, last: bool = True) -> None:
        """Have the workers read what was written; with `last`, wait until they have."""
        if self._entries:
            self._finish_reading()  # then that half may be written
            self._reading = self._channel.start(self._method, self._entries)
            self._side = 1 - self._side
            self._at, self._entries = self._side * self._channel._half, []
        if last:
            self._finish_reading()

    def _finish_reading(self) -> None:
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._channel.result(reading)
