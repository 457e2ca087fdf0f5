"""An MLflow store: how it is opened, what it accepts, and what it raises as sentences."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.console import SILENCE
from engine.errors import TrackingError
from engine.redaction import redact_values, without_credentials
from engine.storage.filesystem import error_text
from engine.worker_process import on_daemon_thread

if TYPE_CHECKING:
    from mlflow import MlflowClient


MAX_KEY = 250  # characters; the limits are those of MLflow 3's own validation
MAX_PARAMETER = 6000
MAX_TAG = 8000


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested mappings as dotted keys; lists and tuples stay one value.

    >>> flatten({"rl": {"actor": {"lr": 0.1}}, "betas": (0.9, 0.95)})
    {'rl.actor.lr': 0.1, 'betas': (0.9, 0.95)}
    """
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def parameters(values: Mapping[str, object], by_section: bool = False) -> dict[str, str]:
    """Return settings without credentials as MLflow parameters, one a setting or JSON a section."""
    flat: dict[str, object] = redact_values(values)
    if not by_section:
        return _texts(flatten(flat), MAX_PARAMETER)
    json_texts = {k: json.dumps(v, default=str) for k, v in flat.items() if isinstance(v, Mapping)}
    return _texts(flat | json_texts, MAX_PARAMETER)


def tags(values: Mapping[str, object]) -> dict[str, str]:
    """Return texts without credentials that MLflow takes as tags."""
    return _texts(redact_values(values), MAX_TAG)


def _texts(values: Mapping[str, object], limit: int) -> dict[str, str]:
    texts = {}
    for key, value in values.items():
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = "[" + ", ".join(map(str, value)) + "]"
        texts[name(key)] = shorten(str(value), limit)
    return texts


def name(text: str) -> str:
    """Return `text` in MLflow's alphabet for names: `pass@1` becomes `pass_at_1`."""
    return re.sub(r"[^\w\-./ ]", "_", text.replace("@", "_at_"), flags=re.ASCII)[:MAX_KEY]


def shorten(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters, the last of them an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


URI_VARIABLE = "MLFLOW_TRACKING_URI"
PAGES_VARIABLE = "HYBRIDFLYTE_MLFLOW_URL"  # where people reach the server, if not at its URI
# Set before mlflow is imported, and only where the user has not: few and short retries instead of
# MLflow 3's 7 retries of 120 s; no messages on stdout; no telemetry from a training job.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
} | {name: value for name, value in SILENCE.items() if name.startswith(("MLFLOW_", "GIT_"))}
CAUSES = {
    r"Connection refused": "connection refused",
    r"Name or service not known|Failed to resolve|NameResolutionError|nodename nor servname": (
        "its host name is unknown"
    ),
    r"timed out|Timeout": "no answer in time",
    r"No route to host|Network is unreachable": "the network does not reach it",
    r"\b401\b|UNAUTHENTICATED": "it refuses these credentials",
    r"\b403\b|PERMISSION_DENIED": "it does not permit this",
    r"unable to open database file": "the database file can't be opened",
    r"file is not a database": "the file is not a database",
    r"readonly database": "the database is read-only",
    r"database is locked": "another process holds the database's lock",
    r"disk I/O error|database or disk is full": "the disk is full or broken",
}
# Errors of MLflow, its HTTP client and its databases come from these.
STORE_PACKAGES = ("mlflow", "requests", "urllib3", "sqlalchemy", "alembic", "sqlite3", "botocore")


def default_uri() -> str:
    """Return $MLFLOW_TRACKING_URI, or the SQLite file mlflow.db of the working directory."""
    return os.environ.get(URI_VARIABLE) or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


class Connection:
    """One MLflow store, opened at first use."""

    def __init__(self, uri: str | None = None, experiment: str = "hybridflyte") -> None:
        self.uri = uri or default_uri()
        self.experiment = experiment
        for variable, value in DEFAULTS.items():
            os.environ.setdefault(variable, value)

    @property
    def database(self) -> Path | None:
        """Return the file of a SQLite store; None for a server."""
        if not self.uri.startswith("sqlite:///"):
            return None
        return Path(self.uri.removeprefix("sqlite:///")).absolute()

    @functools.cached_property
    def client(self) -> MlflowClient:
        """Return MLflow's client; raises TrackingError when a SQLite store can't be made."""
        from mlflow import MlflowClient

        with self.translated("open the store"):
            if self.database is not None:
                _create_database(self.database)
            registry = os.environ.get("MLFLOW_REGISTRY_URI") or self.uri
            return MlflowClient(self.uri, registry)

    @functools.cached_property
    def experiment_id(self) -> str:
        """Return the id of the experiment, which is created when it is not there yet."""
        from mlflow.exceptions import MlflowException

        with self.translated("open the experiment"):
            experiment = self.client.get_experiment_by_name(self.experiment)
            if experiment is None:
                # A server decides for itself where artifacts are.
                folder = self.database and self.database.parent / "mlartifacts"
                try:
                    location = folder.as_uri() if folder else None
                    return str(self.client.create_experiment(self.experiment, location))
                except MlflowException:  # another process may have created it since
                    experiment = self.client.get_experiment_by_name(self.experiment)
                    if experiment is None:
                        raise
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"MLflow experiment {self.experiment!r} at {self.uri} was deleted; restore it with "
                f"`mlflow experiments restore -x {experiment.experiment_id}` or set "
                "tracking.experiment"
            )
        return str(experiment.experiment_id)

    def run_url(self, run_id: str) -> str:
        """Return the page of a run for people, without credentials; empty for a store without."""
        root = os.environ.get(PAGES_VARIABLE) or self.uri
        if not root.startswith(("http://", "https://")):
            return ""
        root = without_credentials(root).rstrip("/")
        return f"{root}/#/experiments/{self.experiment_id}/runs/{run_id}"

    def check(self, timeout_s: float = 5.0) -> None:
        """Raise TrackingError within about `timeout_s` seconds when the store does not answer."""
        if self.database is None:  # a local one needs no deadline; its migration may take its time
            search = self.client.search_experiments
            limits = {  # without retries
                "MLFLOW_HTTP_REQUEST_TIMEOUT": str(max(1, int(timeout_s))),
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            }
            before = {variable: os.environ.get(variable, DEFAULTS[variable]) for variable in limits}
            os.environ.update(limits)
            try:
                with self.translated("reach the server"):
                    # TimeoutError, whatever the call hangs on
                    on_daemon_thread(search, max_results=1).result(timeout_s + 0.5)
            finally:
                os.environ.update(before)
        _ = self.experiment_id

    @contextlib.contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Turn any error of the store within the block into a TrackingError."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package not in STORE_PACKAGES:
                raise  # a bug of our own
            raise TrackingError(
                f"can't {action} at MLflow {self.uri}: {cause(error)}; check {URI_VARIABLE}, or "
                "unset it to record in ./mlflow.db"
            ) from error


def cause(error: BaseException) -> str:
    """Return the reason behind an error of MLflow in a few words."""
    text = f"{type(error).__name__}: {error}"
    for pattern, words in CAUSES.items():
        if re.search(pattern, text):
            return words
    return shorten(error_text(error).split(". ")[0], 200)


def _create_database(path: Path) -> None:
    """Create a SQLite store under another name and link it: migrations may be cut off."""
    if path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        client = MlflowClient(f"sqlite:///{draft}")
        client.search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
