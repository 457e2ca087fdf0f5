"""Writing one object to S3 from bytes that are made on the way: in parallel parts, each checked.

What lives here: `send`. What does not: files of a folder (`.transfer`), single requests (`.s3`).
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from engine.storage.s3 import Objects

PARALLEL = 8  # parts on their way at once; so many are in memory, and one more
PART = 32 << 20  # bytes; an object may have 10,000 parts


def send(objects: Objects, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write an object of these bytes; return their SHA-256 (hex) and their number.

    It appears whole or not at all. Raises StorageError when S3 refuses to the end; parts that were
    sent are then forgotten, as they are when `chunks` raises.
    """
    sha, size = hashlib.sha256(), 0
    sending: _Sending | None = None
    try:
        for part in _parts(chunks):
            sha.update(part)
            size += len(part)
            if len(part) < PART and sending is None:  # all of it
                objects.write(name, part)
                return sha.hexdigest(), size
            sending = sending or _Sending(objects, name)
            sending.add(part)
        if sending is None:
            objects.write(name, b"")
        else:
            sending.finish()
    except BaseException:
        if sending is not None:
            sending.abort()
        raise
    return sha.hexdigest(), size


def _parts(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes in pieces of PART; only the last is shorter, and none is empty."""
    held = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            taken = view[: PART - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == PART:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


class _Sending:
    """An object on its way; parts are sent by daemons, for which no process waits at its end."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects, self._name = objects, name
        self._mark = {"upload": uuid.uuid4().hex}  # tells our object from another's
        self._upload = objects.begin(name, self._mark)
        self._slots = threading.BoundedSemaphore(PARALLEL)
        self._threads: list[threading.Thread] = []
        self._arrived: dict[int, dict[str, Any]] = {}
        self._errors: list[BaseException] = []

    def add(self, data: bytes) -> None:
        """Send a part as soon as there is room; raise the error of an earlier one."""
        self._slots.acquire()
        self._raise()
        number = len(self._threads) + 1
        thread = threading.Thread(target=self._send, args=(number, data), daemon=True)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> None:
        """Wait for all parts, and make the object of them."""
        self._wait()
        self._raise()
        parts = [self._arrived[number] for number in sorted(self._arrived)]
        self._objects.finish(self._name, self._upload, parts, self._mark)

    def abort(self) -> None:
        """Forget the parts; those under way end first, so that none comes too late."""
        self._wait()
        self._objects.abort(self._name, self._upload)

    def _send(self, number: int, data: bytes) -> None:
        try:
            self._arrived[number] = self._objects.add_part(self._name, self._upload, number, data)
        except BaseException as error:  # raised where the next part, or the end, comes
            self._errors.append(error)
        finally:
            self._slots.release()

    def _wait(self) -> None:
        for thread in self._threads:
            thread.join()  # its requests have deadlines

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]
