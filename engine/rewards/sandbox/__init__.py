"""Programs that nobody trusts, run where they can do no harm.

A `Sandbox` is this side: it starts one, and speaks to it. In it, `guest` puts the layers of
`containment` around a process and runs a program. What guests import is the standard
library alone, as they see nothing else. The right answers never enter a sandbox together with a
program that is judged by them.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import RewardError
from engine.rewards.sandbox import guest
from engine.rewards.sandbox.containment import LAYERS

_START_S = 20.0
# Empty packages stand in for ours, whose own imports a guest has no use for.
_START = """
import sys, types
for name in ("engine", "engine.rewards", "engine.rewards.sandbox"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].__path__ = [sys.argv[1]]
from engine.rewards.sandbox.guest import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use, and the layers of containment that are asked for."""

    memory_mb: int = 512  # address space
    disk_mb: int = 16  # of its own folder, and of each file
    output_bytes: int = 1 << 20
    cpu_s: int = 60
    threads: int = 64
    layers: tuple[str, ...] = LAYERS  # those that the host doesn't give are missing


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    output: str  # of standard output, at most `Limits.output_bytes`
    how: str  # "itself", or what it was cut for: "late", "output", "lost" with the sandbox
    status: int  # exit status, or minus a signal's number
    layers: tuple[str, ...] | None  # of containment, that the host gave; None: it is not known

    @property
    def well(self) -> bool:
        """Whether it ended by itself, and without an error."""
        return self.how == "itself" and self.status == 0


class Sandbox(AbstractContextManager["Sandbox"]):
    """A sandbox for programs that run one after the other; a context manager.

    `channel` is one end of a socket pair over which a served program is called, or a tester calls.
    """

    def __init__(self, limits: Limits, channel: socket.socket | None = None) -> None:
        if sys.platform != "linux":
            raise RewardError("programs are run on Linux only, where they can be locked in")
        self._folder = tempfile.mkdtemp(prefix="sandbox-")
        self._control, guest_end = socket.socketpair()
        spare, program = socket.socketpair() if channel is None else (None, channel)
        python = [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B", "-c", _START]
        descriptors = [guest_end.fileno(), program.fileno()]
        self._process = subprocess.Popen(
            [*python, str(Path(__file__).parent), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            cwd=self._folder,
            start_new_session=True,
        )
        for end in (guest_end, spare, program):
            if end is not None:
                end.close()
        setup = asdict(limits) | {"folder": self._folder}
        with suppress(guest.Closed):  # it has ended, which `run` says
            guest.send(self._control, setup, _START_S)

    def begin(self, kind: str, code: str, wall_s: float, **details: object) -> None:
        """Start a program: kind `stdin`, `served` or `tests` (see `guest`)."""
        self._deadline = time.monotonic() + wall_s + _START_S
        request = {"kind": kind, "code": code, "wall_s": wall_s} | details
        with suppress(guest.Closed):
            guest.send(self._control, request, _START_S)

    def end(self) -> Ended:
        """Wait for the program that was started; it is "lost" where the sandbox is gone."""
        try:
            answer = guest.receive(self._control, self._deadline - time.monotonic())
        except guest.Closed:
            return Ended("", "lost", -9, None)
        layers = answer.pop("layers")
        return Ended(**answer, layers=None if layers is None else tuple(layers))

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

    def __exit__(self, *_: object) -> None:
        self.close()
