"""The one upload to S3: objects from bytes in order, in parallel parts, each checked and repeated.

What lives here: `Uploader`. What does not: which files of a folder are sent (`.transfer`), single
requests (`.objects`).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator

from engine.errors import StorageError
from engine.storage.objects import SHA256_KEY, CompletedPart, Objects

PARALLEL = 8  # requests at once; so many parts are in memory
PART = 32 << 20  # bytes
MAX_PARTS = 10_000  # S3's limit for one object


def part_size(size: int) -> int:
    """Bytes of each part but the last, for an object of `size` bytes."""
    return max(PART, -(-size // MAX_PARTS))


class Uploader:
    """Writes objects below one address; all its requests share one limit."""

    def __init__(
        self, objects: Objects, on_sent: Callable[[int], None] = lambda count: None
    ) -> None:
        """`on_sent` is called with the bytes of each part that has arrived, in several threads."""
        self.objects, self.on_sent = objects, on_sent
        self.slots = threading.BoundedSemaphore(PARALLEL)
        self._cancelled = threading.Event()

    def write(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int | None = None,
        sha256: str = "",
    ) -> None:
        """Write an object of these bytes, whole or not at all.

        `size` and `sha256` say what it will be, where that is known. Raises StorageError when S3
        refuses to the end; the parts are then deleted, as they are when `chunks` raises.
        """
        length = part_size(size or 0)
        parts = _split(chunks, length)
        upload: _Multipart | None = None
        try:
            while (part := self._next(parts)) is not None:
                if upload is None and (len(part) < length or len(part) == size):  # all of it
                    return self._put(name, part)
                upload = upload or _Multipart(self, name, sha256)
                upload.send(part)
            if upload is None:
                self.objects.put(name, b"")
            else:
                upload.complete()
        except BaseException:
            if upload is not None:
                upload.abort()
            raise

    def cancel(self) -> None:
        """Let objects under way end in an error, as soon as their next part is due."""
        self._cancelled.set()

    def _next(self, parts: Iterator[bytearray]) -> bytearray | None:
        """Read a part once there is room for it: whoever sends it releases the slot."""
        self.slots.acquire()
        part = None
        try:
            if self._cancelled.is_set():
                raise StorageError(f"the upload to {self.objects.uri} was cancelled")
            part = next(parts, None)
        finally:
            if part is None:
                self.slots.release()
        return part

    def _put(self, name: str, data: bytearray) -> None:
        try:
            self.objects.put(name, data)
        finally:
            self.slots.release()
        self.on_sent(len(data))


class _Multipart:
    """One object under way; its parts are sent by daemon threads: no exiting process waits."""

    def __init__(self, uploader: Uploader, name: str, sha256: str) -> None:
        self._uploader, self._objects, self._name = uploader, uploader.objects, name
        # Tells our object from another's, should the answer to its completion be lost.
        self._metadata = {SHA256_KEY: sha256} if sha256 else {"upload": uuid.uuid4().hex}
        self._threads: list[threading.Thread] = []
        self._arrived: dict[int, CompletedPart] = {}
        self._errors: list[BaseException] = []
        try:
            self._upload = self._objects.create_multipart(name, self._metadata)
        except BaseException:
            uploader.slots.release()
            raise

    def send(self, data: bytearray) -> None:
        """Begin to send a part, whose slot is taken; raise the error of an earlier one."""
        number = len(self._threads) + 1
        thread = threading.Thread(target=self._send, args=(number, data), daemon=True)
        self._threads.append(thread)
        thread.start()
        self._raise()

    def complete(self) -> None:
        """Wait for all parts, and make the object of them."""
        self._join()
        self._raise()
        parts = [self._arrived[number] for number in sorted(self._arrived)]
        self._objects.complete_multipart(self._name, self._upload, parts, self._metadata)

    def abort(self) -> None:
        """Delete the parts; those under way arrive first, so that none comes too late."""
        self._join()
        self._objects.abort_multipart(self._name, self._upload)

    def _send(self, number: int, data: bytearray) -> None:
        try:
            self._arrived[number] = self._objects.upload_part(
                self._name, self._upload, number, data
            )
            self._uploader.on_sent(len(data))
        except BaseException as error:  # raised where the next part is sent, or at the end
            self._errors.append(error)
        finally:
            self._uploader.slots.release()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()  # its requests have deadlines

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]


def _split(chunks: Iterable[bytes | memoryview], length: int) -> Iterator[bytearray]:
    """The same bytes in parts of `length`; only the last is shorter, and none is empty."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            taken = view[: length - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == length:
                yield part
                part = bytearray()
    if part:
        yield part
