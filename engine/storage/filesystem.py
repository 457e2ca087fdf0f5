"""The one way to files by name: a path, a URI, a model on the hub, or artifacts' place.

Writes to a local disk are whole or not there. `Files` has S3's endpoint, credentials, deadlines and
retries: s3fs's and botocore's own retries are off, because they multiply. Writing to S3 is in `s3`.
"""

import contextlib
import errno
import importlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from engine.errors import ConfigError, EngineError, ModelError, StorageError, first_line


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all, replacing what is there; raise OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with draft.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                while len(view):
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path, way_out: str) -> Iterator[None]:
    """Turn the block's OSError into a StorageError that names `path` and ends in the way out."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror or error}; {way_out}") from error


def write_text(path: Path, text: str, way_out: str) -> None:
    """Write a text whole or not at all; StorageError, which ends in the way out, if that fails."""
    with writing(path, way_out):
        write_atomically(path, [text.encode()])


def fsync_tree(folder: Path) -> None:
    """Force the content of every file and folder below `folder` to disk; raise OSError."""
    for base, _, files in os.walk(folder):
        for name in files:
            fsync(Path(base) / name)
        fsync(Path(base))


def move_folder(folder: Path, target: Path) -> bool:
    """Rename a folder; return False, without effect, where another is; raise OSError."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    fsync(target.parent)
    return True


def replace_folder(folder: Path, target: Path, aside: Path) -> None:
    """Put `folder` where `target` is; of several that do so at once, one stays. Raise OSError.

    What was there is renamed to `aside`, and comes back if that fails; else it is removed.
    """
    with contextlib.suppress(FileNotFoundError):  # nothing there, or another has just taken it
        os.rename(target, aside)
    try:
        if not move_folder(folder, target):
            shutil.rmtree(folder)
    except BaseException:
        if aside.exists():
            os.rename(aside, target)
        raise
    remove(aside)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there; what can't be removed of a folder stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Force one file, or the list of a folder's names, to disk; raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def process_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except PermissionError:
        pass
    return True


def process_start(pid: int) -> str | None:
    """When a process began, a text that with its number names it; None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if not Path("/proc/self/stat").exists() and process_is_alive(pid) else None
    return None if fields[0] in ("Z", "X") else fields[19]


HOME_VARIABLE = "HYBRIDFLYTE_HOME"
STORE_VARIABLE = "HYBRIDFLYTE_STORE"
ARTIFACTS = "artifacts"
_PLACE = re.compile(
    rf"(?P<root>.+)/{ARTIFACTS}/(?P<place>[a-z][a-z0-9_]*/[0-9a-f]{{16}}(-[0-9a-f]{{8}})?)"
)


def home() -> Path:
    """Return the absolute folder of all outputs: $HYBRIDFLYTE_HOME, or ./outputs."""
    return Path(os.environ.get(HOME_VARIABLE) or "outputs").expanduser().absolute()


def artifact_path(kind: str, digest: str) -> Path:
    """Return where the artifact with this content digest (hex) is or would be published."""
    return home() / ARTIFACTS / kind / digest[:16]


def shared_store() -> str:
    """$HYBRIDFLYTE_STORE, the shared store; "" for none, ConfigError for no s3://bucket."""
    root = os.environ.get(STORE_VARIABLE, "").rstrip("/")
    if root and not re.fullmatch(r"s3://[^/\s:@]+(/[^/\s]+)*", root):
        raise ConfigError(
            f"{STORE_VARIABLE}={root!r} is no address in S3; set it to s3://bucket/prefix, with "
            f"credentials in AWS's own variables, or unset it to keep artifacts in {HOME_VARIABLE}"
        )
    return root


def shared_address(folder: str | Path) -> str:
    """A published artifact's place in the shared store; the path itself where it has none."""
    root, path = shared_store(), Path(folder).absolute()
    if root and path.is_relative_to(home() / ARTIFACTS):
        shared = f"{root}/{path.relative_to(home()).as_posix()}"
        if is_artifact_address(shared):
            return shared
    return str(folder)


def is_artifact_address(uri: str) -> bool:
    """Tell whether an address is where an artifact is or would be published."""
    return _PLACE.fullmatch(uri) is not None


def local_copy_path(uri: str) -> Path | None:
    """Return where this machine keeps what is at an address in the store; None for any other."""
    match, root = _PLACE.fullmatch(uri), shared_store()
    if match is None or not root or match["root"] != root:
        return None
    return home() / ARTIFACTS / match["place"]


SECONDS = 10.0  # the hub's, for one answer
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(path: str | Path) -> bool:
    """Tell whether a value looks like a model on the hub and not like a folder."""
    name, _, _ = str(path).partition("@")
    looks = name.count("/") == 1 and not name.startswith((".", "/", "~")) and " " not in name
    return looks and not Path(path).exists()


def require_model_name(path: str | Path, setting: str = "model.path", way_out: str = "") -> None:
    """Raise ModelError for a value that is neither a folder here nor looks like a hub id.

    way_out: what may be done besides giving one, e.g. ", or leave it empty".
    """
    if not Path(path).exists() and not is_hub_id(path):
        raise ModelError(
            f"{setting}={str(path)!r} does not exist; give a folder written by save_pretrained or "
            f"a hub id (owner/name){way_out}"
        )


def split_revision(path: str | Path) -> tuple[str, str | None]:
    """A hub id `owner/name@revision` in two, None for the newest; a folder's path as it is."""
    if not is_hub_id(path):
        return str(path), None
    name, _, revision = str(path).partition("@")
    return name, revision or None


def pin_revision(path: str, setting: str = "model.path") -> str:
    """A hub id with its present commit, by the hub or its cache, or ModelError; a folder as is."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    require_model_name(path, setting)
    name, revision = split_revision(path)
    if not is_hub_id(path) or _COMMIT.fullmatch(revision or ""):
        return path
    unavailable = (OSError, HTTPError, HFValidationError)  # network, permission, unknown id
    try:
        # Asked first because a download waits without end for a silent network. The file is what
        # the cache remembers the branch by.
        HfApi().model_info(name, revision=revision, timeout=SECONDS)
        file = hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS)
    except unavailable as error:
        try:
            file = hf_hub_download(name, "config.json", revision=revision, local_files_only=True)
        except unavailable:
            raise ModelError(
                f"{setting}={path!r} is no folder, and neither the Hugging Face hub "
                f"({type(error).__name__}) nor its cache here says which commit it is; check the "
                "name, the network and HF_TOKEN, or give a folder or NAME@COMMIT"
            ) from error
    return f"{name}@{Path(file).parent.name}"


def hub_folder(hub_id: str, setting: str = "model.path") -> Path:
    """Fetch a model into the hub's cache; return its folder there, or raise ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    name, revision = split_revision(hub_id)
    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=files, etag_timeout=SECONDS)
        )
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(
            f"{setting}={hub_id!r} is no folder here and can't be downloaded from the hub "
            f"({loading_error(error)}); check the name and the network, or give a folder"
        ) from error


def refuse_own_code(path: str) -> None:
    """Raise ModelError for a model whose folder brings Python code of its own (`auto_map`)."""
    from huggingface_hub import hf_hub_download

    file = Path(path) / "config.json"
    if is_hub_id(path):
        name, revision = split_revision(path)
        file = Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS))
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return  # what can't be read is refused where the model is loaded
    if isinstance(config, dict) and config.get("auto_map"):
        raise ModelError(
            f"model.trust_remote_code=true, and {path} brings Python code "
            f"({sorted(config['auto_map'])}), which is never run here; set it to false where "
            "transformers has a class for this model"
        )


def loading_error(error: Exception) -> str:
    """transformers' reason why a folder or hub id can't be loaded, in one line."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run; give a model that loads by itself"
    return first_line(error)


T = TypeVar("T")

S3_SCHEMES = ("s3://", "s3a://")
OTHER_CLOUDS = ("abfs", "abfss", "az", "gcs", "gs")
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
RETRYABLE_CODES = (
    *("BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "Throttling"),
    *("ThrottlingException", "TooManyRequests", "XAmzContentSHA256Mismatch"),
)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request to S3 may take, in seconds, and how often it is made."""

    attempts: int
    connect: float
    read: float  # without a byte of the answer
    request: float  # in all, for one object, part or range


QUICK = Timeouts(attempts=2, connect=3, read=10, request=20)  # to learn what is there
PATIENT = Timeouts(attempts=5, connect=5, read=30, request=120)  # to move content


def s3_credentials() -> dict[str, object]:
    """s3fs's options: AWS's own variables, or else FLYTE_AWS_* of Flyte's pods."""
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    # Also where botocore would find it: s3fs keeps one file system for equal options.
    options: dict[str, object] = {"client_kwargs": {"endpoint_url": endpoint}} if endpoint else {}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return options
    key = os.environ.get("FLYTE_AWS_ACCESS_KEY_ID")
    secret = os.environ.get("FLYTE_AWS_SECRET_ACCESS_KEY")
    return options | ({"key": key, "secret": secret} if key and secret else {})


class Entry(TypedDict, total=False):
    """The description of a file or folder by fsspec's drivers."""

    name: str  # the file system's path
    size: int | None  # bytes
    type: str  # "file", "directory", or a driver's own
    mtime: float  # seconds since the epoch, on disks
    LastModified: datetime  # in S3
    updated: datetime  # in other object stores


class Files:
    """The file at a path or URI, or the files below it."""

    def __init__(self, uri: str | Path, timeouts: Timeouts = QUICK) -> None:
        """Raise ValueError or ImportError for a scheme that no installed file system has."""
        text = os.fspath(uri)
        text = text if "://" in text else str(Path(text).expanduser().absolute())
        self.is_s3 = text.startswith(S3_SCHEMES)
        scheme = text.partition("://")[0]
        if scheme in OTHER_CLOUDS or self.is_s3:
            # fsspec's registry may name another driver: Flyte 2 puts obstore's there.
            module, _, name = known_implementations[scheme]["class"].rpartition(".")
            driver = getattr(importlib.import_module(module), name)
            options = driver._get_kwargs_from_urls(text)
            if self.is_s3:
                config = {
                    "connect_timeout": timeouts.connect,
                    "read_timeout": timeouts.read,
                    "retries": {"mode": "standard", "total_max_attempts": 1},
                }
                options = {**s3_credentials(), "config_kwargs": config}
            self.fs, path = driver(**options), driver._strip_protocol(text)
        else:
            self.fs, path = fsspec.core.url_to_fs(text)
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
        part = {"start": start, "end": end, "max_concurrency": 1, "timeout": self.timeouts.request}
        return self.request(lambda: bytes(self.fs.cat_file(self.path_of(name), **part)))

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
        entries = self.request(lambda: self.fs.find(self.path, detail=True))
        start = len(self.path) + 1  # a key that equals the folder is S3's mark of an empty one
        return {path[start:]: entry for path, entry in entries.items() if len(path) > start}

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file at any depth, by its path below."""
        return {name: int(entry["size"] or 0) for name, entry in self.find().items()}

    def entries(self) -> list[Entry]:
        """Return fsspec's entry of each file and folder right here; none where there is nothing."""
        self.fs.invalidate_cache()
        try:
            entries = self.request(lambda: self.fs.ls(self.path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry for entry in entries if entry["name"].rstrip("/") != self.path]


def is_remote(address: str | Path) -> bool:
    """Tell URIs such as s3://… from paths; file:// counts as a path."""
    return "://" in str(address) and not str(address).startswith("file://")


def as_path(address: str | Path) -> Path:
    return Path(str(address).removeprefix("file://")).expanduser()


def read_file(address: str | Path, refused: type[EngineError]) -> bytes:
    """Read a file; FileNotFoundError, StorageError for no answer, or else `refused`."""
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
    """Raise what a file system raises as `refused`, or StorageError for no answer; not `keep`."""
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

    if status := _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0):
        busy = status in (408, 429) or (status >= 500 and status != 501)
        return busy or error_code(error) in RETRYABLE_CODES
    lost = (botocore.exceptions.ConnectionError, ConnectionError, TimeoutError)
    return isinstance(error, (*S3_RETRYABLE_ERRORS, *lost))


def error_code(error: BaseException | None) -> str:
    """Return S3's code of an error, e.g. `NoSuchKey`; empty for one that isn't S3's."""
    return str(_response(error).get("Error", {}).get("Code", "")) if error else ""


def error_text(error: BaseException) -> str:
    """Return the first line of what went wrong."""
    return str(getattr(error, "strerror", None) or first_line(error)).rstrip(".")


def _response(error: BaseException | None) -> dict[str, Any]:
    """S3's own answer behind an error of s3fs, which keeps it as the cause."""
    from botocore.exceptions import ClientError

    causes = (error, getattr(error, "__cause__", None))
    return next((dict(cause.response) for cause in causes if isinstance(cause, ClientError)), {})
