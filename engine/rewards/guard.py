"""A guarded process for code that may misbehave, of rewards and of environments.

The guard, which ends the process with all that it leaves behind, and the run's side: start,
end, and messages with deadlines.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

import psutil

# The guard of a user's code: starts its process, and ends it with all that it leaves behind.
#
# The guard is a process of its own, between the run and a reward or an environment. It has one
# thread
# and runs no code of users, so it can't hang. All orphans below it become its children, whatever
# sessions they opened, and none of them outlives it. It ends with the run, however that ends.

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_KILL_S = 10.0  # how long a killed process may stay before it is given up

Serve: TypeAlias = Callable[[Connection], None]


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The guard's word that the process has ended, and all that it left behind."""

    code: int  # its exit status, or minus the number of a signal


def main(control_fd: int, run_pid: int, served: str, imports: Sequence[str] = ()) -> None:
    """Serve the run: each descriptor that comes over `control_fd` is the channel of a new process.

    The process before it is ended first. A byte without a descriptor ends it, too. `served` is the
    `module:function` that answers a process's channel; `imports` are further modules that each
    process has at its start.
    """
    module, _, name = served.partition(":")
    serve: Serve = getattr(importlib.import_module(module), name)
    for module in imports:
        importlib.import_module(module)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    run = _pidfd(run_pid)
    worker, channel = 0, -1
    while True:
        ready, _, _ = select.select([control.fileno(), woken, *run], [], [])
        if woken in ready:
            os.read(woken, 4096)
            status = _reap(worker)
            if status is not None:
                _end_children()
                _tell(channel, ProcessEnded(os.waitstatus_to_exitcode(status)))
                worker, channel = 0, -1
        if control.fileno() in ready:
            word, channels, *_ = socket.recv_fds(control, 1, 1)
            _end_children()
            if channel >= 0:
                os.close(channel)
            worker, channel = 0, -1
            if not word:
                return
            if channels:
                channel = channels[0]
                worker = _start(channel, control, serve)
        elif run and run[0] in ready:  # the run was killed
            _end_children()
            return


def _start(channel: int, control: socket.socket, serve: Serve) -> int:
    """Fork a process; return its id."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        if os.getppid() == guard:
            serve(Connection(channel))
        code = 0
    except BaseException:  # a fork must not go on as the guard
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _reap(worker: int) -> int | None:
    """Collect children that have ended; return the status of `worker` if it is among them."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                found = ended[1]
    except ChildProcessError:
        pass
    return found


def _end_children() -> None:
    """Kill the children and all that become children by it, until there are none."""
    deadline = time.monotonic() + _KILL_S
    me = psutil.Process()
    while (children := me.children()) and time.monotonic() < deadline:
        for child in children:
            try:
                os.kill(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap(0)
        time.sleep(0.001)


def _tell(channel: int, message: ProcessEnded) -> None:
    """Send the last message of a channel, and close it."""
    connection = Connection(channel)
    try:
        connection.send(message)
    except OSError:  # the run has closed it
        pass
    finally:
        connection.close()


def _pidfd(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):  # without it, the end of `control` says that the run is gone
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# A process for code of users, from the run's end: whatever it does there, the run goes on.
#
# What lives here: its start and end, and messages with deadlines. `guard` stands between the two
# and
# leaves nothing behind; what is served in the process is its user's (`process`, or environments).

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
