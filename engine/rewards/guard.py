"""The guard of a user's code: starts its process, and ends it with all that it leaves behind.

The guard is a process of its own, between the run and a reward or an environment. It has one thread
and runs no code of users, so it can't hang. All orphans below it become its children, whatever
sessions they opened, and none of them outlives it. It ends with the run, however that ends.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import psutil

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
