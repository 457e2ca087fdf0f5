"""Flyte 2 in this process. Without its extra nothing here is run, and Ctrl-C stays pytest's."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator

import fsspec
import pytest
from s3fs import S3FileSystem

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("flyte") is None:
    collect_ignore_glob.append("test_*.py")
else:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import workflows.flyte2.host  # noqa: F401 (it handles signals from here on)

    for number, handler in handlers.items():
        signal.signal(number, handler)
    # Importing Flyte 2 makes obstore the driver of s3://; outside of these tests it is s3fs.
    OBSTORE = fsspec.get_filesystem_class("s3")
    fsspec.register_implementation("s3", S3FileSystem, clobber=True)

    @pytest.fixture(autouse=True)
    def s3_by_obstore() -> Iterator[None]:
        """The driver that a process has after importing Flyte 2."""
        fsspec.register_implementation("s3", OBSTORE, clobber=True)
        yield
        fsspec.register_implementation("s3", S3FileSystem, clobber=True)
