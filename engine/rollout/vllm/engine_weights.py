"""The weights of a vLLM engine, in this process or in worker processes, and their updates.

They are loaded from a trainer's model (shared, copied, with adapters merged or separate) or from a
stream of tensors. Worker processes get them in buckets of whole tensors, in the two halves of one
mapped file: one is filled while the workers load from the other; `worker_extension` is their side.
vLLM leaves named shared memory behind on every exit, so names are unlinked once all its processes
have mapped it: memory without a name ends with its last process.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout import trainer_model
from engine.rollout.vllm import weight_load
from engine.rollout.vllm.options import DTYPES, VllmOptions
from engine.rollout.vllm.vllm_types import LLM, Executor, Worker
from engine.rollout.vllm.weight_load import begin_load

_ALIGN = 64  # bytes


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """The position of one tensor in a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # e.g. "bfloat16"
    start: int  # byte offset

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def view(self, data: Tensor) -> Tensor:
        """The tensor as a view of a buffer `data`, uint8."""
        return data[self.start : self.end].view(getattr(torch, self.dtype)).view(self.shape)


class SharedBuffer:
    """A mapped file in shared memory; `path` is there until `unlink`."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self.bytes: Tensor = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedBuffer:
        """Make a new file of `size` bytes; RolloutError if there is no room for it."""
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
        descriptor, path = tempfile.mkstemp(prefix="hybridflyte-weights-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, size)  # or a write may end the process (SIGBUS)
        except OSError as error:
            os.unlink(path)
            raise RolloutError(
                f"{folder} has no room for {size >> 20} MB of weights on their way to vLLM: "
                f"{error.strerror}; enlarge it (docker run --shm-size), or lower bucket_mb"
            ) from error
        finally:
            os.close(descriptor)
        return cls(path, size)

    def unlink(self) -> None:
        """Remove the name, once all readers have opened it: a crash then leaves nothing behind."""
        os.unlink(self.path)

    def read(self, entries: Iterable[BucketEntry]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as views; valid until the file is written again."""
        return ((entry.name, entry.view(self.bytes)) for entry in entries)


def bucket_entry(name: str, tensor: Tensor, dtype: torch.dtype | None, start: int) -> BucketEntry:
    """Build the entry of `tensor` from byte `start` on; floating point is cast to `dtype`."""
    sent_dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    aligned = -(-start // _ALIGN) * _ALIGN
    return BucketEntry(name, tuple(tensor.shape), str(sent_dtype).removeprefix("torch."), aligned)


def chunks(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, size: int
) -> Iterator[list[tuple[BucketEntry, Tensor]]]:
    """Yield tensors with places in a buffer of `size` bytes; a larger one comes alone."""
    parts: list[tuple[BucketEntry, Tensor]] = []
    for name, tensor in named:
        entry = bucket_entry(name, tensor, dtype, parts[-1][0].end if parts else 0)
        if parts and entry.end > size:
            yield parts
            parts, entry = [], bucket_entry(name, tensor, dtype, 0)
        parts.append((entry, tensor))
    if parts:
        yield parts


def unlink_group_names() -> None:
    """Unlink the memory of this process's tensor-parallel group; its first rank does so for all."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.rank_in_group:
        return
    unlink_queue_name(group.mq_broadcaster)
    sums = getattr(group.device_communicator, "dist_module", None)
    if (name := getattr(sums, "group_name", None)) is not None:
        for rank in range(group.world_size):
            Path("/dev/shm", f"{name}_{rank}").unlink(missing_ok=True)


def unlink_queue_name(queue: object) -> None:
    """Unlink the memory of one of vLLM's message queues, if it has any."""
    buffer = getattr(queue, "buffer", None)
    if buffer is not None:
        with suppress(FileNotFoundError):
            buffer.shared_memory.unlink()
        buffer.is_creator = False  # vLLM 0.32 would unlink it once more


T = TypeVar("T")
Named = Iterable[tuple[str, Tensor]]
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

    def died(self) -> str | None:
        """Return why the workers are gone, or None; wait for a death that vLLM just noticed."""
        self._seen.wait(1.0)
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
        code = process.exitcode or 0
        end = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else "exited"
        self.kill(f"{process.name} (pid {process.pid}) {end} (exit code {process.exitcode})")
        self._seen.set()


def nothing() -> None: ...


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
            unlink_queue_name(queue)
        self.call("unlink_names")

    def send(self, prefix: str, named: Named, *finish: object) -> None:
        """Send tensors; the workers' `<prefix>_begin`, `_load` and `_finish` get them.

        Raises WorkerDied if a worker is lost, RolloutError with the first worker's error if one
        can't load them.
        """
        self.call(f"{prefix}_begin")
        reading = nothing  # waits for the workers with the other half
        for number, parts in enumerate(chunks(named, self._dtype, self._half)):
            if (end := parts[-1][0].end) > self._half:
                reading()
                reading = nothing
            buffer = self._open(max(self._half, -(-end // 4096) * 4096)).bytes
            half, entries = number % 2 * self._half, list[BucketEntry]()
            for entry, tensor in parts:
                entries.append(replace(entry, start=half + entry.start))
                entries[-1].view(buffer).copy_(tensor)
            reading()
            reading = self._start(f"{prefix}_load", entries)
        reading()
        self.call(f"{prefix}_finish", *finish)

    def _open(self, half: int) -> SharedBuffer:
        if self._buffer is None or half > self._half:
            mapping = SharedBuffer.create(2 * half)
            try:
                self.call("weights_open", mapping.path, mapping.size)
            finally:
                mapping.unlink()
            self._buffer, self._half = mapping, half
        return self._buffer

    def call(self, method: str, *arguments: object) -> None:
        """Call a method of all workers; raise WorkerDied or the first error, as `send`."""
        self._start(method, *arguments)()

    def _start(self, method: str, *arguments: object) -> Callable[[], None]:
        """Call all workers; the function returned waits, and raises the first error they answer."""
        if self._monitor.cause is not None:
            raise WorkerDied(self._monitor.cause)
        future = self._guarded(
            lambda: self._executor.collective_rpc(
                method, timeout=_DEADLINE_S, args=arguments, non_block=True
            )
        )

        def wait_for_answers() -> None:
            for rank, error in enumerate(self._guarded(future.result)):
                if error is not None:
                    raise RolloutError(f"vLLM's worker {rank} failed: {error}")

        return wait_for_answers

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TimeoutError as error:  # a late answer would be taken for the next call's
            self._monitor.kill(f"a worker gave no answer within {_DEADLINE_S:g} s")
            raise WorkerDied(str(self._monitor.cause)) from error
        except Exception as error:
            cause = self._monitor.died()
            raise WorkerDied(cause or f"vLLM's workers can't be reached: {error}") from error


def _base_state(model: nn.Module) -> tuple[object, ...]:
    """Identify a model's weights but its adapters; unequal after a write that autograd counts."""
    frozen = (p for name, p in model.named_parameters() if ".lora_" not in name)
    return (model, *((p.data_ptr(), p._version) for p in frozen))


class EngineWeights(ABC):
    """The weights of one engine."""

    def __init__(self, options: VllmOptions) -> None:
        self._own_adapters = bool(options.adapter_rank)  # vLLM applies adapters itself
        self._quantized = bool(options.settings.quantization)
        self._base: tuple[object, ...] | None = None  # state of the loaded base, under adapters

    shares_storage = False

    def load_model(self, model: nn.Module) -> None:
        """Load `model`'s current weights; of a known base with adapters only the adapters."""
        adapted = trainer_model.has_adapters(model)
        if self._own_adapters and not adapted:
            raise RolloutError(
                "an engine with lora=adapter takes a model with adapters, and this one has no "
                "adapters; use lora=merged"
            )
        # A layer is quantised as a whole.
        known = adapted and _base_state(model) == self._base and not self._quantized
        self._base = None
        if adapted and not self._own_adapters:
            changes = trainer_model.merged_weights(model, changed_only=known)
            self._load(changes, complete=not known)
        elif not known:
            self._load_base(model)
        if self._own_adapters:
            config = trainer_model.adapter_config(model)
            self._load_adapter(trainer_model.adapter_weights(model), config)
        self._base = _base_state(model) if adapted else None  # its storage may be vLLM's now

    def load_tensors(self, named: Named) -> None:
        """Load the whole tensors `named`, all of a model."""
        if self._own_adapters:
            raise RolloutError(
                "an engine with lora=adapter takes a model, not a stream; use lora=merged"
            )
        self._base = None
        self._load(named, complete=True)

    @abstractmethod
    def transfer(self, step: str, *arguments: object) -> None:
        """Call `step` of the `BroadcastEngine` in each of vLLM's workers."""

    def invalidate(self) -> None:
        """Load the next model in full: the weights loaded before are lost."""
        self._base = None

    def release(self) -> None:  # noqa: B027 (most share nothing)
        """Give the trainer's parameters storage of their own, if they share any."""

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """vLLM's live parameters in this process, by name, to be written in place."""

    @abstractmethod
    def _load(self, named: Named, complete: bool) -> None: ...

    @abstractmethod
    def _load_adapter(self, named: Named, config: dict[str, object]) -> None: ...

    def _load_base(self, model: nn.Module) -> None:
        """Load a model but its adapters."""
        self._load(trainer_model.base_weights(model), complete=True)


class _Shared(NamedTuple):
    """A model of the trainer whose parameters, but for adapters, are vLLM's."""

    model: nn.Module
    views: dict[str, Tensor]  # these parameters
    snapshot: weight_load.ParameterSnapshot


class InProcessWeights(EngineWeights):
    """Weights in this process: the trainer's own storage wherever layouts and dtypes agree."""

    def __init__(self, llm: LLM, options: VllmOptions) -> None:
        super().__init__(options)
        # `apply_model` would return one shard's answer for all ranks and not wait for the others.
        unlink_group_names()
        self._worker: Worker = llm.collective_rpc(lambda w: getattr(w, "worker", w))[0]
        self.target: nn.Module = self._worker.model_runner.get_model()
        # Weights that sleep would take away can't be the trainer's.
        sleeps = bool(llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        self._shareable = not self._quantized and (options.share or not sleeps)
        self._shared: _Shared | None = None
        self._not_shareable: nn.Module | None = None  # a model found not to fit

    @property
    def shares_storage(self) -> bool:  # type: ignore[override]
        """True if vLLM's parameters are the trainer's."""
        return self._shared is not None

    def parameters(self) -> dict[str, Tensor]:
        if self._quantized:
            raise RolloutError(
                "vLLM's parameters are quantised, so they can't be written in place; "
                "use update_weights or update_from"
            )
        return {name: parameter.data for name, parameter in self.target.named_parameters()}

    def transfer(self, step: str, *arguments: object) -> None:
        getattr(self._worker.weight_transfer_engine, step)(*arguments)

    def release(self) -> None:
        if self._shared is not None:
            weight_load.release(self._shared.model, self._shared.views)
        self._shared = None

    def _load_base(self, model: nn.Module) -> None:
        shared = self._shared
        if shared is not None and shared.model is model and shared.snapshot.is_current():
            return
        super()._load_base(model)
        if self._not_shareable is model or not self._shareable:
            return
        views = weight_load.plan_sharing(model, self.target)
        if views is None:
            self._not_shareable = model
            return
        weight_load.share(model, views)
        self._shared = _Shared(model, views, weight_load.ParameterSnapshot(model))

    def _load(self, named: Named, complete: bool) -> None:
        if self._shared is not None and not self._shared.snapshot.is_current():
            self._shared = None  # the trainer replaced its tensors
        self.release()
        loading = begin_load(self._worker.model_runner)
        loading.load(named)
        loading.finish(complete)

    def _load_adapter(self, named: Named, config: dict[str, object]) -> None:
        tensors = {name: tensor.detach().clone() for name, tensor in named}
        weight_load.load_adapter(self._worker, tensors, config)


class WorkerWeights(EngineWeights):
    """Weights in vLLM's worker processes; each loads its shards from shared memory."""

    def __init__(self, llm: LLM, options: VllmOptions) -> None:
        super().__init__(options)
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        self.monitor = WorkerMonitor(executor)
        size, dtype = options.settings.bucket_mb << 20, DTYPES[options.dtype]
        self._channel = WeightChannel(executor, self.monitor, size, dtype)
        self._channel.unlink_names()

    def parameters(self) -> dict[str, Tensor]:
        raise RolloutError(
            "vLLM's parameters are in its worker processes, where this one can't write; use "
            "update_weights or update_from, or an engine with rank_groups"
        )

    def transfer(self, step: str, *arguments: object) -> None:
        self._channel.call("transfer", step, *arguments)

    def _load(self, named: Named, complete: bool) -> None:
        with torch.no_grad():
            self._channel.send("weights", named, complete)

    def _load_adapter(self, named: Named, config: dict[str, object]) -> None:
        with torch.no_grad():
            self._channel.send("adapter", named, config)
