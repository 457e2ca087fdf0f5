"""A real S3 server (moto's, in this process), and the settings by which s3fs finds one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY, REGION = "key", "secret", "us-east-1"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run a server on a free port; give its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        forget_buckets()


@contextlib.contextmanager
def s3_bucket(name: str) -> Iterator[str]:
    """Run a server with a bucket that s3fs finds by AWS's variables; give the bucket's address."""
    import s3fs

    with s3_server() as endpoint, environment(AWS_ENDPOINT_URL=endpoint):
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}"


def flyte_variables(endpoint: str) -> dict[str, str]:
    """The server's address and keys as Flyte gives them to pods."""
    return {
        "FLYTE_AWS_ENDPOINT": endpoint,
        "FLYTE_AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "FLYTE_AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def forget_buckets() -> None:
    """Empty the servers of this process: all that it ever runs share their buckets."""
    from moto.moto_api._internal import moto_api_backend

    moto_api_backend.reset()


@functools.cache
def _short_bundle() -> Any:
    """A file of one certificate authority; and from here on clients share AWS's service models.

    Tests make clients by the hundred, whose servers speak plain HTTP. Each would read all
    authorities and models again, for two thirds of the CPU seconds of tests with S3.
    """
    import botocore.session
    import certifi
    from botocore.loaders import create_loader

    botocore.session.create_loader = functools.cache(create_loader)
    end = "-----END CERTIFICATE-----\n"
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")  # noqa: SIM115 (gone with this process)
    file.write(Path(certifi.where()).read_text().partition(end)[0] + end)
    file.flush()
    return file


class environment:
    """S3's settings for a while; s3fs keeps file systems, so they are forgotten on both ends."""

    def __init__(self, **settings: str) -> None:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        keys["AWS_CA_BUNDLE"] = _short_bundle().name
        self.settings = {"AWS_DEFAULT_REGION": REGION} | keys | settings

    def __enter__(self) -> None:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        self.before = {key: os.environ.get(key) for key in self.settings}
        os.environ.update(self.settings)

    def __exit__(self, *error: object) -> None:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        for key, value in self.before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
