"""Contestants that take turns: each is a process that computes only while it is its turn.

`Contestant` is the parent's side. A contestant's program calls `Turn.wait` before each turn and
`Turn.done` after it, with what it measured inside; this module imports nothing but the standard
library there, as it also runs in another project's environment. While one computes the others sleep
in a read, so all meet the machine in the same state. CPU seconds and peak memory are those of the
contestant's whole process tree, read from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

MARK = "@turn "


class Turn:
    """The contestant's side, over its standard input and output."""

    def __init__(self) -> None:
        # Other prints of the process must not get between: they go where errors go.
        self._out: IO[str] = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begin = 0.0

    def wait(self) -> None:
        """Wait for the next turn; the process ends when there is none."""
        if not sys.stdin.readline():
            sys.exit(0)
        self._begin = time.perf_counter()

    def done(self, measured: Mapping[str, Any], save: Callable[[], None] | None = None) -> None:
        """Report the turn; its seconds are those since `wait` returned, without `save`'s."""
        seconds = time.perf_counter() - self._begin
        if save is not None:
            save()
        print(MARK + json.dumps({"seconds": seconds, **measured}), file=self._out, flush=True)


@dataclass(slots=True)
class Contestant:
    """A process that is told when to compute. A context manager: leaving it ends the process."""

    name: str  # e.g. "trl bf16"
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path  # of what it prints
    turns: list[dict[str, Any]] = field(default_factory=list)  # what was measured, a turn each
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            list(self.command),
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        family = self._family()
        for stream in (self._running.stdin, self._running.stdout):
            if stream is not None:
                stream.close()
        try:
            self._running.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
        for process in family:
            if process.is_running():
                process.terminate()

    def turn(self) -> dict[str, Any]:
        """Let it compute; return and keep what was measured. Raises RuntimeError if it ends."""
        before = self._cpu_seconds()
        print("go", file=self._running.stdin, flush=True)
        for line in self._running.stdout or ():
            if line.startswith(MARK):
                measured: dict[str, Any] = json.loads(line.removeprefix(MARK))
                measured["cpu_s"] = self._cpu_seconds() - before
                measured["peak_mb"] = self._peak_mb()
                self.turns.append(measured)
                return measured
        tail = "\n".join(self.log.read_text().splitlines()[-20:])
        raise RuntimeError(f"{self.name} ended before its turn did; its last lines:\n{tail}")

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not entered; use it in a with statement")
        return self._process

    def _family(self) -> list[Any]:
        import psutil

        try:
            head = psutil.Process(self._running.pid)
            return [head, *head.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _cpu_seconds(self) -> float:
        import psutil

        total = 0.0
        for process in self._family():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def _peak_mb(self) -> float:
        """The sum of the processes' largest resident sets."""
        total = 0
        for process in self._family():
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            total += sum(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM"))
        return total / 1024
