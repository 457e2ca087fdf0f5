"""A real S3 server whose answers can be made slow or refused; see `Faults`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from s3_server import environment


@dataclass
class Faults:
    """What happens to writes whose path has `part` in it; nothing while `part` is empty."""

    part: str = ""
    status: int = 503  # the answer instead of the server's own; 0: the server's own
    times: int = 1 << 30  # how many are refused; the rest go through
    pause_s: float = 0.0  # before every answer to a write
    refused: int = 0  # so far

    def strike(self, path: str) -> bool:
        """Count a write, and say whether it is refused."""
        hit = bool(self.part and self.status and self.part in path and self.times > 0)
        self.times -= hit
        self.refused += hit
        return hit


class Faulty:
    """WSGI: the S3 server behind its faults."""

    def __init__(self, server: Callable[..., Iterable[bytes]], faults: Faults) -> None:
        self._server, self._faults = server, faults

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("PUT", "POST"):
            time.sleep(self._faults.pause_s)
            if self._faults.strike(environ["PATH_INFO"]):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response(
                    f"{self._faults.status} Refused", [("Content-Type", "application/xml")]
                )
                code = "SlowDown" if self._faults.status == 503 else "AccessDenied"
                return [f"<Error><Code>{code}</Code><Message>Not now</Message></Error>".encode()]
        return self._server(environ, start_response)


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
            store = s3fs.S3FileSystem()
            if not store.exists(bucket):  # the servers of one process share their buckets
                store.mkdir(bucket)
            yield faults
    finally:
        server.shutdown()
        thread.join(10)
