"""Flyte 2 in this process. Without its extra nothing here is run, and Ctrl-C stays pytest's."""

from __future__ import annotations

import importlib.util
import signal

import fsspec
from s3fs import S3FileSystem

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("flyte") is None:
    collect_ignore_glob.append("test_*.py")
else:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    import workflows.flyte2.host  # noqa: F401 (it handles signals from here on)

    # Flyte 2 registers obstore for s3://, with other options than s3fs's, which other tests use.
    fsspec.register_implementation("s3", S3FileSystem, clobber=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
