"""Where a run's metrics go besides MLflow: a file, TensorBoard, Weights & Biases.

A metric log gets a row a step, each step once and in order. A run that is resumed gives its whole
history again: the file leaves out what it has, TensorBoard forgets what a process before it logged,
and at Weights & Biases each process is a run of its own, as in MLflow.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import ConfigError, TrackingError
from engine.redaction import redact_values
from engine.storage.atomic import write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PACKAGES = ("tensorboard", "wandb")  # loggers that are an extra of the project, under its name
FINISH_SECONDS = 60.0  # for Weights & Biases to send what is left

_log = logging.getLogger(__name__)


class MetricLog(Protocol):
    """One place for metrics."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values at a step."""

    def resumed(self, step: int) -> None:
        """The run goes on after `step`: what earlier processes logged of later ones is void."""

    def close(self, status: str) -> None:
        """End it, as FINISHED, FAILED or KILLED."""


def require_packages(loggers: Iterable[str]) -> None:
    """Raise ConfigError for a logger whose package is not installed; loads none of them."""
    for name in loggers:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"run.logger: {name} needs the package {name}, which is not installed; run "
                f"pip install 'hybridflyte[{name}]', or remove it from the list"
            )


class MetricsFile:
    """JSON lines, one a step: `{"step": 1, "reward/mean": 0.5, …}`."""

    def __init__(self, path: Path, keep: bool) -> None:
        """`keep`: go on behind the lines that are there."""
        self.path = path
        self._rows = _read_lines(path) if keep else {}
        self._own: set[int] = set()  # steps that this process was given
        self._rewrite()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._own.add(step)
        if step in self._rows:
            return
        self._rows[step] = json.dumps({"step": step, **metrics})
        self._file.write(self._rows[step] + "\n")
        self._file.flush()

    def resumed(self, step: int) -> None:
        self._file.close()
        self._rows = {k: v for k, v in self._rows.items() if k <= step or k in self._own}
        self._rewrite()

    def close(self, status: str) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        write_atomically(self.path, [f"{line}\n".encode() for line in self._rows.values()])
        self._file = self.path.open("a")


class TensorBoardLog:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, and not in the first step

        self.folder = Path(os.environ.get("TENSORBOARD_DIR") or folder)  # the variable is verl's
        self._open = partial(SummaryWriter, str(self.folder), flush_secs=10)
        self._writer: SummaryWriter | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            # The history begins again with this step, so that none is drawn twice.
            self._writer = self._open(purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def resumed(self, step: int) -> None:
        """Nothing to do: see `log_metrics`."""

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLog:
    """A run at Weights & Biases; with WANDB_MODE=offline a folder for `wandb sync`."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Raise TrackingError where no run can be started."""
        import wandb

        place = os.environ.get("WANDB_DIR") or str(folder)
        settings = wandb.Settings(silent=True, console="off")
        # Without this it prints an advertisement for Weave wherever `openai` is imported.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=place,
                config=redact_values(dict(config)),
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            raise TrackingError(
                f"no run can be started at Weights & Biases: {str(error).splitlines()[0]}; set "
                "WANDB_API_KEY, or WANDB_MODE=offline, or remove wandb from run.logger"
            ) from error
        self.folder = Path(self._run.dir).parent  # what `wandb sync` takes

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def resumed(self, step: int) -> None:
        """Nothing to do: each process has a run of its own."""

    def close(self, status: str) -> None:
        code = 0 if status == "FINISHED" else 1
        thread = threading.Thread(target=self._run.finish, args=(code,), daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS)
        if thread.is_alive():
            _log.warning(
                "Weights & Biases did not take the last metrics in %g s; `wandb sync %s` sends "
                "them",
                FINISH_SECONDS,
                self.folder,
            )


def _read_lines(path: Path) -> dict[int, str]:
    """The lines of a file by step; one that a killed process left unfinished is left out."""
    rows: dict[int, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows[int(json.loads(line)["step"])] = line
        except (ValueError, KeyError, TypeError):
            continue
    return rows
