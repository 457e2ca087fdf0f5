"""A process for code of users, from the run's end: whatever it does there, the run goes on.

What lives here: its start and end, and messages with deadlines. `guard` stands between the two and
leaves nothing behind; what is served in the process is its user's (`process`, or environments).
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
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from engine.rewards.guard import ProcessEnded

START_S = 600.0  # a module may import what takes long
_CLOSE_S = 15.0
_GUARD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from engine.rewards.guard import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], json.loads(sys.argv[5]))"
)


class TooLate(Exception):
    """No message came in time."""


class GuardedProcess:
    """One process at a time, which answers messages; one that has ended can be started again."""

    def __init__(self, served: str, imports: tuple[str, ...] = ()) -> None:
        """`served` is the `module:function` that is called with the process's channel.

        `imports` are the engine's or a library's, never a user's: the guard loads them once, and
        each process has them at its start.
        """
        self._served, self._imports = served, imports
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None

    @property
    def running(self) -> bool:
        """Whether it was started, and no word of its end has been received."""
        return self._channel is not None

    @property
    def guard_pid(self) -> int:
        """The guard's process id; 0 before the first start."""
        return 0 if self._guard is None else self._guard.pid

    def wait(self, other: Connection, until: float) -> None:
        """Wait for a message, for one of `other`, or until `until`."""
        sources = [other] if self._channel is None else [other, self._channel]
        wait(sources, max(0.0, until - time.monotonic()))

    def start(self) -> None:
        """Start the process, and its guard if it isn't there."""
        if self._control is None:
            self._start_guard()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        self._channel = Connection(ours.detach())

    def send(self, message: object, until: float) -> None:
        """Send a message; one that is not taken by `until`, by a stopped process say, is cut."""
        assert self._channel is not None
        seconds = max(0.01, until - time.monotonic())
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._channel.fileno())) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with suppress(OSError):  # it ended or is late, which is what `receive` says next
            self._channel.send(message)

    def receive(self, until: float) -> object:
        """The next message, ProcessEnded where the process is gone; raise TooLate at `until`."""
        assert self._channel is not None
        try:
            if not self._channel.poll(max(0.0, until - time.monotonic())):
                raise TooLate
            message: object = self._channel.recv()
        except (EOFError, OSError, pickle.UnpicklingError):  # it ended in the middle of a message
            message = ProcessEnded(-signal.SIGKILL)
            self._forget_guard()
        if isinstance(message, ProcessEnded):
            self._channel.close()
            self._channel = None
        return message

    def end(self) -> None:
        """End the process, if it runs; it can be started again."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        assert self._control is not None
        try:
            self._control.send(b"-")
        except OSError:
            self._forget_guard()

    def close(self) -> None:
        """End the process, all that it left behind, and the guard."""
        self.end()
        self._forget_guard()

    def _start_guard(self) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        arguments += [self._served, json.dumps(self._imports)]
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


def how_ended(code: int) -> str:
    """How a process ended, by its exit status or minus the number of a signal."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


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
