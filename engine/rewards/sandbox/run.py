"""Sandboxes from outside: start one, run programs in it, end it with all that is in it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import engine.rewards.sandbox
from engine.errors import RewardError
from engine.rewards.sandbox import programs

_START_S = 20.0
# Empty packages stand in for ours, whose own imports a guest has no use for.
_START = (
    "import json, sys, types\n"
    "for name, path in json.loads(sys.argv[1]).items():\n"
    "    module = types.ModuleType(name); module.__path__ = [path]; sys.modules[name] = module\n"
    "from engine.rewards.sandbox.guest import main\n"
    "main(int(sys.argv[2]), int(sys.argv[3]))\n"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    memory_mb: int = 512  # address space
    disk_mb: int = 16  # of its own folder, and of each file
    output_bytes: int = 1 << 20
    cpu_s: int = 60
    threads: int = 64


@dataclass(frozen=True, slots=True)
class Walls:
    """Which walls are asked for; what the host doesn't give is missing."""

    namespaces: bool = True
    user: bool = True
    landlock: bool = True
    seccomp: bool = True


LIMITS, ALL = Limits(), Walls()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    output: str  # of standard output, at most `Limits.output_bytes`
    how: str  # "itself", or what it was cut for: "late", "output", "lost" with the sandbox
    status: int  # exit status, or minus a signal's number
    seconds: float
    layers: dict[str, bool]  # walls that the host gave, by name; empty for "lost"

    @property
    def well(self) -> bool:
        """Whether it ended by itself, and without an error."""
        return self.how == "itself" and self.status == 0


LOST = Ended("", "lost", -9, 0.0, {})


class Sandbox:
    """A sandbox for programs that run one after the other; a context manager.

    `channel` is one end of a socket pair over which a served program is called, or a tester calls.
    """

    def __init__(
        self,
        limits: Limits = LIMITS,
        walls: Walls = ALL,
        channel: socket.socket | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise RewardError("programs are run on Linux only, where they can be locked in")
        self._folder = tempfile.mkdtemp(prefix="sandbox-")
        self._control, guest_end = socket.socketpair()
        spare, program = socket.socketpair() if channel is None else (None, channel)
        path = Path(engine.rewards.sandbox.__file__).parent
        packages = {
            "engine": path.parents[1],
            "engine.rewards": path.parent,
            "engine.rewards.sandbox": path,
        }
        names = json.dumps({name: str(folder) for name, folder in packages.items()})
        python = [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B", "-c", _START]
        with guest_end:
            self._process = subprocess.Popen(
                [*python, names, str(guest_end.fileno()), str(program.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[guest_end.fileno(), program.fileno()],
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                cwd=self._folder,
                start_new_session=True,
            )
        for end in (spare, program):
            if end is not None:
                end.close()
        setup = {name: getattr(limits, name) for name in Limits.__slots__}
        setup |= {"walls": {name: getattr(walls, name) for name in Walls.__slots__}}
        with suppress(programs.Closed):  # it has ended, which `run` says
            programs.send(self._control, setup | {"folder": self._folder}, _START_S)

    def begin(self, kind: str, code: str, wall_s: float, **details: object) -> None:
        """Start a program: kind `stdin`, `served` or `tests` (see `programs`)."""
        self._deadline = time.monotonic() + wall_s + _START_S
        request = {"kind": kind, "code": code, "wall_s": wall_s} | details
        with suppress(programs.Closed):
            programs.send(self._control, request, _START_S)

    def end(self) -> Ended:
        """Wait for the program that was started; LOST where the sandbox is gone."""
        try:
            answer = programs.receive(self._control, self._deadline - time.monotonic())
            return Ended(
                str(answer["output"]),
                str(answer["ended"]),
                int(answer["status"]),
                float(answer["seconds"]),
                {str(name): bool(there) for name, there in answer["layers"].items()},
            )
        except programs.Closed:
            return LOST

    def run(self, code: str, wall_s: float, stdin: str = "") -> Ended:
        """Run a program that reads standard input and writes standard output."""
        self.begin("stdin", code, wall_s, stdin=stdin)
        return self.end()

    def close(self) -> None:
        """End what is in it, and remove its folder."""
        self._process.kill()
        self._process.wait()
        self._control.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
