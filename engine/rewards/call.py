"""One call of a reward function, on a daemon thread of its own and with a deadline.

What lives here: starting a call, running coroutines, giving up on what hangs. What does not: what
a result must look like (`result`) and what is done about a failure (`runner`).
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from engine.errors import RewardError
from engine.rewards.protocol import RewardFunction

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RewardRows:
    """What a reward function is given: B prompts, completions, and entries of each column."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[object]]

    def __post_init__(self) -> None:
        for name in {"prompts", "completions"} & self.columns.keys():
            raise RewardError(
                f"column {name!r} has the name of an argument of every reward; rename the column"
            )
        for name, values in {"prompts": self.prompts, **self.columns}.items():
            if len(values) != len(self):
                raise RewardError(
                    f"{name} has {len(values)} entries for {len(self)} completions; "
                    "give one for each"
                )

    def __len__(self) -> int:
        return len(self.completions)

    def row(self, index: int) -> RewardRows:
        """Return row `index` as rows of its own (B = 1)."""
        return self.select([index])

    def select(self, places: Sequence[int]) -> RewardRows:
        """Return the rows at `places`, in that order."""
        columns = {name: [values[i] for i in places] for name, values in self.columns.items()}
        prompts, completions = (
            [some[i] for i in places] for some in (self.prompts, self.completions)
        )
        return RewardRows(prompts, completions, columns)


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What a call ended with: a result or an error. A call that hangs has none."""

    row: int
    result: object = None
    error: BaseException | None = None


class DeadlinePassed(Exception):
    """Our own deadline, as distinct from a TimeoutError that the reward raised."""


class RewardCall:
    """A call under way; its outcome goes to a queue.

    A coroutine is cancelled at `deadline` (on `time.monotonic`'s clock). A plain function is not,
    as nothing can stop one for certain: whoever waits for it decides when to `abandon` it.
    """

    def __init__(
        self,
        function: RewardFunction,
        rows: RewardRows,
        deadline: float,
        outcomes: queue.SimpleQueue[RewardOutcome],
        row: int = 0,
    ) -> None:
        self._function, self._deadline = function, deadline
        self._outcomes, self._row = outcomes, row
        # Lists of its own: a function may empty them, and the rows may be needed again.
        self._prompts, self._completions = list(rows.prompts), list(rows.completions)
        self._columns = {name: list(values) for name, values in rows.columns.items()}
        self._lock = threading.Lock()
        self._stoppable = True
        self._thread = threading.Thread(target=self._run, name=f"reward-{row}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Make a hung function end when it next executes Python code, so that it can't spin on.

        One that sleeps inside C code stays, on a daemon thread, until that code returns.
        Coroutines are left to their cancellation.
        """
        with self._lock:  # while we hold it, the thread lives and its ident is its own
            if self._stoppable and self._thread.ident is not None:
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def _run(self) -> None:
        try:
            result: object = self._function(self._prompts, self._completions, **self._columns)
            self._not_stoppable()
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result, self._deadline))
            outcome = RewardOutcome(self._row, result)
        except BaseException as error:  # whatever it is, it must not end the run in this thread
            self._not_stoppable()
            outcome = RewardOutcome(self._row, error=error)
        self._outcomes.put(outcome)

    def _not_stoppable(self) -> None:
        with self._lock:
            self._stoppable = False


async def _awaited(result: Awaitable[object], deadline: float) -> object:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_DaemonThreads())
    timeout = asyncio.timeout(deadline - time.monotonic())
    try:
        async with timeout:
            return await result
    except TimeoutError:
        if timeout.expired():
            raise DeadlinePassed from None
        raise


class _DaemonThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs: Python waits at its exit for a pool's threads, not for these.

    Asyncio accepts nothing but a ThreadPoolExecutor, so this is one by name alone.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._free = threading.BoundedSemaphore(32)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            with self._free:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # handed to whoever awaits it
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for nothing: what still runs has been given up."""
