"""Where S3 is, and single requests to it: each has a deadline, and is tried again where that helps.

What lives here: settings from the environment, `Objects`, which errors pass, error sentences. What
does not: files and parts (`.transfer`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEME = "s3://"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT")  # the first wins
SUM = "sha256"  # the entry of an object's metadata that holds its content's SHA-256 (hex)
PAUSE_SECONDS = 0.5  # before the second try; each further pause is twice as long
LONGEST_PAUSE_SECONDS = 10.0
# What S3 says, with a status below 500, of a request that may well succeed when it is sent again.
PASSING = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",
}
WAY_OUT = (
    "check the address, the endpoint (AWS_ENDPOINT_URL) and the credentials (AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY)"
)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request may take, in seconds, and how often it is made."""

    tries: int
    connect: float
    read: float  # without a byte of the answer
    request: float  # in all


QUICK = Waits(tries=2, connect=3, read=10, request=20)  # to learn what is there
PATIENT = Waits(tries=5, connect=5, read=30, request=120)  # to move content


def from_environment(address: str) -> dict[str, Any]:
    """Return s3fs's settings for an address: its endpoint, and keys where botocore finds none.

    AWS's own variables win; FLYTE_AWS_* are those by which Flyte tells its pods. Anything but
    s3:// has no settings.
    """
    if not address.startswith(SCHEME):
        return {}
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    # Also where botocore would find it: s3fs keeps a file system for equal settings.
    options: dict[str, Any] = {"client_kwargs": {"endpoint_url": endpoint}} if endpoint else {}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return options
    key = os.environ.get("FLYTE_AWS_ACCESS_KEY_ID")
    secret = os.environ.get("FLYTE_AWS_SECRET_ACCESS_KEY")
    return options | ({"key": key, "secret": secret} if key and secret else {})


def settings(address: str, waits: Waits = QUICK) -> dict[str, Any]:
    """Return s3fs's settings for an address, so that no request waits for longer than `waits`."""
    if not address.startswith(SCHEME):
        return {}
    limits = {
        "connect_timeout": waits.connect,
        "read_timeout": waits.read,
        "retries": {"mode": "standard", "total_max_attempts": waits.tries},
    }
    return {**from_environment(address), "config_kwargs": limits}


class Objects:
    """The objects below one address; names are keys relative to it, e.g. `splits/train.txt`."""

    def __init__(self, uri: str, waits: Waits = PATIENT) -> None:
        """Raise StorageError for what is no s3:// address; nothing is asked yet."""
        import fsspec

        self.uri, self.waits = uri.rstrip("/"), waits
        if not uri.startswith(SCHEME):
            raise StorageError(f"{uri} is no address in S3; give one such as s3://bucket/prefix")
        with self._asking("used"):
            once = Waits(1, waits.connect, waits.read, waits.request)  # `_again` counts the tries
            self._fs, path = fsspec.core.url_to_fs(self.uri, **settings(self.uri, once))
            self._fs.retries = 1
            self._path = str(path).rstrip("/")
            self._bucket, self._key, _ = self._fs.split_path(self._path)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, or those from `start` up to `end`; FileNotFoundError."""
        limit = self.waits.request
        with self._asking("read", name):
            return bytes(
                self._again(
                    lambda: self._fs.cat_file(
                        f"{self._path}/{name}",
                        start=start,
                        end=end,
                        max_concurrency=1,
                        timeout=limit,
                    )
                )
            )

    def write(self, name: str, data: bytes, only_new: bool = False) -> bool:
        """Write an object, which S3 checks by its SHA-256; False if `only_new` and one is there.

        A store that knows no conditional writes overwrites it.
        """
        sha = hashlib.sha256(data)
        arguments: dict[str, Any] = {
            "Body": data,
            "ChecksumSHA256": _base64(sha.digest()),
            "Metadata": {SUM: sha.hexdigest()},
        }
        with self._asking("written", name):
            if only_new:
                try:
                    self._call("put_object", name, **arguments, IfNoneMatch="*")
                    return True
                except OSError as error:
                    code = code_of(error)
                    if code in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
                        return False
                    if code not in ("NotImplemented", "501"):
                        raise
            self._call("put_object", name, **arguments)
        return True

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object below the address, by name."""
        with self._asking("listed"):
            self._fs.invalidate_cache()
            found = self._again(
                lambda: self._fs.find(self._path, detail=True, timeout=self.waits.request)
            )
        prefix = f"{self._path}/"
        return {
            path.removeprefix(prefix): int(entry["size"])
            for path, entry in found.items()
            if path.startswith(prefix) and path != prefix
        }

    def metadata(self, name: str) -> dict[str, str]:
        """Return what an object was written with beside its content, such as its `SUM`."""
        with self._asking("read", name):
            return dict(self._call("head_object", name).get("Metadata", {}))

    def begin(self, name: str, metadata: dict[str, str]) -> str:
        """Begin an object in parts, none of which is seen before `finish`; return its id."""
        with self._asking("written", name):
            made = self._call(
                "create_multipart_upload", name, ChecksumAlgorithm="SHA256", Metadata=metadata
            )
        return str(made["UploadId"])

    def add_part(self, name: str, upload: str, number: int, data: bytes) -> dict[str, Any]:
        """Write part `number`, from 1, checked by its SHA-256; return what `finish` wants of it."""
        digest = _base64(hashlib.sha256(data).digest())
        with self._asking("written", name):
            answer = self._call(
                "upload_part", name, UploadId=upload, PartNumber=number, Body=data,
                ChecksumSHA256=digest,
            )  # fmt: skip
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        # A store that knows no checksums must not be told of them.
        return part | ({"ChecksumSHA256": digest} if "ChecksumSHA256" in answer else {})

    def finish(
        self, name: str, upload: str, parts: list[dict[str, Any]], metadata: dict[str, str]
    ) -> None:
        """Make an object of its parts, in the order of their numbers; `metadata` as at `begin`."""
        with self._asking("written", name):
            try:
                self._call(
                    "complete_multipart_upload", name, UploadId=upload,
                    MultipartUpload={"Parts": parts},
                )  # fmt: skip
            except FileNotFoundError:
                # Of a request whose answer was lost: what was completed is begun no more.
                if self.metadata(name) != metadata:
                    raise

    def abort(self, name: str, upload: str) -> None:
        """Forget an object in parts; what can't be forgotten is left to the bucket's lifecycle.

        That is said in the log and not raised, for it would hide why the upload ended.
        """
        try:
            self._fs.call_s3(
                "abort_multipart_upload", Bucket=self._bucket, Key=self._key_of(name),
                UploadId=upload, timeout=QUICK.request,
            )  # fmt: skip
        except Exception as error:  # botocore's and s3fs's have no common base
            log.warning(
                "parts of %s/%s stay in the bucket until its lifecycle removes them: %s",
                self.uri, name, words_of(error, QUICK),
            )  # fmt: skip

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def _call(self, method: str, name: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._again(
            lambda: self._fs.call_s3(
                method, Bucket=self._bucket, Key=self._key_of(name), timeout=self.waits.request,
                **arguments,
            )
        )  # fmt: skip
        return answer

    def _again(self, call: Callable[[], T]) -> T:
        """Make a request until it succeeds, fails for good, or has been made `tries` times."""
        pause = PAUSE_SECONDS
        for last in (*[False] * (self.waits.tries - 1), True):
            try:
                return call()
            except Exception as error:
                if last or not passes(error):
                    raise
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("unreachable: the last try returns or raises")

    @contextlib.contextmanager
    def _asking(self, done: str, name: str = "") -> Iterator[None]:
        """Turn what is raised into one sentence; an object to be read that is missing stays so."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if done == "read" and isinstance(error, FileNotFoundError):
                raise
            where = f"{self.uri}/{name}" if name else self.uri
            raise StorageError(
                f"{where} can't be {done}: {words_of(error, self.waits)}; {WAY_OUT}"
            ) from error


def passes(error: BaseException) -> bool:
    """Tell whether the same request may succeed a moment later."""
    import botocore.exceptions
    from s3fs.core import S3_RETRYABLE_ERRORS

    status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status:
        return (
            status in (408, 429) or (status >= 500 and status != 501) or code_of(error) in PASSING
        )
    lost = (
        *S3_RETRYABLE_ERRORS,
        botocore.exceptions.ConnectionError,
        ConnectionError,
        TimeoutError,
    )
    return isinstance(error, lost)


def code_of(error: BaseException | None) -> str:
    """Return S3's code of an error, e.g. `NoSuchKey`; empty for one that isn't S3's."""
    return str(_answer(error).get("Error", {}).get("Code", "")) if error else ""


def words_of(error: BaseException, waits: Waits = PATIENT) -> str:
    """Return what went wrong in a few words."""
    text = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
        return f"no answer in {waits.request:g} s"
    return text.splitlines()[0].rstrip(".")


def _answer(error: BaseException | None) -> dict[str, Any]:
    """S3's own answer behind an error of s3fs, which keeps it as the cause."""
    from botocore.exceptions import ClientError

    for one in (error, getattr(error, "__cause__", None)):
        if isinstance(one, ClientError):
            return dict(one.response)
    return {}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
