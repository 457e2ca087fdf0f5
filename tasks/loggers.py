"""What `tracking.logger` names, for the stages that train: opened, and where the files lie.

A stage's files are in its run's folder, `runs/<run id>/<stage>/`. Where there is a shared store
they go to the same place there, again while they grow: a pod takes its disk with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.context import RunContext, echo, on_cluster
from tasks.pages import run_folder

if TYPE_CHECKING:
    from engine.tracking.metric_logs import MetricLogs
    from tasks.stage import Stage

COPY_SECONDS = 30.0  # between two looks at what has grown
CLOSE_SECONDS = 60.0  # for the last copy

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_loggers(run: RunContext, this: Stage) -> Iterator[MetricLogs]:
    """A stage's logs for the block; none where `tracking.logger` names no more than MLflow.

    Raises ConfigError for a package that this machine lacks, StorageError and TrackingError, all
    before the block. A store that fails later costs the copy and a sentence in the log.
    """
    from engine.errors import StorageError
    from engine.tracking.metric_logs import PACKAGES, MetricLogs, open_metric_logs, require_packages

    names = [name for name in run.logger if name in ("file", *PACKAGES)]
    if not names:
        yield MetricLogs()
        return
    require_packages(names, "tracking.logger")
    folder = run_folder(run) / this.kind
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't make {folder}: {error.strerror or error}; free space or set HYBRIDFLYTE_HOME"
        ) from error
    place = f"{run.run_id}/{this.kind}"
    with (
        _copied(folder, place),
        open_metric_logs(
            names,
            folder,
            project=run.experiment,
            run_name=f"{this.kind}-{run.run_id}",
            settings=this.config,
            keep=True,
            below=place,
        ) as logs,
    ):
        yield logs


@contextlib.contextmanager
def _copied(folder: Path, place: str) -> Iterator[None]:
    """Copy a folder's files to the shared store for the block, and say where they are to be found.

    The file of metrics that an attempt before left there is fetched first.
    """
    from engine.storage.locations import shared_store

    store = shared_store()
    if not store:
        lost = on_cluster() * "; without HYBRIDFLYTE_STORE they end with this pod"
        echo(f"{folder.name}: files of metrics are in {folder}{lost}")
        yield
        return
    copy = _StoreCopy(folder, f"{store}/runs/{place}")
    copy.fetch()
    echo(f"{folder.name}: files of metrics are in {copy.uri}")
    try:
        copy.start()
        yield
    finally:
        copy.close()


class _StoreCopy:
    """A folder of small files in the shared store, brought up to date by a thread."""

    def __init__(self, folder: Path, uri: str) -> None:
        from engine.storage.objects import Objects

        self.uri = uri
        self._folder, self._objects = folder, Objects(uri)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of change, by name
        self._closed = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="metrics-copy", daemon=True)

    def fetch(self) -> None:
        """Bring the file of metrics here, where there is none."""
        from engine.tracking.metric_logs import FILE

        if not (self._folder / FILE).exists():
            with contextlib.suppress(FileNotFoundError):
                (self._folder / FILE).write_bytes(self._objects.read(FILE))

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def close(self) -> None:
        """Copy what has grown since, for at most `CLOSE_SECONDS`."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("%s is too slow; the last metrics are in %s", self.uri, self._folder)

    def _work(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(COPY_SECONDS)
            self._send()

    def _send(self) -> None:
        from engine.errors import StorageError

        try:
            for path in sorted(self._folder.rglob("[!.]*")):  # a hidden one is being written
                # Weights & Biases links its newest run, and removes what it is done with.
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):
                        self._send_file(path)
        except (OSError, StorageError) as error:
            if not self._warned:
                _log.warning("%s; its metrics wait in %s", error, self._folder)
            self._warned = True

    def _send_file(self, path: Path) -> None:
        name, now = path.relative_to(self._folder).as_posix(), path.stat()
        if self._sent.get(name) != (now.st_size, now.st_mtime_ns):
            self._objects.put(name, path.read_bytes())
            self._sent[name] = (now.st_size, now.st_mtime_ns)
