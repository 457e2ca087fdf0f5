"""The one way to a file system: a path, file://, or a URI that fsspec knows, such as s3://bucket/x.

What lives here: S3's endpoint, credentials, timeouts and retries; reading and listing with `Files`;
what an error means and how it reads. What does not: writing to S3 (`.objects`).

s3fs's and botocore's own retries are off, because they multiply: each request has a deadline and
is repeated here alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypedDict, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from engine.errors import EngineError, StorageError
from engine.storage.atomic import write_atomically

T = TypeVar("T")

S3_SCHEMES = ("s3://", "s3a://")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT")  # the first wins
CHECK_S3 = (
    "check the address, the endpoint (AWS_ENDPOINT_URL) and the credentials (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY)"
)
CHUNK = 8 << 20  # bytes read at once from a disk
RANGE = 32 << 20  # bytes asked for in one request to S3
BACKOFF_SECONDS = 0.5  # before the second attempt; each further pause is twice as long
MAX_BACKOFF_SECONDS = 10.0
# S3's codes, with a status below 500, of requests that may succeed when they are repeated.
RETRYABLE_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request to S3 may take, in seconds, and how often it is made."""

    attempts: int
    connect: float
    read: float  # without a byte of the answer
    request: float  # in all, for one object, part or range


QUICK = Timeouts(attempts=2, connect=3, read=10, request=20)  # to learn what is there
PATIENT = Timeouts(attempts=5, connect=5, read=30, request=120)  # to move content


def s3_credentials(uri: str) -> dict[str, object]:
    """Return s3fs's options for a URI: its endpoint, and keys where botocore finds none.

    AWS's own variables win; FLYTE_AWS_* are those that Flyte sets in its pods. Empty for what is
    not in S3.
    """
    if not uri.startswith(S3_SCHEMES):
        return {}
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    # Also where botocore would find it: s3fs keeps one file system for equal options.
    options: dict[str, object] = {"client_kwargs": {"endpoint_url": endpoint}} if endpoint else {}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return options
    key = os.environ.get("FLYTE_AWS_ACCESS_KEY_ID")
    secret = os.environ.get("FLYTE_AWS_SECRET_ACCESS_KEY")
    return options | ({"key": key, "secret": secret} if key and secret else {})


class Entry(TypedDict, total=False):
    """What fsspec's drivers say of a file or folder."""

    name: str  # the file system's path
    size: int | None  # bytes
    type: str  # "file", "directory", or a driver's own
    mtime: float  # seconds since the epoch, on disks
    LastModified: datetime  # in S3
    updated: datetime  # in other object stores


class _ErrorResponse(TypedDict, total=False):
    Error: dict[str, str]
    ResponseMetadata: dict[str, int]


class Files:
    """The file at a path or URI, or the files below it."""

    def __init__(self, uri: str | Path, timeouts: Timeouts = QUICK) -> None:
        """Raise ValueError or ImportError for a scheme that no installed file system has."""
        text = os.fspath(uri)
        if "://" not in text:
            text = str(Path(text).expanduser().absolute())
        self.is_s3 = text.startswith(S3_SCHEMES)
        options = s3_credentials(text)
        if self.is_s3:
            options["config_kwargs"] = {
                "connect_timeout": timeouts.connect,
                "read_timeout": timeouts.read,
                "retries": {"mode": "standard", "total_max_attempts": 1},
            }
        self.fs, path = fsspec.core.url_to_fs(text, **options)
        if self.is_s3:
            self.fs.retries = 1
        self.uri, self.path = text.rstrip("/"), str(path).rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.timeouts = timeouts

    def path_of(self, name: str) -> str:
        """The file system's path of a file below; of the whole for an empty name."""
        return f"{self.path}/{name}" if name else self.path

    def uri_of(self, path: str) -> str:
        """The path or URI of what the file system calls `path`."""
        return path if self.is_local else str(self.fs.unstrip_protocol(path))

    def request(self, call: Callable[[], T]) -> T:
        """Make a request, repeated where that may help; one to a disk is made once."""
        pause = BACKOFF_SECONDS
        for _ in range(0 if self.is_local else self.timeouts.attempts - 1):
            try:
                return call()
            except Exception as error:
                if not is_transient(error):
                    raise
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)
        return call()

    def read(self, name: str = "") -> bytes:
        """Return a file's bytes; FileNotFoundError."""
        self.fs.invalidate_cache()  # other processes write here too
        return self.request(lambda: bytes(self.fs.cat_file(self.path_of(name))))

    def chunks(self, name: str = "") -> Iterator[bytes]:
        """Yield a file's bytes without holding them all in memory."""
        path = self.path_of(name)
        if not self.is_s3:
            with self.fs.open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
            return
        self.fs.invalidate_cache()
        size = int(self.request(lambda: self.fs.size(path)))
        for start in range(0, size, RANGE):
            yield self.read_range(name, start, min(start + RANGE, size))

    def read_range(self, name: str, start: int | None, end: int | None) -> bytes:
        """Return the bytes of an S3 object from `start` up to `end`, or all, in one request."""
        path, limit = self.path_of(name), self.timeouts.request
        return self.request(
            lambda: bytes(
                self.fs.cat_file(path, start=start, end=end, max_concurrency=1, timeout=limit)
            )
        )

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all on a disk and in S3."""
        if self.is_local:
            Path(self.path).mkdir(parents=True, exist_ok=True)
            write_atomically(Path(self.path_of(name)), [data])
        else:
            self.request(lambda: self.fs.pipe_file(self.path_of(name), data))

    def find(self) -> dict[str, Entry]:
        """Return fsspec's entry of each file at any depth, by its path below."""
        self.fs.invalidate_cache()
        found = self.request(lambda: self.fs.find(self.path, detail=True))
        start = len(self.path) + 1  # a key that equals the folder is S3's mark of an empty one
        return {path[start:]: entry for path, entry in found.items() if len(path) > start}

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file at any depth, by its path below."""
        return {name: int(entry["size"] or 0) for name, entry in self.find().items()}

    def entries(self) -> list[Entry]:
        """Return fsspec's entry of each file and folder right here; none where there is nothing."""
        self.fs.invalidate_cache()
        try:
            found = self.request(lambda: self.fs.ls(self.path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry for entry in found if entry["name"].rstrip("/") != self.path]


def is_remote(address: str | Path) -> bool:
    """Tell URIs such as s3://… from paths; file:// counts as a path."""
    return "://" in str(address) and not str(address).startswith("file://")


def as_path(address: str | Path) -> Path:
    """Return the path of a local address, file:// or plain."""
    return Path(str(address).removeprefix("file://")).expanduser()


def read_file(address: str | Path, refused: type[EngineError]) -> bytes:
    """Read one local or remote file.

    Raises FileNotFoundError, StorageError when a store doesn't answer, or else `refused`.
    """
    with translated(address, refused, keep=(FileNotFoundError,)):
        try:
            if is_remote(address):
                return Files(address).read()
            return as_path(address).read_bytes()
        except NotADirectoryError:
            raise FileNotFoundError(str(address)) from None


@contextlib.contextmanager
def translated(
    address: str | Path,
    refused: type[EngineError],
    action: str = "read",
    keep: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Turn what a file system raises into one sentence; errors in `keep` stay as they are.

    A store that doesn't answer is a StorageError: another attempt may succeed, and nothing that is
    in it was found to be wrong. What it refuses is of the class `refused`.
    """
    try:
        yield
    except EngineError:
        raise
    except keep:
        raise
    except Exception as error:  # fsspec's drivers raise errors of many libraries
        away = is_remote(address) and is_transient(error)
        hint = CHECK_S3 if str(address).startswith(S3_SCHEMES) else "check the address"
        raise (StorageError if away else refused)(
            f"can't {action} {address}: {error_text(error)}; {hint}"
        ) from error


def is_transient(error: BaseException) -> bool:
    """Tell whether the same request may succeed a moment later."""
    import botocore.exceptions
    from s3fs.core import S3_RETRYABLE_ERRORS

    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status:
        return (
            status in (408, 429)
            or (status >= 500 and status != 501)
            or error_code(error) in RETRYABLE_CODES
        )
    lost = (
        *S3_RETRYABLE_ERRORS,
        botocore.exceptions.ConnectionError,
        ConnectionError,
        TimeoutError,
    )
    return isinstance(error, lost)


def error_code(error: BaseException | None) -> str:
    """Return S3's code of an error, e.g. `NoSuchKey`; empty for one that isn't S3's."""
    return str(_response(error).get("Error", {}).get("Code", "")) if error else ""


def error_text(error: BaseException) -> str:
    """Return the first line of what went wrong."""
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")


def _response(error: BaseException | None) -> _ErrorResponse:
    """S3's own answer behind an error of s3fs, which keeps it as the cause."""
    from botocore.exceptions import ClientError

    for one in (error, getattr(error, "__cause__", None)):
        if isinstance(one, ClientError):
            response: _ErrorResponse = one.response
            return response
    return {}
