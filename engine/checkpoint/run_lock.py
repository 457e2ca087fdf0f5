"""One run at a time writes a folder of checkpoints: a lock file with its owner and a heartbeat.

Which checkpoints are in the folder is in `store`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.errors import CheckpointError, DamagedCheckpointError, LockedCheckpointsError
from engine.storage.filesystem import process_start
from engine.storage.folder import CheckpointStorageError, Folder

log = logging.getLogger(__name__)

BEAT_S, STALE_S = 10.0, 45.0
_PREFIX = ".lock-"
_PAUSE_S = 0.5  # between two looks at a lock that may be stale
_JOIN_S = 10.0  # for a beat under way
_held: dict[tuple[int, str], FolderLock] = {}  # this process's, by its id and the folder's address


@contextlib.contextmanager
def hold_lock(
    root: str | Path | None, beat_s: float = BEAT_S, stale_s: float = STALE_S
) -> Iterator[None]:
    """Hold the lock of a folder of checkpoints for the block; nothing is done for no folder.

    Raises LockedCheckpointsError, within `beat_s` and a moment, where another run has it. Where the
    lock can't be written, because the disk is full or the folder can't be made, the run goes on
    without: its saves will say so too.
    """
    key = (os.getpid(), Folder(root).uri) if root is not None else None
    if key is None or key in _held:
        yield
        return
    lock = FolderLock(Folder(key[1]), beat_s, stale_s)
    try:
        lock.acquire()
    except _NotWrittenError as error:
        log.warning("%s; other runs can't be kept out of this folder", error)
        yield
        return
    _held[key] = lock
    try:
        yield
    finally:
        del _held[key]
        lock.release()


def check_lock(root: Folder) -> None:
    """Raise LockedCheckpointsError if this process had the lock of a folder and has lost it."""
    lock = _held.get((os.getpid(), root.uri))
    if lock is not None:
        lock.check()


class _NotWrittenError(CheckpointStorageError):
    """The lock's own file could not be written."""


@dataclass(frozen=True, slots=True)
class LockFile:
    """What a lock's file says: who has it, and a count that shows that it is alive."""

    machine: str  # a boot of a machine, and the container there: process ids are unique in it
    host: str
    pid: int
    started: str  # of the process, in clock ticks: numbers of processes come again
    since: str  # e.g. "2026-11-22T08:00:00Z"
    beat: int = 0

    @property
    def owner(self) -> str:
        """In words, e.g. "process 812 on node-3, since 2026-11-22T08:00:00Z"."""
        return f"process {self.pid} on {self.host}, since {self.since}"

    @property
    def is_here(self) -> bool:
        """Whether its process would be one of this machine and container."""
        return self.machine == _machine()

    def is_of_process(self, other: LockFile | bytes) -> bool:
        """Whether another lock is of the same process, which may have the folder twice."""
        return isinstance(other, LockFile) and (self.machine, self.pid, self.started) == (
            other.machine,
            other.pid,
            other.started,
        )

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.is_here and process_start(self.pid) != self.started


class FolderLock:
    """The lock of one folder; see the module's docstring."""

    def __init__(self, root: Folder, beat_s: float, stale_s: float) -> None:
        self.root, self._beat_s, self._stale_s = root, beat_s, stale_s
        self._name = f"{_PREFIX}{uuid.uuid4().hex[:12]}.json"
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        host, pid = socket.gethostname(), os.getpid()
        self._file = LockFile(_machine(), host, pid, process_start(pid) or "", since)
        self._last_beat = 0.0
        self._overtaken: set[str] = set()  # stale locks of others
        self._lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock, from a stale holder too; raise LockedCheckpointsError at a live one."""
        first_seen: dict[str, tuple[LockFile | bytes, float]] = {}
        while True:
            live = self._live_locks(first_seen)
            if not live:
                self._write()
                if not self._locks().keys() - self._overtaken:
                    break
                self.root.remove_file(self._name)
            time.sleep(random.uniform(_PAUSE_S / 5, _PAUSE_S))
        self._remove_overtaken()
        self._thread.start()

    def check(self) -> None:
        """Raise LockedCheckpointsError if another run has taken the folder over."""
        self._lost = self._lost or self._is_overtaken()
        if self._lost:
            raise LockedCheckpointsError(
                f"another run has taken {self.root} over, because this one gave no sign of life "
                f"for {self._stale_s:g} s; nothing more is written; stop one of the two"
            )

    def release(self) -> None:
        """Give the lock back."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        try:
            self.root.remove_file(self._name)
        except CheckpointError as error:
            log.warning("%s stays locked for %g s: %s", self.root, self._stale_s, error)

    def _live_locks(self, first_seen: dict[str, tuple[LockFile | bytes, float]]) -> list[str]:
        """Other locks that may be alive; raises where one is. Notes those that are stale."""
        now, live = time.monotonic(), []
        for name, lock in self._locks().items():
            before, since = first_seen.setdefault(name, (lock, now))
            ended = isinstance(lock, LockFile) and lock.has_ended
            if ended or (lock == before and now - since > self._stale_s):
                if name not in self._overtaken:
                    owner = lock.owner if isinstance(lock, LockFile) else "an unknown run"
                    log.warning("%s: the lock of %s is stale and is taken over", self.root, owner)
                self._overtaken.add(name)
            elif isinstance(lock, LockFile) and (lock.is_here or lock != before):
                raise LockedCheckpointsError(
                    f"{self.root} is in use by another run ({lock.owner}); wait for its end or "
                    "stop it, or give this run another checkpoint folder"
                )
            else:
                live.append(name)
        return live

    def _locks(self) -> dict[str, LockFile | bytes]:
        """The lock files of others by name; bytes for one that can't be understood."""
        found: dict[str, LockFile | bytes] = {}
        for name in sorted(self.root.names()):
            if name.startswith(_PREFIX) and name != self._name:
                with contextlib.suppress(DamagedCheckpointError):  # it is gone meanwhile
                    found[name] = _parse(self.root.read(name))
        return {name: lock for name, lock in found.items() if not self._file.is_of_process(lock)}

    def _write(self) -> None:
        self._file = replace(self._file, beat=self._file.beat + 1)
        try:
            self.root.create()
            self.root.write(self._name, [json.dumps(asdict(self._file)).encode()])
        except CheckpointError as error:
            raise _NotWrittenError(str(error)) from error
        self._last_beat = time.monotonic()

    def _is_overtaken(self) -> bool:
        """Whether another run took this lock for stale; others that only look withdraw."""
        names = {name for name in self.root.names() if name.startswith(_PREFIX)}
        missing, others = self._name not in names, names - {self._name} - self._overtaken
        overdue = time.monotonic() - self._last_beat > self._stale_s
        return (missing and overdue) or bool(others and (missing or overdue))

    def _keep(self) -> None:
        """Write the file again until the lock is released, or lost."""
        while not self._ended.wait(self._beat_s):
            try:
                self.check()
                self._write()
                self._remove_overtaken()
            except CheckpointError as error:
                log.warning("the lock of %s could not be kept: %s", self.root, error)
            except LockedCheckpointsError as error:
                log.error("%s", error)
                return

    def _remove_overtaken(self) -> None:
        """Delete stale locks, also one that its holder, awake again, has written again."""
        for name in self._overtaken & self.root.names():
            self.root.remove_file(name)


def _parse(data: bytes) -> LockFile | bytes:
    try:
        lock = LockFile(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return data
    return lock if isinstance(lock.pid, int) else data


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
