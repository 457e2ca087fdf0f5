"""Interpreters that are forks of one process in which the tests and their libraries are loaded.

To load them takes 20 s of CPU time, which each of pytest-xdist's processes would spend, and a
command of ours some seconds. `start_loader` starts the one that loads. A client, started like an
interpreter with `interpreter()` in place of `sys.executable`, hands its arguments, variables,
folder and streams to a fork of it, passes signals on, and ends as the fork does. If the client is
killed, so is the fork. Not for what is to see a process's imports, its children or random hashes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    import pytest

freeze, unfreeze = gc.freeze, gc.unfreeze  # which `conftest` replaces

_ADDRESS = "HYBRIDFLYTE_TESTS_LOADER"
_LOADING_S = 300.0
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}  # some tests train one when they are loaded
_TASKS = "/proc/self/task"
# What tests load when they run, slowly beside all else: wandb looks through all modules.
_LOADED_LATER = (
    "mlflow.server.fastapi_app",
    "scipy.signal",
    "wandb.sdk.launch.inputs.internal",
)
# jemalloc, in pyarrow, holds its locks during a fork; flytekit's loop is idle, one for a process.
_ABLE_TO_FORK = ("jemalloc_bg_thd", "MainThread : loop-runner")
_LOAD = "import sys; sys.path[:] = {path!r}; import forks; forks.run(forks.serve())"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
ENDED = "The fork ended with"


def start_loader(arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start to load the tests that pytest finds by `arguments`; from now on `interpreter` forks.

    The process ends when its stdin is closed.
    """
    import subprocess

    os.environ[_ADDRESS] = str(folder / "loader")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[_ADDRESS])
        listener.listen()
        path = [os.path.dirname(__file__), *sys.path]
        return subprocess.Popen(
            [sys.executable, "-c", _LOAD.format(path=path), str(listener.fileno()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=_ONE_THREAD | os.environ,
            pass_fds=[listener.fileno()],
        )


def interpreter(errors: Path | None = None) -> list[str]:
    """The command of an interpreter: a fork where a loader was started, else one of its own.

    A file `errors` takes a fork's stderr, and how it ended if not with status 0.
    """
    address = os.environ.get(_ADDRESS)
    if not address:
        return [sys.executable]
    return [sys.executable, "-I", "-S", __file__, address, str(errors or "")]


# The client


def join(address: str, errors: str, arguments: list[str]) -> NoReturn:
    """Have a fork run Python's command line `arguments` in this process's place."""
    stderr = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if errors else 2
    with socket.socket(socket.AF_UNIX) as loader:
        try:
            loader.settimeout(_LOADING_S + 30.0)
            loader.connect(address)
            request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
            socket.send_fds(loader, [len(request).to_bytes(4, "little")], [0, 1, stderr])
            loader.sendall(request)
            _, forks, _, _ = socket.recv_fds(loader, 1, 1)
            if not forks:
                raise EOFError("it has ended")
            loader.settimeout(None)
        except (EOFError, OSError) as error:
            sys.exit(f"no fork of the process that loads the tests, see above: {error!r}")
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: signal.pidfd_send_signal(forks[0], number))
        for stream in (0, 1, 2):
            os.close(stream)
        status = int.from_bytes(_receive(loader, 4), "little", signed=True)
    if errors and status:
        how = signal.strsignal(-status) if status < 0 else f"status {status}"
        os.write(stderr, f"{ENDED} {how}\n".encode())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("the process that loads the tests has ended")
        received += part
    return received


# The loader


def serve() -> Callable[[], object]:
    """Load, then fork for each client. Returns in a fork: what it has to do."""
    import pytest

    listener = socket.socket(fileno=int(sys.argv[1]))
    library = [p for p in sys.path if p.startswith((sys.prefix, sys.base_prefix))]
    faulthandler.dump_traceback_later(_LOADING_S, exit=True)
    threads = _Threads()
    # Uncaptured: libraries keep the streams that they find when they are imported.
    pytest.main([*sys.argv[2:], "-n0", "--collect-only", "-s"], plugins=[threads])
    for name in _LOADED_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _read_constants()
    faulthandler.cancel_dump_traceback_later()
    threads.refuse()
    clients: dict[int, tuple[int, socket.socket]] = {}  # by a file descriptor of the fork; its id
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        waiting = [client for _, client in clients.values()]
        ready = select.select([0, listener, *clients, *waiting], [], [])[0]
        if 0 in ready:
            os._exit(0)
        for fork, (pid, client) in list(clients.items()):
            if fork in ready:
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # it has been killed
                    code = os.waitstatus_to_exitcode(status)
                    client.sendall(code.to_bytes(4, "little", signed=True))
                del clients[fork]
                os.close(fork)
                client.close()
            elif client in ready:
                signal.pidfd_send_signal(fork, signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            size, streams, _, _ = socket.recv_fds(client, 4, 3)
            request = json.loads(_receive(client, int.from_bytes(size, "little")))
            pid = os.fork()
            if pid == 0:
                for handle in (listener, client, *waiting):
                    handle.close()
                for fork in clients:
                    os.close(fork)
                return _become(streams, library, *request)
            fork = os.pidfd_open(pid)
            clients[fork] = pid, client
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(OSError):  # it has been killed
                socket.send_fds(client, [b"+"], [fork])


class _Threads:
    """A plugin of pytest that knows which test files start threads when they are imported.

    A fork has none of them, but the locks that they held, for which it might wait without end.
    """

    def __init__(self) -> None:
        self.started_by = dict.fromkeys(os.listdir(_TASKS), "pytest")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        for thread in os.listdir(_TASKS):
            self.started_by.setdefault(thread, report.nodeid)

    def refuse(self) -> None:
        """End this process if it has threads of libraries that do not provide for forks."""
        if (pid := os.fork()) == 0:  # OpenBLAS ends its threads before a fork
            os._exit(0)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + 2.0
        while (found := _unable_to_fork()) and time.monotonic() < deadline:
            time.sleep(0.01)  # one that has been told to end, as faulthandler's, may be there still
        if found:
            thread, name = next(iter(found.items()))
            sys.exit(
                f"loading {self.started_by.get(thread) or 'conftest.py'} starts a thread, "
                f"{name}, and what is loaded is forked to run the tests: start it in a test, "
                "or run pytest with -n0"
            )


def _unable_to_fork() -> dict[str, str]:
    """Names of this process's other threads by their ids, but for those of `_ABLE_TO_FORK`."""
    of_python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    names = {}
    for thread in set(os.listdir(_TASKS)) - {str(os.getpid())}:
        with contextlib.suppress(OSError), open(f"{_TASKS}/{thread}/comm") as file:  # it has ended
            names[thread] = of_python.get(thread) or file.read().strip()
    return {thread: name for thread, name in names.items() if name not in _ABLE_TO_FORK}


def _read_constants() -> None:
    """Have hypothesis read the constants of our modules, as it does before its first example."""
    from hypothesis import given, settings, strategies

    @settings(max_examples=1, database=None)
    @given(strategies.integers())
    def try_one(number: int) -> None:
        assert isinstance(number, int)

    try_one()


def _become(
    streams: list[int],
    library: list[str],
    arguments: list[str],
    variables: dict[str, str],
    folder: str,
) -> Callable[[], object]:
    """Take over what the client has; return the program."""
    os.setsid()  # signals come from the client
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(_ONE_THREAD | variables)
    os.chdir(folder)
    if arguments[0] == "-u":  # as execnet starts it, which writes without a buffer
        del arguments[0]
    more = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    return _program(arguments, [*more, *library])


def _program(arguments: list[str], path: list[str]) -> Callable[[], object]:
    import runpy
    import types

    kind, *rest = arguments
    if kind == "-c":
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        code, sys.argv[:], sys.path[:] = rest[0], ["-c", *rest[1:]], ["", *path]
        return lambda: exec(compile(code, "<string>", "exec"), vars(main))
    if kind == "-m":
        for name in (rest[0], f"{rest[0]}.__main__"):
            if not hasattr(sys.modules.get(name), "__path__"):  # runpy warns of a loaded module
                sys.modules.pop(name, None)
        sys.argv[:], sys.path[:] = ["-m", *rest[1:]], [os.getcwd(), *path]
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv[:], sys.path[:] = arguments, [os.path.dirname(os.path.abspath(kind)), *path]
    return lambda: runpy.run_path(kind, run_name="__main__")


def run(program: Callable[[], object]) -> NoReturn:
    """End as an interpreter does, but without freeing what was loaded, which takes seconds."""
    status: object = None
    try:
        program()
    except SystemExit as ended:
        status = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(unfreeze)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    code = status if isinstance(status, int) else int(status is not None)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    join(sys.argv[1], sys.argv[2], sys.argv[3:])
