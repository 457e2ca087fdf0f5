"""Checks of what a run writes to: shared memory, output folder, MLflow, S3.

No check leaves a file behind, and each network request has a deadline.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.console import human_bytes
from engine.errors import ConfigError
from engine.health.report import HealthFinding
from engine.redaction import without_credentials
from engine.storage.filesystem import ENDPOINTS
from engine.storage.locations import HOME_VARIABLE, STORE_VARIABLE, home, shared_store
from engine.tracking.connection import URI_VARIABLE, cause, default_uri

SHARED_MEMORY = Path("/dev/shm")


def shared_memory(least_gib: float) -> HealthFinding:
    """The size of /dev/shm, which Docker limits to 64 MB."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return HealthFinding(str(SHARED_MEMORY), "missing", f"{SHARED_MEMORY}: {error.strerror}")
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    fault = ""
    if size < least_gib * 2**30:
        fault = (
            f"{SHARED_MEMORY} has {human_bytes(size)}, at least {least_gib:g} GiB is needed by "
            "Ray's object store and torch's queues; docker run --shm-size=2g, or on Kubernetes an "
            "emptyDir of medium Memory"
        )
    return HealthFinding(
        str(SHARED_MEMORY), f"{human_bytes(size)}, {human_bytes(free)} free", fault
    )


def output_folder() -> HealthFinding:
    """Whether artifacts can be written, or their folder be made."""
    folder = home()
    # A missing folder will be made: the nearest existing one above must be writable.
    above = next(path for path in (folder, *folder.parents) if path.exists())
    fault, free = _unwritable(above)
    way_out = f"make it writable, mount a volume there, or set {HOME_VARIABLE}"
    return HealthFinding(
        HOME_VARIABLE,
        f"{folder}, {free}",
        f"{folder} can't be written: {fault}; {way_out}" if fault else "",
    )


def _unwritable(folder: Path) -> tuple[str, str]:
    """Return why a file can't be written there (empty if it can), and the free space."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        room = os.statvfs(folder)
        return "", f"{human_bytes(room.f_bavail * room.f_frsize)} free"
    except OSError as error:
        return error.strerror or str(error), "not writable"


def mlflow(deadline_s: float) -> HealthFinding:
    """Whether the server answers as MLflow does, or the folder of a SQLite store is writable."""
    uri = default_uri()
    shown, way_out = without_credentials(uri), f"check {URI_VARIABLE}"
    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///")).absolute()
        above = next(path for path in (file.parent, *file.parents) if path.exists())
        fault, _ = _unwritable(above)
        return HealthFinding(
            "MLflow", shown, f"{above} can't be written: {fault}; {way_out}" * bool(fault)
        )
    if not uri.startswith(("http://", "https://")):
        return HealthFinding("MLflow", f"{shown}, not looked at")
    answer, fault = _ask(uri.rstrip("/") + "/health", deadline_s, _mlflow_credentials())
    if not fault and answer != 200:
        wants = "wants other credentials" if answer in (401, 403) else "is it an MLflow server?"
        fault = f"status {answer} at /health, {wants}"
    full = f"MLflow at {shown} can't be used: {fault}; {way_out}"
    return HealthFinding(
        "MLflow", f"{shown}, status {answer}" if answer else shown, full * bool(fault)
    )


def _mlflow_credentials() -> dict[str, Any]:
    """MLflow's own variables, as arguments of an HTTP request."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"headers": {"Authorization": f"Bearer {token}"}}
    return {"auth": (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))} if user else {}


def s3(deadline_s: float) -> Iterator[HealthFinding]:
    """Whether the shared store is an address, and the endpoint answers, where they are set.

    AWS's own endpoint is not looked at.
    """
    if os.environ.get(STORE_VARIABLE):
        try:
            yield HealthFinding(STORE_VARIABLE, shared_store())
        except ConfigError as error:
            yield HealthFinding(STORE_VARIABLE, "no address", str(error))
    variable = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if variable is None:
        return
    endpoint = os.environ[variable]
    shown = without_credentials(endpoint)
    # Without credentials an S3 server refuses (403), and that is an answer.
    answer, fault = _ask(endpoint, deadline_s, {})
    if not fault and answer is not None and answer >= 500:
        fault = f"status {answer}"
    full = f"S3 at {shown} can't be used: {fault}; check {variable}"
    yield HealthFinding("S3", f"{shown}, status {answer}" if answer else shown, full * bool(fault))


def _ask(url: str, deadline_s: float, arguments: dict[str, Any]) -> tuple[int | None, str]:
    """Return the status of an HTTP GET, or why there is none within the deadline."""
    import httpx

    def get() -> int:
        with httpx.stream("GET", url, timeout=deadline_s, **arguments) as response:
            return response.status_code

    try:
        return _within(deadline_s, get), ""
    except (TimeoutError, httpx.TimeoutException):  # whichever comes first
        return None, f"no answer in {deadline_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        return None, cause(error)


def _within(deadline_s: float, action: Callable[[], int]) -> int:
    """Return what the action returns; TimeoutError after the deadline (httpx's is not for DNS)."""
    done: list[int | Exception] = []

    def run() -> None:
        try:
            done.append(action())
        except Exception as error:  # raised again below, in the caller's thread
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not done:
        raise TimeoutError
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]
