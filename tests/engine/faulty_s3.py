"""A real S3 server whose answers can be made slow, refused or damaged; see `Faults`."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from s3_server import environment, forget_buckets

WRITES = ("PUT", "POST")


@dataclass
class Faults:
    """What happens to writes whose path has `part` in it; nothing while `part` is empty."""

    part: str = ""
    status: int = 503  # the answer instead of the server's own; 0: the server's own
    times: int = 1 << 30  # how many are refused; the rest go through
    pause_s: float = 0.0  # before every answer to a write
    refused: int = 0  # so far
    reads: bool = False  # reads are slow and refused as well
    flip: int = 0  # so many of the next writes with `part` arrive with one bit flipped
    asked: list[tuple[str, str]] = field(default_factory=list)  # methods and paths, as they came
    at_once: int = 0  # the most that were being answered at one time
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, path: str) -> bool:
        """Count a write, and say whether it is refused."""
        hit = bool(self.part and self.status and self.part in path and self.times > 0)
        self.times -= hit
        self.refused += hit
        return hit

    def writes(self, part: str = "") -> list[str]:
        """Paths of the writes so far that have `part` in them."""
        return [path for method, path in self.asked if method in WRITES and part in path]

    @contextlib.contextmanager
    def counted(self, method: str, path: str) -> Iterator[None]:
        """Note a request, and that it is being answered during the block."""
        with self.lock:
            self.asked.append((method, path))
            self.now += 1
            self.at_once = max(self.at_once, self.now)
        try:
            yield
        finally:
            with self.lock:
                self.now -= 1


class Faulty:
    """WSGI: the S3 server behind its faults."""

    def __init__(self, server: Callable[..., Iterable[bytes]], faults: Faults) -> None:
        self._server, self._faults = server, faults

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        with self._faults.counted(environ["REQUEST_METHOD"], path):
            if environ["REQUEST_METHOD"] in WRITES or self._faults.reads:
                time.sleep(self._faults.pause_s)
                if self._faults.strike(path):
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                    code = "SlowDown" if self._faults.status == 503 else "AccessDenied"
                    answer = _answer(start_response, self._faults.status, code)
                    # An answer to HEAD has no body; one is taken for a broken connection.
                    return [] if environ["REQUEST_METHOD"] == "HEAD" else answer
                if not self._arrived(environ):
                    return _answer(start_response, 400, "BadDigest")
            return self._server(environ, start_response)

    def _arrived(self, environ: dict[str, Any]) -> bool:
        """Compare a body with its checksum, which moto takes on trust and S3 does not."""
        wanted = environ.get("HTTP_X_AMZ_CHECKSUM_SHA256")
        if environ["REQUEST_METHOD"] != "PUT" or not wanted:
            return True
        body = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        if self._faults.flip and body and self._faults.part in environ["PATH_INFO"]:
            self._faults.flip -= 1
            body[len(body) // 2] ^= 1
        environ["wsgi.input"] = io.BytesIO(body)
        return base64.b64encode(hashlib.sha256(body).digest()).decode() == wanted


def _answer(start_response: Callable[..., Any], status: int, code: str) -> Iterable[bytes]:
    start_response(f"{status} Refused", [("Content-Type", "application/xml")])
    return [f"<Error><Code>{code}</Code><Message>Not now</Message></Error>".encode()]


@contextlib.contextmanager
def faulty_s3(bucket: str) -> Iterator[Faults]:
    """The server with a bucket, and the environment by which s3fs finds it."""
    import s3fs
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    faults = Faults()
    app = Faulty(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with environment(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_MAX_ATTEMPTS="2"
        ):
            s3fs.S3FileSystem().mkdir(bucket)
            yield faults
    finally:
        server.shutdown()
        thread.join(10)
        forget_buckets()
