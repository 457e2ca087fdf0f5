"""Where artifacts are kept: on this machine, and in the store that machines share, if there is one.

Only paths and addresses; nothing is read or written here. A folder's place in both is the same:
`artifacts/<kind>/<16 hex digits>`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from engine.errors import ConfigError

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
    """Return the address of the shared store, $HYBRIDFLYTE_STORE; empty where there is none.

    Raises ConfigError for anything but s3://bucket or s3://bucket/prefix, without credentials.
    """
    root = os.environ.get(STORE_VARIABLE, "").rstrip("/")
    if root and not re.fullmatch(r"s3://[^/\s:@]+(/[^/\s]+)*", root):
        raise ConfigError(
            f"{STORE_VARIABLE}={root!r} is no address in S3; set it to s3://bucket/prefix, with "
            "credentials in AWS's own variables, or unset it to keep artifacts in "
            f"{HOME_VARIABLE} alone"
        )
    return root


def shared_address(folder: str | Path) -> str:
    """Return by what other machines know a published artifact: its place in the store.

    The path itself where there is no store, and for a folder that is no artifact of this machine's.
    """
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
    found, root = _PLACE.fullmatch(uri), shared_store()
    if found is None or not root or found["root"] != root:
        return None
    return home() / ARTIFACTS / found["place"]
