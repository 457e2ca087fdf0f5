"""One run at a time writes a folder of checkpoints: `hold_lock`.

The lock is a file in the folder that names its owner, who writes it again every 10 s. It is created
exclusively, and taken from an owner that has ended or writes no more; in S3 both are conditional
writes. Clocks of machines are not compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine import errors
from engine.storage.filesystem import process_start
from engine.storage.folder import CheckpointStorageError, Folder
from engine.storage.s3 import Objects

log = logging.getLogger(__name__)

NAME = ".lock.json"
BEAT_S, STALE_S = 10.0, 45.0
_PAUSE_S = 0.5  # between two looks at a lock that may be stale
_JOIN_S = 10.0  # for a write under way
_held: dict[tuple[int, str], FolderLock] = {}  # this process's, by its id and the folder's address


@contextlib.contextmanager
def hold_lock(
    root: str | Path | None, beat_s: float = BEAT_S, stale_s: float = STALE_S
) -> Iterator[None]:
    """Hold the lock of a folder of checkpoints for the block; nothing is done for no folder.

    Raises LockedCheckpointsError, within `beat_s` and a moment, where another run has it. Where the
    lock can't be written the run goes on without, with a warning: its saves will say so too.
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
class Owner:
    """The process that has a lock, as the lock's file names it."""

    machine: str  # a boot of a machine, and the container there: process ids are unique in it
    host: str
    pid: int
    started: str  # of the process, in clock ticks: numbers of processes come again
    since: str  # e.g. "2026-11-22T08:00:00Z"
    beat: int = 0  # counts the writes of the file, which show that the owner is alive

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def as_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def parse(data: bytes | None) -> Owner | None:
        """The owner that a lock's file names; None for a file that is something else."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            owner = Owner(**json.loads(data or b""))
            return owner if isinstance(owner.pid, int) else None
        return None


class FolderLock:
    def __init__(self, root: Folder, beat_s: float, stale_s: float) -> None:
        self._root, self._beat_s, self._stale_s = root, beat_s, stale_s
        self._objects = Objects(root.uri) if root.files.is_s3 else None
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pid = os.getpid()
        self._owner = Owner(_machine(), socket.gethostname(), pid, process_start(pid) or "", since)
        self._lost = False
        self._ended, self._mutex = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="checkpoint lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock, from a stale owner too; raise LockedCheckpointsError at a live one."""
        before, since = self._read()[0], time.monotonic()
        while True:
            data, tag = self._read()
            owner = Owner.parse(data)
            here = owner is not None and owner.machine == self._owner.machine
            stale = data == before and time.monotonic() - since > self._stale_s
            # On this machine an owner may have ended, or be this process, which may resume.
            free = data is None or stale
            if owner is not None and here:
                is_self = owner.pid == self._owner.pid
                free = free or is_self or process_start(owner.pid) != owner.started
            if free:
                if self._write(tag, new=data is None) and self._is_confirmed(data):
                    break
            elif owner and (here or data != before):
                raise errors.LockedCheckpointsError(
                    f"{self._root} is in use by another run ({owner}); wait for its end or stop "
                    "it, or give this run another checkpoint folder"
                )
            elif data != before:
                before, since = data, time.monotonic()
            time.sleep(_PAUSE_S)
        self._thread.start()

    def check(self, renew: bool = False) -> None:
        """Raise LockedCheckpointsError if another run has the lock; with `renew`, write it."""
        with self._mutex:
            data, tag = self._read()
            if data not in (None, self._owner.as_json()):
                self._lost = True
            elif (renew or data is None) and not self._lost:
                self._lost = not self._write(tag, new=data is None)
        if self._lost:
            raise errors.LockedCheckpointsError(
                f"another run has taken {self._root} over, because this one gave no sign of life "
                f"for {self._stale_s:g} s; nothing more is written; stop one of the two"
            )

    def release(self) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)
        try:
            if self._read()[0] == self._owner.as_json():
                self._root.remove_file(NAME)
        except errors.CheckpointError as error:
            log.warning("%s stays locked for %g s: %s", self._root, self._stale_s, error)

    def _is_confirmed(self, replaced: bytes | None) -> bool:
        """Whether nobody else has taken the same stale lock at the same moment."""
        if replaced is None:
            return True
        name = Owner.parse(replaced) or "an unknown run"
        log.warning("%s: the lock of %s is stale and is taken over", self._root, name)
        if self._objects is None:  # there the last one to write has it
            time.sleep(_PAUSE_S)
        return self._read()[0] == self._owner.as_json()

    def _keep(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                self.check(renew=True)
            except errors.CheckpointError as error:
                log.warning("the lock of %s could not be kept: %s", self._root, error)
            except errors.LockedCheckpointsError as error:
                log.error("%s", error)
                return

    def _read(self) -> tuple[bytes | None, str]:
        """Return what is in the lock's file, None without one, and its entity tag in S3."""
        try:
            # The tag first: should the file change in between, the next write is refused.
            tag = self._objects.head(NAME)["ETag"] if self._objects is not None else ""
            return self._root.read(NAME), tag
        except (FileNotFoundError, errors.DamagedCheckpointError):
            return None, ""
        except errors.StorageError as error:
            raise CheckpointStorageError(str(error)) from error

    def _write(self, tag: str, new: bool) -> bool:
        """Write the lock, which must be `new` or still have its tag; False where it isn't so."""
        self._owner = replace(self._owner, beat=self._owner.beat + 1)
        data = self._owner.as_json()
        try:
            if self._objects is not None:
                # S3 also refuses a write that is repeated because its answer was lost.
                return self._objects.put(NAME, data, only_if=tag) or self._read()[0] == data
            self._root.create()
            if new and self._root.is_local:
                Path(self._root.path, NAME).open("xb").close()
            self._root.write(NAME, [data])
            return True
        except FileExistsError:
            return False
        except (OSError, errors.StorageError) as error:
            if new and self._root.is_local:  # or an empty file would lock the folder
                with contextlib.suppress(OSError):
                    Path(self._root.path, NAME).unlink()
            raise _NotWrittenError(str(error)) from error


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
