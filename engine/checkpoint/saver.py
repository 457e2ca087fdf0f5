"""Asynchronous saves: roles copy their state, training continues, writing and commit follow.

`Saver` has one save in flight over all roles; `Background` runs a call such as a rank's writing.
How a role writes is in `engine.workers.role`, what a commit is in `store`.
"""

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.checkpoint.format import rank_file_prefix
from engine.checkpoint.state_dict import CpuStager, StateDict, insert_tensors
from engine.checkpoint.store import Checkpoint, CheckpointDraft, CheckpointStore
from engine.errors import CheckpointError, EngineError
from engine.storage.folder import CheckpointStorageError, Folder

log = logging.getLogger(__name__)

_Call = tuple[Callable[[], None], Future[None], str]  # work, its end, and whose work it is
_Calls = queue.SimpleQueue[_Call | None]  # None ends the thread


class Background:
    """Runs one call at a time in its worker thread; a second one waits for the first."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name` says whose work it is; a wait that takes longer than `timeout_s` is an error."""
        self.name, self.timeout_s = name, timeout_s
        self._done: Future[None] | None = None
        self._calls: _Calls | None = None  # the worker thread's queue; the first call starts it

    @property
    def busy(self) -> bool:
        return self._done is not None and not self._done.done()

    def start(self, work: Callable[[], None]) -> None:
        """Wait for earlier work, raise its error if it had one, and start this."""
        self.wait()
        self._done = Future()
        if self._calls is None:
            # One daemon thread for all calls, which ends with this object: in a large process it
            # takes a millisecond to start one.
            calls = self._calls = _Calls()
            threading.Thread(target=_run_all, args=(calls,), name=self.name, daemon=True).start()
            weakref.finalize(self, calls.put, None)
        self._calls.put((work, self._done, self.name))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way; raise an EngineError, once, if that went wrong."""
        if self._done is None:
            return
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            error = self._done.exception(limit)
        except TimeoutError:
            raise CheckpointStorageError(
                f"{self.name} has not ended in {limit:g} s; check the disk or the object store"
            ) from None
        self._done = None
        if isinstance(error, EngineError):
            raise error
        if error is not None:
            text = f"{self.name} failed with {type(error).__name__}: {error}"
            raise CheckpointError(text) from error


def _run_all(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        work, done, name = call
        try:
            work()
        except BaseException as error:  # raised by `wait`
            log.warning("%s failed: %s", name, error)
            done.set_exception(error)
        else:
            done.set_result(None)
        del call, work, done  # or their tensors would stay until the next


_ANSWER_S = 2.0  # for a rank to tell that its write has passed its deadline


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What the latest committed save cost."""

    step: int
    stall_s: float  # how long training waited for it
    write_s: float  # from the first copy to the commit
    written_bytes: int  # size of all files
    tensor_bytes: int  # bytes of the tensors' elements: the least that could be written

    def as_metrics(self) -> dict[str, float]:
        """As metrics of a step, e.g. {"checkpoint/stall_s": 0.02}."""
        return {
            "checkpoint/stall_s": self.stall_s,
            "checkpoint/write_s": self.write_s,
            "checkpoint/bytes": float(self.written_bytes),
            "checkpoint/bytes_over_least": self.written_bytes / max(1, self.tensor_bytes),
        }


class GroupCall(Protocol):
    """A call on all ranks of a group; its result is waited for until a `time.monotonic`."""

    def result(self, until: float | None = None) -> object: ...


class StatefulGroup(Protocol):
    """The ranks of a role, each an `engine.workers.stateful.StatefulWorker`."""

    @property
    def world_size(self) -> int: ...
    def save_state(self, folder: str) -> GroupCall: ...
    def wait_saved(self, timeout_s: float) -> GroupCall: ...
    def load_state(self, folder: str) -> GroupCall: ...


class CommitListener(Protocol):
    """What processes committed checkpoints during training, and reports its own errors."""

    def wake(self) -> None: ...  # at once
    def wait(self) -> None: ...  # until all checkpoints are processed, or given up


class Saver:
    """Saves and restores all roles of a run, between its steps; at most one save is in flight."""

    def __init__(
        self,
        store: CheckpointStore,
        groups: Mapping[str, StatefulGroup],
        timeout_s: float = 1800.0,
        listener: CommitListener | None = None,
    ) -> None:
        """`groups` are the `WorkerGroup`s of `StatefulWorker`s by role, in the order in which they
        load; a write has `timeout_s` seconds. `listener` is woken after every commit."""
        self.store, self.groups = store, dict(groups)
        self.last: Checkpoint | None = None  # newest that is committed
        self.stats: SaveStats | None = None  # of the same
        self._commit = Background("the commit of a checkpoint", 2 * timeout_s)  # ranks come first
        self._timeout_s, self._listener = timeout_s, listener
        self._stager = CpuStager()
        self._requested: int | None = None  # step of the last save that was requested
        self._in_flight = False
        self._cancelled = threading.Event()
        self._stall_s = 0.0
        self._unreported: SaveStats | None = None  # of a save that `take_metrics` has not told

    @property
    def unsaved_step(self) -> int | None:
        """The step whose save was requested last, unless that is known to be durable."""
        is_durable = self.stats is not None and self.stats.step == self._requested
        return None if is_durable else self._requested

    def take_metrics(self) -> dict[str, float]:
        """What the newest save cost whose commit ended since the last call; empty for none."""
        stats, self._unreported = self._unreported, None
        return stats.as_metrics() if stats is not None else {}

    def save(self, step: int, state: StateDict, metrics: Mapping[str, float] | None = None) -> None:
        """Copy the state of all roles and the controller's `state`; write them in the background.

        Waits for the save before it, whose failure is a warning. Raises CheckpointError when that
        hangs, or this one can't begin; a further call may try again.
        """
        begin = time.perf_counter()
        before, self._requested = self._requested, step
        try:
            self.wait()
        except CheckpointError as error:
            if self._commit.busy:
                raise
            log.warning("no checkpoint at step %s: %s; step %d is being saved", before, error, step)
        draft = self.store.begin(step)
        draft.metrics = dict(metrics or {})
        draft.roles = {role: group.world_size for role, group in self.groups.items()}
        until = time.monotonic() + self._timeout_s  # one deadline over all roles
        try:
            draft.state = insert_tensors(*self._stager.stage(state))
            answers = [group.save_state(draft.folder) for group in self.groups.values()]
            for answer in answers:
                answer.result(until)
        except Exception:
            self._wait_for_writers(until)  # no rank may write into a deleted folder
            self.store.abandon(draft)
            raise
        self._cancelled.clear()
        self._in_flight = True
        self._stall_s = time.perf_counter() - begin
        self._commit.start(lambda: self._finish(draft, begin))

    def wait(self) -> Checkpoint | None:
        """Wait until the save in flight is durable, or raise why not; return the newest one."""
        if self._in_flight:
            self._in_flight = False
            # A rank whose write hangs says so itself at the deadline.
            if error := self._wait_for_writers(time.monotonic() + self._timeout_s + _ANSWER_S):
                self._cancelled.set()
                with contextlib.suppress(CheckpointError):  # the consequence of `error`
                    self._commit.wait()
                raise error
        self._commit.wait()  # also one that hung when it was waited for before
        return self.last

    def drain(self, limit_s: float) -> None:
        """Give the save in flight `limit_s` before an error ends the process; calls no rank."""
        try:
            self._commit.wait(limit_s)
        except CheckpointError as error:
            log.warning("the checkpoint of step %s may be lost: %s", self._requested, error)

    def finish(self) -> None:
        """Wait for the listener, at the end of a run."""
        if self._listener is not None:
            self._listener.wait()

    def restore(self, checkpoint: Checkpoint) -> StateDict:
        """Load all roles from a checkpoint; return the controller's state."""
        for group in self.groups.values():  # one by one: the rollout serves what the actor loads
            group.load_state(checkpoint.folder).result()
        self.last = checkpoint
        return checkpoint.state

    def _wait_for_writers(self, until: float) -> EngineError | None:
        """Wait until no rank writes, or until a deadline over all roles; return the first error."""
        first = None
        for answer in [group.wait_saved(self._timeout_s) for group in self.groups.values()]:
            try:
                answer.result(until)
            except EngineError as error:
                first = first or error
        return first

    def _finish(self, draft: CheckpointDraft, begin: float) -> None:
        try:
            self._wait_for_ranks(draft)
            self.last = self.store.commit(draft)
        except BaseException:
            self.store.abandon(draft)
            raise
        took, size = time.perf_counter() - begin, self.last.bytes
        stats = SaveStats(draft.step, self._stall_s, took, size, draft.tensor_bytes)
        self.stats = self._unreported = stats
        if self._listener is not None:
            self._listener.wake()

    def _wait_for_ranks(self, draft: CheckpointDraft) -> None:
        """Poll for the ranks' JSON files: a call to them would wait behind their next calls."""
        folder, deadline = Folder(draft.folder), time.monotonic() + self._timeout_s
        expected = {
            f"{rank_file_prefix(role, rank, ranks)}.json"
            for role, ranks in draft.roles.items()
            for rank in range(ranks)
        }
        pause = 0.01
        while missing := sorted(expected - folder.sizes().keys()):
            if self._cancelled.wait(pause):
                raise CheckpointError(f"the checkpoint of step {draft.step} was given up")
            if time.monotonic() > deadline:
                raise CheckpointStorageError(
                    f"{draft.folder}: {missing[0]} has not come in {self._timeout_s:g} s; check "
                    "that all nodes see this folder and that the disk is not full"
                )
            pause = min(2 * pause, 1.0)
