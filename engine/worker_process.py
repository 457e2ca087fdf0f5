"""A process, or a thread, for code that may misbehave: rewards and environments of users.

The run holds a `WorkerProcess`, and exchanges pickled messages with a service in it, each with a
deadline. Between them stands a guard, a process with one thread, which runs no code of users and so
can't hang. It forks the worker and relays its stderr. All orphans below the guard become its
children: none outlives the worker, and nothing the run. Imports neither torch nor pydantic.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec, Protocol, TypeVar

import psutil

from engine.errors import ConfigError, EngineError, WorkerError

P = ParamSpec("P")
T = TypeVar("T")

START_S = 600.0  # a module may import what takes long
_CLOSE_S = 15.0
_MESSAGE_S = 5.0  # that a message may take from its first byte to its last
_KILL_S = 10.0  # how long a killed process may stay before it is given up
_STDERR_BYTES = 4000  # of a worker's stderr that are kept for errors
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
_GUARD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from engine.worker_process import run_guard; "
    "run_guard(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4], json.loads(sys.argv[5]))"
)


class Service(Protocol):
    """What a worker does: made by `open_service(load, channel)`, which may raise EngineError."""

    loaded: object  # answers the load

    def run(self) -> None:
        """Answer requests until the other end of the channel closes."""


OpenService = Callable[[Any, Connection], Service]


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The last message of a worker: it has ended, and so has all that it left behind."""

    how: str  # e.g. "ended with exit status 3"
    stderr: str = ""  # the end of what it wrote there


class TooLate(Exception):
    """No message came in time."""


# One call on a daemon thread, for which Python doesn't wait at its exit. Nothing can stop a plain
# function in this process: one that hangs is given up, and stays on its thread until it returns.


def on_daemon_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call a function on a thread of its own; whatever it raises is the future's."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # SystemExit, say, must not end more than the call
            future.set_exception(error)

    threading.Thread(target=work, name=getattr(function, "__name__", ""), daemon=True).start()
    return future


# The run's side.


class WorkerProcess:
    """One process at a time, which answers messages; one that has ended can be started again."""

    def __init__(self, name: str, open_service: str, imports: tuple[str, ...] = ()) -> None:
        """`name` is what errors call it; `open_service` makes its service, as `module:function`.

        `imports` are modules, none of a user's, that the guard loads once for all workers.
        """
        self._name, self._open_service, self._imports = name, open_service, imports
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None

    @property
    def running(self) -> bool:
        """Whether it was started, and no word of its end has been received."""
        return self._channel is not None

    def start(self, load: object) -> object:
        """Start the process; return what its service answers to `load`.

        Raises the service's own error as ConfigError, and WorkerError where none answers.
        """
        if self._control is None:
            self._start_guard()
        assert self._control is not None
        run_end, worker_end = socket.socketpair()
        with worker_end:
            socket.send_fds(self._control, [b"+"], [worker_end.fileno()])
        self._channel = Connection(run_end.detach())
        self._limit(socket.SO_RCVTIMEO, _MESSAGE_S)
        until = time.monotonic() + START_S
        try:
            self.send(load, until)
            answer = self.receive(until)
            if isinstance(answer, ConfigError):
                raise answer
            if isinstance(answer, ProcessEnded):
                raise WorkerError(
                    f"the process of {self._name} {answer.how} while it imported its module; "
                    "correct what runs on import"
                )
        except BaseException as error:
            self.end()
            if not isinstance(error, TooLate):
                raise
            raise WorkerError(
                f"{self._name} was not loaded within {START_S:g} s; let its module import less"
            ) from None
        return answer

    def send(self, message: object, until: float) -> None:
        """Send a message; one that is not taken by `until`, by a stopped process say, is cut."""
        assert self._channel is not None
        self._limit(socket.SO_SNDTIMEO, max(0.01, until - time.monotonic()))
        with suppress(OSError):  # it ended or is late, which is what `receive` says next
            self._channel.send(message)

    def receive(self, until: float) -> object:
        """The next message, ProcessEnded where the process is gone; raise TooLate at `until`."""
        assert self._channel is not None
        message: object
        try:
            if not self._channel.poll(max(0.0, until - time.monotonic())):
                raise TooLate
            message = self._channel.recv()
        except TooLate:
            raise
        except BlockingIOError:  # after a part of a message
            self.end()
            raise TooLate from None
        except (EOFError, ConnectionError):  # with its guard
            message = ProcessEnded("was lost")
            self._end_guard()
        except Exception as error:  # its bytes are no message of ours
            message = ProcessEnded(f"sent what can't be read ({type(error).__name__})")
            self._end_guard()
        if isinstance(message, ProcessEnded):
            self._channel.close()
            self._channel = None
        return message

    def wait(self, other: Connection, until: float) -> None:
        """Wait for a message, for one of `other`, or until `until`."""
        sources = [other] if self._channel is None else [other, self._channel]
        wait(sources, max(0.0, until - time.monotonic()))

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
            self._end_guard()

    def close(self) -> None:
        """End the process, all that it left behind, and the guard."""
        self.end()
        self._end_guard()

    def _limit(self, option: int, seconds: float) -> None:
        """Let sends or receives of the channel fail that take longer."""
        assert self._channel is not None
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._channel.fileno())) as channel:
            channel.setsockopt(socket.SOL_SOCKET, option, limit)

    def _start_guard(self) -> None:
        run_end, guard_end = socket.socketpair()
        arguments = [str(guard_end.fileno()), str(os.getpid()), json.dumps(sys.path)]
        arguments += [self._open_service, json.dumps(self._imports)]
        torch = sys.modules.get("torch")
        threads = {} if torch is None else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with guard_end:
            guard = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[guard_end.fileno()],
                env={"PYTHONHASHSEED": "0"} | os.environ | threads,  # one order of sets of strings
                start_new_session=True,  # Ctrl-C is the run's, which ends the guard
            )
        self._control, self._guard = run_end, guard
        weakref.finalize(self, _wait_for_guard, run_end, guard)

    def _end_guard(self) -> None:
        """End the guard, so that the next start makes another."""
        if self._control is not None and self._guard is not None:
            _wait_for_guard(self._control, self._guard)
        self._control = self._guard = None


def _wait_for_guard(control: socket.socket, guard: subprocess.Popen[bytes]) -> None:
    control.close()  # which ends it
    try:
        guard.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        with suppress(subprocess.TimeoutExpired):  # killed, it can only be in the kernel's hands
            guard.wait(_CLOSE_S)


# The guard.


def run_guard(control_fd: int, run_pid: int, open_service: str, imports: Sequence[str]) -> None:
    """Serve the run: a descriptor that comes over `control_fd` is the channel of a new worker.

    It ends the worker before it, and so does a byte without a descriptor.
    """
    module, _, function = open_service.partition(":")
    opener: OpenService = getattr(importlib.import_module(module), function)
    for module in imports:
        importlib.import_module(module)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=control_fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    run = _pidfd(run_pid)
    worker: _Worker | None = None
    while True:
        errors = [] if worker is None or worker.stderr_closed else [worker.stderr_fd]
        ready, _, _ = select.select([control.fileno(), woken, *run, *errors], [], [])
        if worker is not None and worker.stderr_fd in ready:
            worker.relay_stderr()
        if woken in ready:
            os.read(woken, 4096)
            status = _reap(0 if worker is None else worker.pid)
            if status is not None and worker is not None:
                _end_children()
                worker.tell_end(status)
                worker = None
        if control.fileno() in ready:
            word, channels, *_ = socket.recv_fds(control, 1, 1)
            _end_children()
            if worker is not None:
                worker.close()
                worker = None
            if not word:
                return
            if channels:
                worker = _Worker(channels[0], control, opener)
        elif run and run[0] in ready:  # the run was killed
            _end_children()
            return


class _Worker:
    """A forked worker, as its guard sees it."""

    def __init__(self, channel: int, control: socket.socket, opener: OpenService) -> None:
        self._channel = channel
        self.stderr_fd, write_fd = os.pipe()
        self.stderr_closed = False
        self._stderr = b""
        guard_pid = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(write_fd, 2)
            for fd in (write_fd, self.stderr_fd):
                os.close(fd)
            control.close()
            _run_worker(channel, guard_pid, opener)
        os.close(write_fd)
        os.set_blocking(self.stderr_fd, False)

    def relay_stderr(self) -> bool:
        """Pass on some of what the worker has written, and keep the end; whether there was any."""
        try:
            text = os.read(self.stderr_fd, 1 << 16)
        except BlockingIOError:
            return False
        self.stderr_closed = not text
        self._stderr = (self._stderr + text)[-_STDERR_BYTES:]
        with suppress(OSError):  # nobody reads the guard's
            os.write(2, text)
        return bool(text)

    def tell_end(self, status: int) -> None:
        """Send the last message of the channel, and close it."""
        while self.relay_stderr():  # it has ended, and so has this
            continue
        code = os.waitstatus_to_exitcode(status)
        names = {int(number): number.name for number in signal.Signals}
        by = names.get(-code, f"signal {-code}")
        how = f"ended with exit status {code}" if code >= 0 else f"was ended by {by}"
        with suppress(OSError), Connection(os.dup(self._channel)) as channel:  # the run may be gone
            channel.send(ProcessEnded(how, self._stderr.decode("utf-8", "replace").strip()))
        self.close()

    def close(self) -> None:
        os.close(self._channel)
        os.close(self.stderr_fd)


def _run_worker(channel_fd: int, guard_pid: int, opener: OpenService) -> None:
    """Serve in a process that was just forked, and end it."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL)
        os.setsid()
        faulthandler.enable()
        if os.getppid() == guard_pid:
            _serve(Connection(channel_fd), opener)
        code = 0
    except BaseException:  # a fork must not go on as the guard
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _serve(channel: Connection, opener: OpenService) -> None:
    try:
        service = opener(channel.recv(), channel)
    except EngineError as error:
        channel.send(ConfigError(str(error)))
        return
    except EOFError:
        return
    channel.send(service.loaded)
    service.run()


def _reap(worker: int) -> int | None:
    """Collect children that have ended; return the status of `worker` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = ended[1]
    return status


def _end_children() -> None:
    """Kill the children and all that become children by it, until there are none."""
    deadline = time.monotonic() + _KILL_S
    guard = psutil.Process()
    while (children := guard.children()) and time.monotonic() < deadline:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        _reap(0)
        time.sleep(0.001)


def _pidfd(pid: int) -> list[int]:
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):  # without it, the end of `control` says that the run is gone
        return []


def end_with_parent(number: signal.Signals) -> None:
    """Let this process get a signal when its parent ends (Linux)."""
    _prctl(_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
