"""A real S3 server for the tests of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import s3_bucket

# Ray's worker processes import `counting`.
_PATHS = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A real S3 server in this process; s3fs reads where it is from the environment."""
    with s3_bucket("checkpoints") as address:
        yield address
