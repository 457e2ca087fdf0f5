"""Objects in S3: single requests, each with a deadline, repeated, and checked by S3 with SHA-256.

What lives here: `Objects`, with conditional writes and the four requests of a multipart upload.
What does not: sending parts in parallel (`.multipart`), files of a folder (`.transfer`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
from collections.abc import Iterator
from typing import NotRequired, TypedDict

from engine.errors import StorageError
from engine.storage.filesystem import (
    CHECK_S3,
    PATIENT,
    QUICK,
    S3_SCHEMES,
    Files,
    Timeouts,
    error_code,
    error_text,
)

log = logging.getLogger(__name__)

SHA256_KEY = "sha256"  # entry of an object's metadata: the SHA-256 (hex) of its content


class CompletedPart(TypedDict):
    """A part as S3 needs it to complete the upload."""

    PartNumber: int
    ETag: str
    ChecksumSHA256: NotRequired[str]


class _Answer(TypedDict, total=False):
    """What is read of S3's answers."""

    UploadId: str
    ETag: str
    ChecksumSHA256: str
    Metadata: dict[str, str]


class Objects(Files):
    """The objects below one address; names are keys relative to it, e.g. `splits/train.txt`."""

    def __init__(self, uri: str, timeouts: Timeouts = PATIENT) -> None:
        """Raise StorageError for what is no s3:// address; no request is made yet."""
        self.uri, self.timeouts = uri, timeouts
        if not uri.startswith(S3_SCHEMES):
            raise StorageError(f"{uri} is no address in S3; give one such as s3://bucket/prefix")
        with self._translated("used"):
            super().__init__(uri, timeouts)
            self._bucket, self._key, _ = self.fs.split_path(self.path)

    def read(self, name: str = "", start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, or those from `start` up to `end`; FileNotFoundError."""
        with self._translated("read", name):
            return self.read_range(name, start, end)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object below the address, by name."""
        with self._translated("listed"):
            return super().sizes()

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata that an object was written with, such as its `SHA256_KEY`."""
        with self._translated("read", name):
            return dict(self._call("head_object", name).get("Metadata", {}))

    def put(self, name: str, data: bytes | bytearray, only_new: bool = False) -> bool:
        """Write an object in one request; False if `only_new` and one is there.

        A store that knows no conditional writes overwrites it.
        """
        sha = hashlib.sha256(data)
        arguments = {
            "Body": data,
            "ChecksumSHA256": _base64(sha.digest()),
            "Metadata": {SHA256_KEY: sha.hexdigest()},
        }
        with self._translated("written", name):
            if only_new:
                try:
                    self._call("put_object", name, **arguments, IfNoneMatch="*")
                    return True
                except OSError as error:
                    code = error_code(error)
                    if code in ("PreconditionFailed", "412", "ConditionalRequestConflict"):
                        return False
                    if code not in ("NotImplemented", "501"):
                        raise
            self._call("put_object", name, **arguments)
        return True

    def create_multipart(self, name: str, metadata: dict[str, str]) -> str:
        """Begin an object in parts, which is not seen until it is completed; return its id."""
        with self._translated("written", name):
            made = self._call(
                "create_multipart_upload", name, ChecksumAlgorithm="SHA256", Metadata=metadata
            )
        return str(made["UploadId"])

    def upload_part(
        self, name: str, upload: str, number: int, data: bytes | bytearray
    ) -> CompletedPart:
        """Write part `number`, from 1; return what `complete_multipart` needs."""
        digest = _base64(hashlib.sha256(data).digest())
        with self._translated("written", name):
            answer = self._call(
                "upload_part", name, UploadId=upload, PartNumber=number, Body=data,
                ChecksumSHA256=digest,
            )  # fmt: skip
        part = CompletedPart(PartNumber=number, ETag=answer["ETag"])
        if "ChecksumSHA256" in answer:  # a store without checksums refuses the field
            part["ChecksumSHA256"] = digest
        return part

    def complete_multipart(
        self, name: str, upload: str, parts: list[CompletedPart], metadata: dict[str, str]
    ) -> None:
        """Make an object of its parts, in order; `metadata` as at the start of the upload."""
        with self._translated("written", name):
            try:
                self._call(
                    "complete_multipart_upload", name, UploadId=upload,
                    MultipartUpload={"Parts": parts},
                )  # fmt: skip
            except FileNotFoundError:
                # The request was repeated after its answer was lost: S3 knows no such upload then.
                if self.metadata(name) != metadata:
                    raise

    def abort_multipart(self, name: str, upload: str) -> None:
        """Delete the parts of an object that was not completed.

        A failure is logged and not raised, for it would hide why the upload ended.
        """
        try:
            self.fs.call_s3(
                "abort_multipart_upload", Bucket=self._bucket, Key=self._key_of(name),
                UploadId=upload, timeout=QUICK.request,
            )  # fmt: skip
        except Exception as error:  # botocore's and s3fs's have no common base
            log.warning(
                "parts of %s/%s stay in the bucket until its lifecycle removes them: %s",
                self.uri, name, error_text(error),
            )  # fmt: skip

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def _call(self, method: str, name: str, **arguments: object) -> _Answer:
        answer: _Answer = self.request(
            lambda: self.fs.call_s3(
                method, Bucket=self._bucket, Key=self._key_of(name), timeout=self.timeouts.request,
                **arguments,
            )
        )  # fmt: skip
        return answer

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
            text = error_text(error)
            if isinstance(error, TimeoutError) or type(error).__name__ == "FSTimeoutError":
                text = f"no answer in {self.timeouts.request:g} s"
            raise StorageError(f"{where} can't be {done}: {text}; {CHECK_S3}") from error


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
