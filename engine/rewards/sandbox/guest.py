"""What runs in a sandbox, as its first process: it contains itself, then runs programs.

    owner → `main` (waits) → its fork (first process of the namespaces) → a process a program

Only the standard library, and what lies beside this file. Requests and answers are messages of
`programs`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any

from engine.rewards.sandbox import containment, programs

_FIRST_UID = 1_000_000  # users from here on are those of sandboxes
_DRAIN = 1 << 16


def main(control_fd: int, program_fd: int) -> None:
    """Answer the owner at `control_fd`; `program_fd` is the channel of programs that are called."""
    control = socket.socket(fileno=control_fd)
    setup = programs.receive(control, 60.0)
    containment.die_with_parent()
    setup["uid"] = _FIRST_UID + os.getpid()
    given = set[str]()  # layers of containment that the host gives
    if "namespaces" in setup["layers"] and containment.new_namespaces():
        given.add("namespaces")
    containment.hide()
    child = os.fork() if given else 0
    if child:
        control.close()
        os.close(program_fd)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    try:
        containment.die_with_parent()
        if given and containment.own_root(setup["folder"], setup["disk_mb"]):
            given.add("root")
        else:
            os.chdir(setup["folder"])
        while True:
            request = programs.receive(control, 3600.0)
            programs.send(control, _run(request, setup, given, control, program_fd))
    except programs.Closed:  # the owner has gone
        pass
    os._exit(0)


def _run(
    request: dict[str, Any],
    setup: dict[str, Any],
    given: set[str],
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
            programs.connect(request, output_write)
            layers = _contain(setup, given)
            os.write(report_write, " ".join(["contained", *layers]).encode())
            os.close(report_write)
            programs.run(request, program_fd)
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
    if "namespaces" in given:
        _end_all()
    return {
        "output": text.decode("utf-8", "replace"),
        "how": how,
        "status": os.waitstatus_to_exitcode(status),
        "layers": contained[1:] if contained else None,
    }


def _contain(setup: dict[str, Any], given: set[str]) -> list[str]:
    """Contain this process; the layers that the host has given."""
    asked, folder, uid = setup["layers"], setup["folder"], setup["uid"]
    given = set(given)
    threads = setup["threads"] if "user" in asked and (os.geteuid() == 0 or given) else 0
    if "root" not in given and os.geteuid() == 0:
        os.chown(folder, uid, uid)
    if "user" in asked and containment.other_user(uid):
        given.add("user")
    containment.die_with_parent()
    containment.limit(setup["memory_mb"], setup["cpu_s"], setup["disk_mb"], threads)
    if "root" not in given and "landlock" in asked and containment.landlock(folder):
        given.add("landlock")
    if "seccomp" in asked and containment.restrict():
        given.add("seccomp")
    return [layer for layer in containment.LAYERS if layer in given]


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
