"""What runs in a sandbox, as its first process: it builds the walls, then runs programs in them.

    owner → `main` (waits) → `_serve` (first process of the namespaces) → a process a program

Only the standard library, and what lies beside this file. Requests and answers are messages of
`programs`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any

from engine.rewards.sandbox import programs, walls

_ALONE = 1_000_000  # users from here on are those of sandboxes
_DRAIN = 1 << 16


def main(control_fd: int, program_fd: int) -> None:
    """Answer the owner at `control_fd`; `program_fd` is the channel of programs that are called."""
    control = socket.socket(fileno=control_fd)
    setup = programs.receive(control, 60.0)
    walls.die_with_parent()
    uid = _ALONE + os.getpid()
    layers = {"namespaces": setup["walls"]["namespaces"] and walls.new_namespaces()}
    walls.hide()
    child = os.fork() if layers["namespaces"] else 0
    if child:
        control.close()
        os.close(program_fd)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    try:
        walls.die_with_parent()
        layers["root"] = layers["namespaces"] and walls.own_root(setup["folder"], setup["disk_mb"])
        if not layers["root"]:
            os.chdir(setup["folder"])
        _serve(_Sandbox(control, program_fd, setup, layers, uid))
    except programs.Closed:  # the owner has gone
        pass
    os._exit(0)


class _Sandbox:
    """The sandbox of this process: its channels, settings and walls."""

    def __init__(
        self,
        control: socket.socket,
        program_fd: int,
        setup: dict[str, Any],
        layers: dict[str, bool],
        uid: int,
    ) -> None:
        self.control, self.program_fd, self.setup = control, program_fd, setup
        self.layers, self.uid = layers, uid
        self.asked_walls = setup["walls"]

    def confine(self, report_fd: int) -> None:
        """Put the walls around this process; report which ones the host has given."""
        setup, layers = self.setup, self.layers
        private = self.asked_walls["user"] and (os.geteuid() == 0 or layers["namespaces"])
        if not layers["root"] and os.geteuid() == 0:
            os.chown(setup["folder"], self.uid, self.uid)
        layers["user"] = self.asked_walls["user"] and walls.other_user(self.uid)
        walls.die_with_parent()
        walls.limit(
            setup["memory_mb"], setup["cpu_s"], setup["disk_mb"], setup["threads"] * private
        )
        layers["landlock"] = (
            not layers["root"] and self.asked_walls["landlock"] and walls.landlock(setup["folder"])
        )
        layers["seccomp"] = self.asked_walls["seccomp"] and walls.restrict()
        os.write(report_fd, "".join("01"[bool(layers[name])] for name in programs.LAYERS).encode())
        os.close(report_fd)


def _serve(sandbox: _Sandbox) -> None:
    while True:
        request = programs.receive(sandbox.control, 3600.0)
        programs.send(sandbox.control, _run(sandbox, request))


def _run(sandbox: _Sandbox, request: dict[str, Any]) -> dict[str, object]:
    """Run one program to its end, or to its deadline; what it wrote, and how it ended."""
    report, report_write = os.pipe()
    output, output_write = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if not child:
        try:
            os.close(report)
            os.close(output)
            sandbox.control.close()
            programs.connect(request, output_write)
            sandbox.confine(report_write)
            programs.run(request, sandbox.program_fd)
        finally:
            os._exit(1)
    os.close(report_write)
    os.close(output_write)
    if request["kind"] != "stdin":  # the other end must learn when the program has ended
        os.close(sandbox.program_fd)
    text, ended = _watch(child, output, start + request["wall_s"], sandbox.setup["output_bytes"])
    status = _end(child)
    given = os.read(report, len(programs.LAYERS)).decode()
    os.close(report)
    os.close(output)
    if sandbox.layers["namespaces"]:
        _end_all()
    return {
        "output": text.decode("utf-8", "replace"),
        "ended": ended,  # by itself, or cut at a limit
        "status": status,
        "seconds": time.monotonic() - start,
        "layers": dict(zip(programs.LAYERS, (bit == "1" for bit in given), strict=False)),
    }


def _watch(child: int, output: int, until: float, most: int) -> tuple[bytes, str]:
    """Read what a program writes until it ends, is late, or has written `most` bytes."""
    parts: list[bytes] = []
    size = 0
    end = os.pidfd_open(child)
    sources = [output, end]
    try:
        while True:
            ready, _, _ = select.select(sources, [], [], max(0.0, until - time.monotonic()))
            if output in ready:
                some = os.read(output, _DRAIN)
                parts.append(some)
                size += len(some)
                if size > most:
                    return b"".join(parts)[:most], "output"
                if not some:  # closed: only the end of the program is of interest now
                    sources = [end]
            elif end in ready:
                return b"".join(parts), "itself"
            if time.monotonic() >= until:
                return b"".join(parts), "late"
    finally:
        os.close(end)


def _end(child: int) -> int:
    """Make sure that a program has ended; its exit status, or minus the number of a signal."""
    os.kill(child, signal.SIGKILL)  # of one that has ended already, a zombie, nothing changes
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _end_all() -> None:
    """Kill what a program left behind; as the namespace's first process this one is spared."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # nothing is there
        return
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
