"""A reward function in a process of its own: whatever it does there, the run goes on.

What lives here: the run's end of it. The process is started once and keeps its state (a model that
it loaded, say) between calls, until a call ends it or takes too long; the next call starts another.
`guard` starts and ends processes, `process_main` runs in them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import ConfigError, RewardError
from engine.rewards.call import RewardRows
from engine.rewards.process_main import (
    LoadReward,
    ProcessEnded,
    RewardLoaded,
    RowsDone,
    ScoreAll,
    ScoreEach,
)
from engine.rewards.result import RewardFailure, Scores
from engine.rewards.threads import TURNS, RowEnded, RowResult, RowStarted, late

_START_S = 600.0  # a module may import what takes long
_CLOSE_S = 15.0
_GUARD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from engine.rewards.guard import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[4]))"
)


class _Deadline(Exception):
    """No message came in time."""


class RewardProcess:
    """Calls a reward in its own process.

    Raises ConfigError for a name that can't be resolved there, and RewardError where the process
    ends while it loads the function.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        modules: tuple[str, ...] = (),
        *,
        imports: tuple[str, ...] = (),
        memory_bytes: int = 0,
    ) -> None:
        """`modules` are those that may register `name`, likely ones first.

        `imports` are the engine's or a library's, never a user's: the guard loads them once, and
        each process has them at its start. `memory_bytes` limits the process's address space.
        """
        self._load = LoadReward(name, options or {}, modules, memory_bytes)
        self._imports = imports
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self.name, self.components = name, None
        loaded = self._running()
        self.name, self.components = loaded.name, loaded.components

    def score_all(
        self, rows: RewardRows, timeout_s: float, components: tuple[str, ...] | None
    ) -> Scores:
        try:
            self._running()
            deadline = time.monotonic() + timeout_s
            self._send(ScoreAll(rows, timeout_s, components), deadline)
            answer = self._receive(deadline)
        except _Deadline:
            self._end()
            raise late(self.name, len(rows), timeout_s) from None
        except (RewardError, ConfigError) as error:  # of a new start
            raise RewardFailure("crashed", str(error)) from None
        if isinstance(answer, ProcessEnded):
            raise self._crashed(answer, len(rows))
        if isinstance(answer, RewardFailure):
            if answer.cause == "deadline":
                self._end()  # what hangs must not go on beside the next call
            raise answer
        assert isinstance(answer, Scores)
        return answer

    def score_each(self, rows: Mapping[int, RewardRows], timeout_s: float) -> dict[int, RowResult]:
        """As `RewardThreads.score_each`; rows that were under way as the process was lost are
        tried alone, so that only those that end it fail."""
        deadline = time.monotonic() + timeout_s
        groups = deque([list(rows)])
        results: dict[int, RowResult] = {}
        while groups and time.monotonic() < deadline:
            group = groups.popleft()
            patience = _patience(timeout_s, deadline, len(groups) if len(group) == 1 else 0)
            started, lost = self._attempt(
                {row: rows[row] for row in group}, timeout_s, deadline, patience, results
            )
            if lost is None:
                continue
            suspects = [row for row in group if row in started and row not in results]
            untried = [row for row in group if row not in started]
            if not started and lost.cause == "crashed":  # the function can't even be loaded
                return results | dict.fromkeys([*group, *chain(*groups)], lost)
            if len(suspects) == 1:
                results[suspects[0]] = lost
            else:
                groups.extend([row] for row in suspects)
            if untried:
                groups.appendleft(untried)
        if groups:
            self._end()
        return results

    def close(self) -> None:
        """End the process and all that it left behind."""
        self._end()
        self._forget_guard()

    def _attempt(
        self,
        rows: Mapping[int, RewardRows],
        timeout_s: float,
        deadline: float,
        patience_s: float,
        results: dict[int, RowResult],
    ) -> tuple[set[int], RewardFailure | None]:
        """Score rows in one process, into `results`; which were started, and how it was lost."""
        started: set[int] = set()
        try:
            self._running()
            until = min(deadline, time.monotonic() + patience_s)
            self._send(ScoreEach(rows, timeout_s, patience_s / 4), until)
            while True:
                until = min(deadline, time.monotonic() + patience_s)
                message = self._receive(until)
                if isinstance(message, RowStarted):
                    started.add(message.row)
                elif isinstance(message, RowEnded):
                    results[message.row] = message.result
                elif isinstance(message, ProcessEnded):
                    return started, self._crashed(message, 1)
                elif isinstance(message, RowsDone):
                    if len(results.keys() & rows.keys()) < len(rows):
                        self._end()  # what hangs must not go on beside the next call
                    return started, None
        except _Deadline:
            self._end()
            return started, None if time.monotonic() >= deadline else late(self.name, 1, patience_s)
        except (RewardError, ConfigError) as error:  # of a new start
            return started, RewardFailure("crashed", str(error))

    def _running(self) -> RewardLoaded:
        """Start the process if it isn't there; return what it loaded."""
        if self._channel is not None:
            return RewardLoaded(self.name, self.components)
        if self._control is None:
            self._start_guard()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        self._channel = Connection(ours.detach())
        try:
            deadline = time.monotonic() + _START_S
            self._send(self._load, deadline)
            answer = self._receive(deadline)
        except _Deadline:
            self._end()
            raise RewardError(
                f"reward {self.name!r} was not loaded within {_START_S:g} s; let its module import "
                "less"
            ) from None
        if isinstance(answer, ConfigError):
            self._end()
            raise answer
        if isinstance(answer, ProcessEnded):
            raise RewardError(
                f"the process of reward {self.name!r} {_how(answer.code)} while it imported the "
                "reward's module; correct what runs on import"
            )
        assert isinstance(answer, RewardLoaded)
        return answer

    def _send(self, message: object, until: float) -> None:
        """Send a message; one that is not taken by `until`, by a stopped process say, is cut."""
        assert self._channel is not None
        seconds = max(0.01, until - time.monotonic())
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._channel.fileno())) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with suppress(OSError):  # it ended or is late, which is what `_receive` says next
            self._channel.send(message)

    def _receive(self, until: float) -> object:
        """The next message, ProcessEnded where the process is gone; raise _Deadline at `until`."""
        assert self._channel is not None
        try:
            if not self._channel.poll(max(0.0, until - time.monotonic())):
                raise _Deadline
            message: object = self._channel.recv()
        except (EOFError, OSError, pickle.UnpicklingError):  # it ended in the middle of a message
            message = ProcessEnded(-signal.SIGKILL)
            self._forget_guard()
        if isinstance(message, ProcessEnded):
            self._channel.close()
            self._channel = None
        return message

    def _end(self) -> None:
        """End the process, if it runs; the next call starts another."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        assert self._control is not None
        try:
            self._control.send(b"-")
        except OSError:
            self._forget_guard()

    def _crashed(self, ended: ProcessEnded, size: int) -> RewardFailure:
        what = f"{size} completions" if size > 1 else "a completion"
        return RewardFailure(
            "crashed",
            f"the process of reward {self.name!r} {_how(ended.code)} while it scored {what}",
        )

    def _start_guard(self) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        arguments.append(json.dumps(self._imports))
        with theirs:
            guard = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the run's, which ends the guard
            )
        self._control, self._guard = ours, guard
        weakref.finalize(self, _end_guard, ours, guard)

    def _forget_guard(self) -> None:
        """End the guard, so that the next call starts another."""
        if self._control is not None and self._guard is not None:
            _end_guard(self._control, self._guard)
        self._control = self._guard = None


def _end_guard(control: socket.socket, guard: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        guard.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        with suppress(subprocess.TimeoutExpired):  # killed, it can only be in the kernel's hands
            guard.wait(_CLOSE_S)


def _environment() -> dict[str, str]:
    """This process's, with as many threads for torch, and one order of sets of strings."""
    torch = sys.modules.get("torch")
    threads = {} if torch is None else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return {"PYTHONHASHSEED": "0"} | os.environ | threads


def _patience(timeout_s: float, deadline: float, alone: int) -> float:
    """Seconds without a word after which a process is held to be stuck, its lock held by C code.

    `alone` is the number of rows that are still to be tried alone: each gets its share.
    """
    patience = min(max(2.0, timeout_s / TURNS), timeout_s / 2)
    if alone:
        patience = min(patience, (deadline - time.monotonic()) / (alone + 1))
    return max(patience, 0.01)


def _how(code: int) -> str:
    """How a process ended, by its exit status or minus the number of a signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
