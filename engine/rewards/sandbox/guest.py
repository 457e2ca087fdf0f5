"""What runs in a sandbox: its first process, programs, and the messages to its owner.

    owner → `main` (waits) → its fork (first process of the namespaces) → a process a program

A program reads and writes, has its functions called, or tests another one. Only the standard
library, and what lies beside this file.
"""

import ast
import atexit
import builtins
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from engine.rewards.sandbox import containment

# Messages are frames of JSON, never pickle: what comes from a sandbox is anybody's.

LONGEST = 8 << 20  # bytes of a frame


class Closed(Exception):
    """Raised where the other end is gone, late, or sent what is no message."""


def send(channel: socket.socket, message: object, seconds: float = 60.0) -> None:
    """Send a message; raise Closed where it isn't taken in time."""
    data = json.dumps(message).encode()
    if len(data) > LONGEST:
        raise Closed("too long")
    channel.settimeout(max(0.001, seconds))
    try:
        channel.sendall(struct.pack("!I", len(data)) + data)
    except OSError as error:
        raise Closed(str(error)) from None


def receive(channel: socket.socket, seconds: float) -> Any:
    """The next message; raise Closed where none comes in time, or it is none."""
    until = time.monotonic() + seconds
    (length,) = struct.unpack("!I", _read(channel, 4, until))
    if length > LONGEST:
        raise Closed("too long")
    try:
        return json.loads(_read(channel, length, until))
    except (ValueError, RecursionError) as error:
        raise Closed(str(error)) from None


def _read(channel: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise Closed("late")
        try:
            part = channel.recv(min(count - len(data), 1 << 16))
        except OSError as error:
            raise Closed(str(error)) from None
        if not part:
            raise Closed("gone")
        data += part
    return data


_KINDS: dict[str, Any] = {"l": list, "t": tuple, "S": set, "F": frozenset}


def encode(value: object, other: Callable[[object], object]) -> object:
    """A value as JSON that `decode` reads; `other` makes JSON of what has no such form."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):  # whose decimal digits Python limits
        return ["i", hex(value)]
    if isinstance(value, bytes):
        return ["b", value.hex()]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, dict):
        return ["d", *([encode(k, other), encode(v, other)] for k, v in value.items())]
    for tag, kind in _KINDS.items():
        if isinstance(value, kind):
            return [tag, *(encode(entry, other) for entry in value)]
    return other(value)


def decode(coded: object, other: Callable[[Any], object]) -> Any:
    """The value of `encode`; raise ValueError for what is none."""
    if not isinstance(coded, list):
        return coded
    try:
        tag, entries = coded[0], coded[1:]
        if tag == "i":
            return int(entries[0], 16)
        if tag == "b":
            return bytes.fromhex(entries[0])
        if tag == "c":
            return complex(*entries)
        if tag == "d":
            return {decode(key, other): decode(entry, other) for key, entry in entries}
        if tag in _KINDS:
            return _KINDS[tag](decode(entry, other) for entry in entries)
        return other(coded)
    except (TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from None


# A tester has the tests and none of the judged code: what that defines, it calls in another sandbox
# through `Remote`, value by value. So judged code never meets the answers that are expected.

TESTS = (ast.Assert, ast.Expr)  # statements at the top level that are a test each
_PATIENCE_S = 3600.0  # deadlines are those of the sandbox


def _connect(request: dict[str, Any], output: int) -> None:
    """Give this process its standard input and output; errors are thrown away."""
    stdin = os.memfd_create("stdin")
    os.write(stdin, request.get("stdin", "").encode("utf-8", "replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    for source, target in ((stdin, 0), (output, 1), (os.open("/dev/null", os.O_WRONLY), 2)):
        os.dup2(source, target)
        if source > 2:
            os.close(source)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if descriptor else "r"
        stream = os.fdopen(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, stream)


def _run_program(request: dict[str, Any], program_fd: int) -> None:
    """Run the program of a request, and end this process."""
    sys.argv = ["solution.py"]
    channel = socket.socket(fileno=program_fd)
    code = 1
    try:
        if request["kind"] == "stdin":
            channel.close()
            _execute(request["code"], {"__name__": "__main__"})
        elif request["kind"] == "served":
            _serve(request["code"], channel)
        else:
            _test(request, channel)
        threading._shutdown()  # type: ignore[attr-defined]  # as at Python's end: wait for threads
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(code & 255)


def _execute(code: str, namespace: dict[str, object]) -> None:
    exec(compile(code, "solution.py", "exec"), namespace)


def _serve(code: str, channel: socket.socket) -> None:
    """Run code, tell the names that it defines, and do what the other end asks of them."""
    namespace: dict[str, object] = {"__name__": "solution"}
    _execute(code, namespace)
    objects: list[object] = []

    def reference(value: object) -> list[object]:
        objects.append(value)
        return ["o", len(objects) - 1]

    def object_of(coded: Any) -> Any:
        return objects[_reference_in(coded)[1]]

    send(channel, [name for name in namespace if not name.startswith("__")])
    while True:
        try:
            what, target, details = receive(channel, _PATIENCE_S)
        except Closed:
            return
        try:
            if what == "name":
                value = namespace[target]
            elif what == "get":
                value = getattr(object_of(target), details)
            else:
                arguments, words = decode(details, object_of)
                value = object_of(target)(*arguments, **words)
            answer = ["value", encode(value, reference)]
        except SystemExit:
            raise
        except BaseException as error:
            answer = ["error", type(error).__name__]
        send(channel, answer)


class Remote:
    """Something that judged code defines, in the sandbox where that runs."""

    def __init__(self, channel: socket.socket, reference: object) -> None:
        self.__dict__["_remote"] = (channel, reference)

    def __call__(self, *arguments: object, **words: object) -> object:
        channel, reference = self._remote
        return ask(channel, "call", reference, encode((arguments, words), reference_of))

    def __getattr__(self, name: str) -> Any:
        channel, reference = self._remote
        return ask(channel, "get", reference, name)


def ask(
    channel: socket.socket,
    what: str,
    target: object,
    details: object = None,
    until: float = math.inf,
) -> object:
    """Ask a served program; raise what it raised, as far as Python has that kind of error.

    Raises Closed where no answer comes by `until`, and for one that is none.
    """
    left = min(_PATIENCE_S, until - time.monotonic())
    send(channel, [what, target, details], left)
    reply = receive(channel, left)
    if not isinstance(reply, list) or len(reply) != 2:
        raise Closed("no answer")
    status, answer = reply
    if status == "value":
        return decode(answer, lambda coded: Remote(channel, _reference_in(coded)))
    kind = getattr(builtins, str(answer), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        raise RuntimeError(str(answer))
    raise kind("raised by the program")


def _reference_in(coded: Any) -> list[Any]:
    if not isinstance(coded, list) or coded[0] != "o":
        raise ValueError("no object")
    return coded


def reference_of(value: object) -> object:
    """The reference by which a served program knows an object of its own."""
    if isinstance(value, Remote):
        return value._remote[1]
    raise TypeError(f"{type(value).__name__} can't be given to a program")


def _test(request: dict[str, Any], channel: socket.socket) -> None:
    """Run the top-level statements of a request's tests; print as JSON whether each test passed."""
    verdict = sys.stdout
    sys.stdout = sys.stderr
    namespace: dict[str, object] = {"__name__": "tests"}
    passed: list[bool] = []
    statements = ast.parse(request["code"]).body
    count = sum(isinstance(statement, TESTS) for statement in statements)
    try:
        for name in receive(channel, _PATIENCE_S):
            namespace[str(name)] = ask(channel, "name", str(name))
        if request["candidate"]:
            namespace["candidate"] = namespace.get(request["candidate"])
        for statement in statements:
            ok = True
            try:
                exec(compile(ast.Module([statement], []), "tests.py", "exec"), namespace)
            except Closed:
                break
            except BaseException:
                ok = False
            if isinstance(statement, TESTS):
                passed.append(ok)
    except Closed:
        pass
    passed += [False] * (count - len(passed))
    verdict.write(json.dumps(passed))
    verdict.flush()


# The first process.

_FIRST_UID = 1_000_000  # users from here on are those of sandboxes
_DRAIN = 1 << 16


def main(control_fd: int, program_fd: int) -> None:
    """Answer the owner at `control_fd`; `program_fd` is the channel of programs that are called."""
    control = socket.socket(fileno=control_fd)
    setup = receive(control, 60.0)
    containment.die_with_parent()
    setup["uid"] = _FIRST_UID + os.getpid()
    layers = set[str]()  # of containment, that the host gives
    if "namespaces" in setup["layers"] and containment.new_namespaces():
        layers.add("namespaces")
    containment.hide()
    child = os.fork() if layers else 0
    if child:
        control.close()
        os.close(program_fd)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    try:
        containment.die_with_parent()
        if layers and containment.own_root(setup["folder"], setup["disk_mb"]):
            layers.add("root")
        else:
            os.chdir(setup["folder"])
        while True:
            request = receive(control, 3600.0)
            send(control, _run(request, setup, layers, control, program_fd))
    except Closed:  # the owner has gone
        pass
    os._exit(0)


def _run(
    request: dict[str, Any],
    setup: dict[str, Any],
    layers: set[str],
    control: socket.socket,
    program_fd: int,
) -> dict[str, object]:
    """Run one program to its end, or to its deadline; what it wrote, and how it ended."""
    report, report_write = os.pipe()
    output, output_write = os.pipe()
    until = time.monotonic() + request["wall_s"]
    child = os.fork()
    if not child:
        try:
            os.close(report)
            os.close(output)
            control.close()
            _connect(request, output_write)
            os.write(report_write, " ".join(["contained", *_contain(setup, layers)]).encode())
            os.close(report_write)
            _run_program(request, program_fd)
        finally:
            os._exit(1)
    os.close(report_write)
    os.close(output_write)
    if request["kind"] != "stdin":  # the other end must learn when the program has ended
        os.close(program_fd)
    text, how = _watch(child, output, until, setup["output_bytes"])
    os.kill(child, signal.SIGKILL)  # of one that has ended already, a zombie, nothing changes
    _, status = os.waitpid(child, 0)
    contained = os.read(report, 1024).decode().split()
    os.close(report)
    os.close(output)
    if "namespaces" in layers:
        _end_all()
    return {
        "output": text.decode("utf-8", "replace"),
        "how": how,
        "status": os.waitstatus_to_exitcode(status),
        "layers": contained[1:] if contained else None,
    }


def _contain(setup: dict[str, Any], layers: set[str]) -> list[str]:
    """Contain this process; the layers that it has then."""
    requested, folder, uid = setup["layers"], setup["folder"], setup["uid"]
    layers = set(layers)
    threads = setup["threads"] if "user" in requested and (os.geteuid() == 0 or layers) else 0
    if "root" not in layers and os.geteuid() == 0:
        os.chown(folder, uid, uid)
    if "user" in requested and containment.other_user(uid):
        layers.add("user")
    containment.die_with_parent()
    containment.limit(setup["memory_mb"], setup["cpu_s"], setup["disk_mb"], threads)
    if "root" not in layers and "landlock" in requested and containment.landlock(folder):
        layers.add("landlock")
    if "seccomp" in requested and containment.restrict():
        layers.add("seccomp")
    return [layer for layer in containment.LAYERS if layer in layers]


def _watch(child: int, output: int, until: float, most: int) -> tuple[bytes, str]:
    """Read what a program writes until it ends, is late, or has written `most` bytes."""
    text = b""
    end = os.pidfd_open(child)
    sources = [output, end]
    try:
        while True:
            ready, _, _ = select.select(sources, [], [], max(0.0, until - time.monotonic()))
            if output in ready:
                part = os.read(output, _DRAIN)
                text += part
                if len(text) > most:
                    return text[:most], "output"
                if not part:  # closed: only the end of the program is of interest now
                    sources = [end]
            elif end in ready:
                return text, "itself"
            if time.monotonic() >= until:
                return text, "late"
    finally:
        os.close(end)


def _end_all() -> None:
    """Kill what a program left behind; as the namespace's first process this one is spared."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):  # nothing is there any more
        return
