"""A real S3 server for the tests of checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from s3_server import environment

# Ray's worker processes import `counting`.
_PATHS = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A real S3 server in this process; s3fs reads where it is from the environment."""
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with environment(AWS_ENDPOINT_URL=f"http://{host}:{port}"):
        s3fs.S3FileSystem().mkdir("checkpoints")
        yield "s3://checkpoints"
    server.stop()
