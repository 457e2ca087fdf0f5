"""Logs of a run's metrics besides MLflow: a file, TensorBoard, Weights & Biases.

A metric log gets a row a step, each step once and in order. A process that resumes a run starts
with an earlier step than the last one logged: the file and TensorBoard drop their rows from that
step on, and at Weights & Biases each process is a run of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.errors import ConfigError, PreemptedError, TrackingError
from engine.redaction import redact_values
from engine.storage.filesystem import error_text, write_atomically, writing
from engine.worker_process import on_daemon_thread

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE = "metrics.jsonl"
PACKAGES = ("tensorboard", "wandb")  # loggers that are an extra of the project, under its name
FINISH_SECONDS = 60.0  # for Weights & Biases to send what is left

_log = logging.getLogger(__name__)


class MetricLog(Protocol):
    """One place for metrics, of steps in order, which ends as FINISHED, FAILED or KILLED."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...
    def close(self, status: str) -> None: ...


class MetricLogs:
    """The logs of a run, by name. One that fails is left out from there on, and the run goes on."""

    def __init__(self) -> None:
        self.logs: dict[str, MetricLog] = {}
        self._failed: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values at a step in all of them."""
        for name in [name for name in self.logs if name not in self._failed]:
            try:
                self.logs[name].log_metrics(metrics, step)
            except Exception as error:  # trackers raise errors of many libraries
                self._failed.add(name)
                warning = "the logger %s gets no more metrics: %s; training continues"
                _log.warning(warning, name, str(error) or type(error).__name__)

    def close(self, status: str) -> None:
        """End all logs as FINISHED, FAILED or KILLED."""
        for name, log in self.logs.items():
            try:
                log.close(status)
            except Exception as error:
                warning = "the logger %s may lack the last metrics: %s"
                _log.warning(warning, name, str(error) or type(error).__name__)


@contextlib.contextmanager
def open_metric_logs(
    names: Iterable[str],
    folder: Path,
    *,
    project: str,
    run_name: str,
    settings: Mapping[str, object],
    keep: bool,
    below: str = "",
) -> Iterator[MetricLogs]:
    """Yield those of the logs `file`, `tensorboard` and `wandb` that are named, for the block.

    `keep`: new lines follow those in the file. `below`: where in $TENSORBOARD_DIR, if set. Raises
    StorageError for a file that can't be written, TrackingError for a tracker out of reach.
    """
    logs, status = MetricLogs(), "FAILED"
    try:
        for name in dict.fromkeys(names):
            if name == "file":
                logs.logs[name] = MetricsFile(folder / FILE, keep)
            elif name == "tensorboard":
                logs.logs[name] = TensorBoardLog(folder / name, below)
            elif name == "wandb":
                logs.logs[name] = WandbLog(project, run_name, folder, settings)
        yield logs
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit, PreemptedError):
        status = "KILLED"
        raise
    finally:
        logs.close(status)


def require_packages(loggers: Iterable[str], setting: str) -> None:
    """Raise ConfigError for a logger, one of `setting`, whose package is not installed."""
    for name in loggers:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{setting}: {name} needs the package {name}, which is not installed; run "
                f"pip install 'hybridflyte[{name}]', or remove it from the list"
            )


class MetricsFile:
    """JSON lines, one a step: `{"step": 1, "reward/mean": 0.5, …}`."""

    def __init__(self, path: Path, keep: bool) -> None:
        """Open the file, with `keep` after the lines in it; StorageError if it can't be written."""
        self.path = path
        self._earlier: dict[int, str] = {}  # lines by step
        with writing(path, "free space, or choose another folder for the run"):
            for line in path.read_text().splitlines() if keep and path.exists() else ():
                # A killed process may have left a line unfinished.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._earlier[int(json.loads(line)["step"])] = line
            self._rewrite()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._earlier:
            self._earlier = {k: line for k, line in self._earlier.items() if k < step}
            self._file.close()
            self._rewrite()
            self._earlier = {}
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self, status: str) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        write_atomically(self.path, [f"{line}\n".encode() for line in self._earlier.values()])
        self._file = self.path.open("a")


class TensorBoardLog:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, below: str = "") -> None:
        """Write to `below` in verl's $TENSORBOARD_DIR where that is set, else to `folder`."""
        from torch.utils.tensorboard import SummaryWriter  # here, and not in the first step

        shared = os.environ.get("TENSORBOARD_DIR")
        self.folder = os.path.join(shared, below).rstrip("/") if shared else str(folder)
        self._open = partial(SummaryWriter, self.folder, flush_secs=10)
        self._writer: SummaryWriter | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            # The history starts again with this step, so that no step is drawn twice.
            self._writer = self._open(purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLog:
    """A run at Weights & Biases; with WANDB_MODE=offline a folder for `wandb sync`."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, object]) -> None:
        """Raise TrackingError where no run can be started."""
        import wandb

        # wandb 0.31 prints an advertisement for Weave wherever `openai` is imported.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=os.environ.get("WANDB_DIR") or str(folder),
                config=redact_values(dict(config)),
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise TrackingError(
                f"no run can be started at Weights & Biases: {error_text(error)}; set "
                "WANDB_API_KEY, or WANDB_MODE=offline, or leave the logger wandb out"
            ) from error
        self.folder = Path(self._run.dir).parent  # what `wandb sync` takes

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        def end() -> None:
            import wandb

            offline = self._run.offline
            self._run.finish(0 if status == "FINISHED" else 1)
            if offline:
                wandb.teardown()  # its helper process writes the file's end

        try:
            on_daemon_thread(end).result(FINISH_SECONDS)
        except TimeoutError:
            warning = "Weights & Biases lacks the last metrics after %g s: run `wandb sync %s`"
            _log.warning(warning, FINISH_SECONDS, self.folder)
