"""Objects in S3: single requests, multipart uploads, and whole folders in parallel.

Each request has a deadline, is repeated alone, and is checked by S3 with SHA-256. s3fs makes the
requests and not the uploads: its own (2026.9) send parts without SHA-256, repeat or time out whole
files, and take a completion whose answer was lost for a failure. boto3's would send checksums as
trailers, which not all stores know.
"""

import base64
import contextlib
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from itertools import chain
from pathlib import Path
from typing import Any

from engine.console import Progress
from engine.errors import StorageError
from engine.storage import filesystem
from engine.storage.digests import FileEntry, hash_file, require_inside
from engine.worker_process import on_daemon_thread

log = logging.getLogger(__name__)

_CONDITION_FAILED = ("PreconditionFailed", "412", "ConditionalRequestConflict", "NoSuchKey", "404")
SHA256_KEY = "sha256"  # entry of an object's metadata: the SHA-256 (hex) of its content


class Objects(filesystem.Files):
    """The objects below one address; names are keys relative to it, e.g. `splits/train.txt`."""

    def __init__(self, uri: str, timeouts: filesystem.Timeouts = filesystem.PATIENT) -> None:
        """Raise StorageError for what is no s3:// address; no request is made yet."""
        self.uri, self.timeouts = uri, timeouts
        if not uri.startswith(filesystem.S3_SCHEMES):
            raise StorageError(f"{uri} is no address in S3; give one such as s3://bucket/prefix")
        with self._translated("used"):
            super().__init__(uri, timeouts)
            self._bucket, self._key, _ = self.fs.split_path(self.path)

    def read(self, name: str = "", start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, or those from `start` up to `end`; FileNotFoundError."""
        with self._translated("read", name):
            return self.read_range(name, start, end)

    def sizes(self) -> dict[str, int]:
        with self._translated("listed"):
            return super().sizes()

    def head(self, name: str) -> dict[str, Any]:
        """Return S3's entry of an object, with its `ETag` and `Metadata`; FileNotFoundError."""
        with self._translated("read", name):
            return self._call("head_object", name)

    def put(self, name: str, data: bytes | bytearray, only_if: str | None = None) -> bool:
        """Write an object in one request.

        With `only_if`, False where the object there has another entity tag, or, for an empty one,
        where there is an object at all. A store that knows no conditional writes overwrites it.
        """
        sha = hashlib.sha256(data)
        metadata = {SHA256_KEY: sha.hexdigest()}
        arguments = {"Body": data, "ChecksumSHA256": _base64(sha.digest()), "Metadata": metadata}
        with self._translated("written", name):
            if only_if is not None:
                condition = {"IfMatch": only_if} if only_if else {"IfNoneMatch": "*"}
                try:
                    self._call("put_object", name, **arguments, **condition)
                    return True
                except OSError as error:
                    code = filesystem.error_code(error)
                    if code in _CONDITION_FAILED:
                        return False
                    if code not in ("NotImplemented", "501"):
                        raise
            self._call("put_object", name, **arguments)
        return True

    def create_multipart(self, name: str, metadata: dict[str, str]) -> str:
        """Begin an object in parts, which is not seen until it is completed; return its id."""
        with self._translated("written", name):
            arguments = {"ChecksumAlgorithm": "SHA256", "Metadata": metadata}
            return str(self._call("create_multipart_upload", name, **arguments)["UploadId"])

    def upload_part(
        self, name: str, upload: str, number: int, data: bytes | bytearray
    ) -> dict[str, str | int]:
        """Write part `number`, from 1; return what `complete_multipart` needs."""
        sha256 = {"ChecksumSHA256": _base64(hashlib.sha256(data).digest())}
        where = {"UploadId": upload, "PartNumber": number}
        with self._translated("written", name):
            answer = self._call("upload_part", name, **where, **sha256, Body=data)
        # A store without checksums refuses the field.
        known = sha256 if "ChecksumSHA256" in answer else {}
        return {"PartNumber": number, "ETag": answer["ETag"], **known}

    def complete_multipart(
        self, name: str, upload: str, parts: list[dict[str, str | int]], metadata: dict[str, str]
    ) -> None:
        """Make an object of its parts, in order; `metadata` as at the start of the upload."""
        arguments = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        with self._translated("written", name):
            try:
                self._call("complete_multipart_upload", name, **arguments)
            except FileNotFoundError:
                # The request was repeated after its answer was lost: S3 knows no such upload then.
                if self.head(name).get("Metadata") != metadata:
                    raise

    def abort_multipart(self, name: str, upload: str) -> None:
        """Delete the parts of an object; a failure is logged, or it would hide why this happens."""
        where = {"Bucket": self._bucket, "Key": self._key_of(name), "UploadId": upload}
        try:
            self.fs.call_s3("abort_multipart_upload", **where, timeout=filesystem.QUICK.request)
        except Exception as error:  # botocore's and s3fs's have no common base
            warning = "parts of %s/%s stay in the bucket until its lifecycle removes them: %s"
            log.warning(warning, self.uri, name, filesystem.error_text(error))

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def _call(self, method: str, name: str, **arguments: object) -> dict[str, Any]:
        arguments |= {"Bucket": self._bucket, "Key": self._key_of(name)}
        limit = self.timeouts.request
        return self.request(lambda: dict(self.fs.call_s3(method, **arguments, timeout=limit)))

    @contextlib.contextmanager
    def _translated(self, done: str, name: str = "") -> Iterator[None]:
        """Turn what is raised into one sentence; FileNotFoundError of a read stays as it is."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if done == "read" and isinstance(error, FileNotFoundError):
                raise
            where = f"{self.uri}/{name}" if name else self.uri
            text = filesystem.error_text(error)
            if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
                text = f"no answer in {self.timeouts.request:g} s"
            raise StorageError(f"{where} can't be {done}: {text}; {filesystem.CHECK_S3}") from error


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


PARALLEL = 8  # requests at once; so many parts, or ranges, are in memory
PART = 32 << 20  # bytes of an object that are sent in one request
MAX_PARTS = 10_000  # S3's limit for one object
RANGE = 16 << 20  # bytes fetched in one request
LARGE = 64 << 20  # bytes; what is smaller is moved without progress


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
        self.cancelled = threading.Event()  # ends objects under way as their next part is due

    def write(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        size: int | None = None,
        sha256: str = "",
    ) -> None:
        """Write an object of these bytes, whole or not at all; `size` and `sha256` where known.

        Raises StorageError when S3 refuses all attempts; the parts are deleted on any error.
        """
        length = part_size(size or 0)
        parts = self._parts(chunks, length)
        first = next(parts, None)
        if first is None:
            self.objects.put(name, b"")
        elif len(first) < length or len(first) == size:  # all of it
            self._send(self.objects.put, name, first)
        else:
            # Tells this object from another's, should the answer to its completion be lost.
            metadata = {SHA256_KEY: sha256} if sha256 else {"upload": uuid.uuid4().hex}
            self._write_parts(name, first, parts, metadata)

    def _write_parts(
        self, name: str, first: bytearray, others: Iterator[bytearray], metadata: dict[str, str]
    ) -> None:
        try:
            upload = self.objects.create_multipart(name, metadata)
        except BaseException:
            self.slots.release()
            raise
        send = self.objects.upload_part
        sending: list[Future[Any]] = []
        try:
            for number, part in enumerate(chain([first], others), start=1):
                sending.append(on_daemon_thread(self._send, send, name, upload, number, part))
                for ended in filter(Future.done, sending):
                    ended.result()
            completed = [future.result() for future in sending]  # their requests have deadlines
            self.objects.complete_multipart(name, upload, completed, metadata)
        except BaseException:
            wait(sending)  # so that no part arrives after the others were deleted
            self.objects.abort_multipart(name, upload)
            raise

    def _send(self, request: Callable[..., Any], *arguments: Any) -> Any:
        """Make a request whose last argument is a part, and free the part's slot."""
        try:
            answer = request(*arguments)
            self.on_sent(len(arguments[-1]))
            return answer
        finally:
            self.slots.release()

    def _parts(self, chunks: Iterable[bytes | memoryview], length: int) -> Iterator[bytearray]:
        """Read each part once there is room for it: whoever sends it releases the slot."""
        parts = _split(chunks, length)
        while True:
            self.slots.acquire()
            part = None
            try:
                if self.cancelled.is_set():
                    raise StorageError(f"the upload to {self.objects.uri} was cancelled")
                part = next(parts, None)
            finally:
                if part is None:
                    self.slots.release()
            if part is None:
                return
            yield part


def _split(chunks: Iterable[bytes | memoryview], length: int) -> Iterator[bytearray]:
    """Yield the same bytes in parts of `length`; only the last is shorter, and none is empty."""
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


def upload(folder: Path, uri: str, files: Mapping[str, FileEntry], label: str = "upload") -> int:
    """Send the files of `folder` to `uri` that are not there yet; return their size in bytes.

    Raises StorageError when S3 refuses all attempts, or a file is not as `files` says.
    """
    objects = Objects(uri)
    require_inside(files, uri, StorageError)
    sizes = objects.sizes()

    def is_there(name: str) -> bool:
        return sizes.get(name) == files[name].size and (
            objects.head(name).get("Metadata", {}).get(SHA256_KEY) == files[name].sha256
        )

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="upload") as pool:
        there = zip(files, pool.map(is_there, files), strict=True)
        missing = {name: files[name] for name, present in there if not present}
        total = sum(entry.size for entry in missing.values())
        with _moving(total, label) as moved:
            uploader = Uploader(objects, moved)
            futures = [
                pool.submit(
                    uploader.write, name, _checked(folder / name, entry), entry.size, entry.sha256
                )
                for name, entry in missing.items()
            ]
            _wait(futures, pool, uploader.cancelled)
    sizes = objects.sizes() if missing else {}
    for name, entry in files.items() if missing else ():
        if sizes.get(name) != entry.size:
            raise StorageError(
                f"{uri}/{name} has {sizes.get(name) or 'no'} bytes after its upload, not "
                f"{entry.size}; somebody else writes there, upload it again"
            )
    return total


def download(
    uri: str, folder: Path, files: Mapping[str, FileEntry], label: str = "download"
) -> None:
    """Fetch files into `folder`, unchecked; StorageError for any that is refused or too short."""
    objects = Objects(uri)
    require_inside(files, uri, StorageError)
    ranges: list[tuple[str, int, int]] = []
    for name, entry in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(entry.size)
        ranges += [(name, start, entry.size) for start in range(0, entry.size, RANGE)]
    total = sum(entry.size for entry in files.values())
    threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="download")
    with threads as pool, _moving(total, label) as moved:

        def fetch(name: str, start: int, size: int) -> None:
            end = min(start + RANGE, size)
            try:
                data, fault = objects.read(name, start, end), ""
                if len(data) != end - start:
                    fault = f"differs from the manifest: it ends before byte {end} of {size}"
            except FileNotFoundError:
                fault = "is missing"
            if fault:
                raise StorageError(f"{uri}/{name} {fault}; the artifact was damaged, make it again")
            with (folder / name).open("r+b") as file:
                os.pwrite(file.fileno(), data, start)
            moved(len(data))

        _wait([pool.submit(fetch, *part) for part in ranges], pool)


def _wait(
    futures: list[Future[None]], pool: ThreadPoolExecutor, cancelled: threading.Event | None = None
) -> None:
    """Wait for all; after an error, begin no more requests and let those under way end."""
    try:
        for future in as_completed(futures):
            future.result()
    except BaseException:
        if cancelled is not None:
            cancelled.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _checked(path: Path, entry: FileEntry) -> Iterator[bytes]:
    """The bytes of a file; StorageError, before the last of them, unless it is as `entry` says."""
    sha, left = hashlib.sha256(), entry.size
    try:
        with path.open("rb") as file:
            is_same = os.fstat(file.fileno()).st_size == entry.size
            while is_same and left:
                chunk = file.read(filesystem.CHUNK)
                sha.update(chunk)
                left -= len(chunk)
                is_same = bool(chunk) and (left > 0 or sha.hexdigest() == entry.sha256)
                if is_same:
                    yield chunk
        present = "" if is_same else hash_file(path)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror or error}") from error
    if not is_same:
        raise StorageError(
            f"{path} is not what its manifest says (SHA-256 {present[:12]}, recorded "
            f"{entry.sha256[:12]}); it is not uploaded; make the artifact again"
        )


@contextlib.contextmanager
def _moving(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yield what counts bytes that were moved; of many, progress is shown in MiB."""
    if total < LARGE:
        yield lambda count: None
        return
    bar = Progress(total >> 20, label, "MiB")
    lock, moved = threading.Lock(), 0

    def count_bytes(count: int) -> None:
        nonlocal moved
        with lock:
            shown, moved = moved >> 20, moved + count
            if (moved >> 20) > shown:
                bar.update((moved >> 20) - shown)

    with bar:
        yield count_bytes
