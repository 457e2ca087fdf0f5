"""The process side of a worker group: it builds roles, splits and merges rows, receives calls."""

import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch

from engine.batch import Batch
from engine.controller.timeline import CallCost, Recorder, Span
from engine.errors import DataError, EngineError, WorkerError
from engine.parallel.layout import DataShard, Layout, RankGrid
from engine.registry import import_plugins
from engine.workers.role import Dispatch, Metric, ProcessState, Worker, WorkerContext, dispatch_rule


@dataclass(frozen=True, slots=True)
class RankMetrics:
    rows: int  # e.g. 32; 0 when the rank had nothing but padding
    values: dict[str, float | Metric]


def shard_rows(
    batch: Batch, share: DataShard, *, unit: int = 1, pad: bool = False
) -> tuple[Batch, int]:
    """Return one rank's consecutive rows of `batch` and how many of them are real.

    Every `unit` rows stay together. Padding comes after the batch's last row: its rows again, with
    `response_mask` 0. Raises DataError for rows that make no whole units.
    """
    rows, parts = len(batch), share.count
    if rows % unit:
        raise DataError(f"{rows} rows make no whole units of {unit}; give a multiple of it")
    if not pad or not rows or rows % (parts * unit) == 0:
        part = batch if parts == 1 else batch.split(parts, unit)[share.index]
        return part, len(part)
    size = -(-rows // (parts * unit)) * unit
    index = torch.arange(share.index * size, (share.index + 1) * size)
    part = batch.rows(index % rows)
    if "response_mask" in batch:
        is_real = (index < rows).to(part["response_mask"].dtype)
        part = part | {"response_mask": part["response_mask"] * is_real[:, None]}
    return part, int((index < rows).sum())


def drop_padding(result: object, rows: int, real: int) -> object:
    """Keep the results of the first `real` of `rows` rows.

    A method may return k rows for each row that it got (a rollout's n completions), in order.
    Raises WorkerError for a result that isn't a batch of k rows each.
    """
    if real == rows or result is None:
        return result
    if not isinstance(result, Batch) or len(result) % rows:
        got = f"{len(result)} rows" if isinstance(result, Batch) else type(result).__name__
        raise WorkerError(
            f"a padded call of {rows} rows returned {got}, in which padding can't be told apart; "
            "return a batch with equally many rows for each, or leave pad=True away"
        )
    return result.rows(slice(0, len(result) // rows * real))


def merge_results(results: Sequence[object]) -> object:
    """Merge what the collecting ranks return: metrics reduced, batches concatenated.

    Raises WorkerError for several values of another kind, DataError for batches that don't match.
    """
    metrics = [result for result in results if isinstance(result, RankMetrics)]
    if len(metrics) == len(results):
        return reduce_metrics(metrics)
    if len(results) == 1 or all(result is None for result in results):
        return results[0]
    batches = [result for result in results if isinstance(result, Batch)]
    if len(batches) == len(results):
        # Ranks that had padding alone are left out: they would only widen the others.
        return Batch.concat([batch for batch in batches if len(batch)] or batches[:1])
    raise WorkerError(
        f"results of types {sorted({type(r).__name__ for r in results})} can't be merged over "
        "ranks; return a Batch, or mark the method ONE_TO_ALL, RANK_ZERO or DATA_PARALLEL_METRICS"
    )


def reduce_metrics(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """Merge the ranks' metrics by name: plain floats by their rows, a Metric as it says.

    A name that only some ranks report is merged over those; ranks without real rows count only
    where all are without.
    """
    ranks = [rank for rank in ranks if rank.rows] or ranks
    names = dict.fromkeys(name for rank in ranks for name in rank.values)
    return {name: _reduce(name, ranks) for name in names}


def _reduce(name: str, ranks: Sequence[RankMetrics]) -> float:
    weighted: list[tuple[Metric, float]] = []
    for rank in ranks:
        if name in rank.values:
            value = rank.values[name]
            metric = value if isinstance(value, Metric) else Metric(float(value))
            weighted.append((metric, rank.rows if metric.weight is None else metric.weight))
    kind, *others = sorted({metric.reduce for metric, _ in weighted})
    if others:
        raise WorkerError(f"metric {name!r} is merged as {[kind, *others]}; let all ranks agree")
    values = [metric.value for metric, _ in weighted]
    if kind == "sum":
        return sum(values)
    if kind != "mean":
        return max(values) if kind == "max" else min(values)
    if len(values) == 1:
        return values[0]  # exact, where value · weight / weight would round
    if not (total := sum(weight for _, weight in weighted)):
        return sum(values) / len(values)
    # A value without weight says nothing, not even where it is NaN.
    return sum(metric.value * weight for metric, weight in weighted if weight) / total


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How to build one role: its class and keyword arguments, sent to every rank."""

    name: str  # e.g. "actor"
    worker_class: type[Worker]
    options: Mapping[str, object] = field(default_factory=dict)
    layout: RankGrid | None = None  # e.g. Layout(dp=2, tp=2); None: all ranks data-parallel
    plugins: tuple[str, ...] = ()  # modules imported before the role is built, e.g. ("my_losses",)


@dataclass(frozen=True, slots=True)
class BatchArgument:
    """An argument that is the union of pieces; piece i is the concatenation of `parts[i]` values.

    A value that isn't a batch is one piece of one part.
    """

    parts: tuple[int, ...]  # e.g. (1, 4): one whole piece, one that came from four ranks


@dataclass(frozen=True, slots=True)
class RemoteCall:
    role: str
    method: str
    arguments: tuple[object, ...] = ()  # as they are, or a BatchArgument
    keywords: tuple[str, ...] = ()  # names of the last arguments, which are passed by keyword
    number: int = 0  # counts the run's calls from 1
    step: int = 0  # training step, for the timeline
    after: tuple[int, ...] = ()  # numbers of the calls whose results are arguments


class WorkerHost:
    """One rank of the roles that share a process, this one or a Ray actor; `build` makes them.

    What a role raises leaves here as an EngineError: its own, with a note that has role, rank,
    method and traceback, or a WorkerError whose message has them.
    """

    name = "host"  # until it is built: Ray asks for the repr of an actor whose constructor failed

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        rank: int = 0,
        world_size: int = 1,
        threads: int = 0,
        timeline: bool = False,
    ) -> None:
        self.threads = threads or os.cpu_count() or 1
        self.rank, self.world_size = rank, world_size
        self.specs = {spec.name: spec for spec in specs}
        self.name = f"{'+'.join(self.specs)}/{rank}"
        self.workers: dict[str, Worker] = {}
        self.recorder = Recorder(self.name) if timeline else None

    def use_threads(self) -> None:
        """Let the calling thread, which runs the host's calls, compute with `threads` threads."""
        # A thread's first question or computation takes over the count that any thread set last;
        # afterwards its count is its own.
        torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def __repr__(self) -> str:
        return self.name  # Ray shows it in front of the process's log lines

    def build(self, address: str = "") -> int:
        """Build the roles in order; return the process id. At `address` a pool's ranks meet."""
        process = ProcessState()
        for spec in self.specs.values():
            context = WorkerContext(
                spec.name, self.rank, self.world_size, process, spec.layout, address
            )
            with self._locating_errors(spec.name, "its construction"):
                import_plugins(spec.plugins)
                self.workers[spec.name] = spec.worker_class(context, **spec.options)
        return os.getpid()

    def call(self, call: RemoteCall, *data: object) -> object:
        """Run a call on `data`, its arguments' values in order; None where nobody collects."""
        with self._locating_errors(call.role, call.method), self._recording(call):
            return self._run(call, iter(data))

    def measured_call(self, call: RemoteCall, *data: object) -> tuple[object, CallCost]:
        """Run a call as `call` does; return its result, and its cost.

        A failure shows in either, so that it is seen without the result being fetched.
        """
        start = time.perf_counter()
        result, seconds = self.call(call, *data), time.perf_counter() - start
        on_gpu = torch.cuda.is_initialized()
        return result, CallCost(
            seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        )

    def _run(self, call: RemoteCall, data: Iterator[object]) -> object:
        worker = self.workers[call.role]
        rule = dispatch_rule(type(worker), call.method)
        layout = self.specs[call.role].layout or Layout(dp=self.world_size)
        share = layout.data_shard(self.rank)
        arguments: list[object] = []
        counts: list[tuple[int, int]] = []  # rows of each batch, and those that are real
        for item in call.arguments:
            if not isinstance(item, BatchArgument):
                arguments.append(item)
                continue
            value = _argument(item, data)
            if rule.splits_rows and isinstance(value, Batch):
                value, real = shard_rows(value, share, unit=rule.unit, pad=rule.pad)
                counts.append((len(value), real))
            arguments.append(value)
        cut = len(arguments) - len(call.keywords)
        keywords = dict(zip(call.keywords, arguments[cut:], strict=True))
        result: Any = getattr(worker, call.method)(*arguments[:cut], **keywords)
        if not (share.collects if rule.splits_rows else self.rank == 0):
            return None
        rows, real_rows = counts[0] if counts else (1, 1)
        if rule.mode is Dispatch.DATA_PARALLEL_METRICS:
            return RankMetrics(real_rows, result)
        return drop_padding(result, rows, real_rows)

    def spans(self) -> list[Span]:
        return self.recorder.take() if self.recorder else []

    def close(self) -> None:
        """Close the roles, last built first, each of them even where another's close raises."""
        with ExitStack() as stack:
            for worker in self.workers.values():
                stack.callback(worker.close)
        self.workers.clear()

    def _recording(self, call: RemoteCall) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()
        numbers = (self.rank, call.step, call.number, call.after)
        return self.recorder.span(call.method, call.role, *numbers)

    @contextmanager
    def _locating_errors(self, role: str, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            error.add_note(f"raised in {role} rank {self.rank}: {what}\n{traceback.format_exc()}")
            raise
        except Exception as error:
            raise WorkerError(
                f"{role} rank {self.rank}: {what} failed with {type(error).__name__}: {error}\n"
                f"{traceback.format_exc()}"
            ).with_traceback(error.__traceback__) from error


def _argument(argument: BatchArgument, data: Iterator[object]) -> object:
    pieces = [merge_results([next(data) for _ in range(parts)]) for parts in argument.parts]
    if len(pieces) > 1 and not all(isinstance(piece, Batch) for piece in pieces):
        types = sorted({type(piece).__name__ for piece in pieces})
        raise WorkerError(f"a LazyBatch is made of {types}; unite batches only")
    return reduce(or_, pieces)


def rendezvous_address(host: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
