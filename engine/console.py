"""Terminal output: quiet libraries, lines, progress, tables, and numbers with units.

Progress goes to stderr and tables to stdout, so that a pipe gets the tables alone. Whatever is
printed or logged passes `engine.redaction.presentable`: it may come from configurations and data.
"""

import atexit
import functools
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Never, NoReturn, ParamSpec, TextIO

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from engine.errors import EngineError
from engine.redaction import presentable

P = ParamSpec("P")

NOTEBOOK_COLUMNS = 96  # fit beside the cells of JupyterLab and VS Code
PIPED_SECONDS = 5.0  # between the plain lines of progress in a log file
NOISY = (
    *("absl", "alembic", "asyncio", "botocore", "datasets", "flytekit.core.data_persistence"),
    *("fsspec", "git", "httpx", "huggingface_hub", "matplotlib", "mlflow", "ray", "s3fs"),
    *("sqlalchemy", "torch", "transformers", "urllib3", "vllm"),
)
# Read by the libraries when they are imported, here and in the processes they start.
_SILENT_VARIABLES = """
GIT_PYTHON_REFRESH=quiet HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HUB_DISABLE_TELEMETRY=1
MLFLOW_DISABLE_TELEMETRY=true MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR=false MLFLOW_LOGGING_LEVEL=ERROR
MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT=true PYTHONWARNINGS=ignore
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_DEDUP_LOGS=1 RAY_IGNORE_UNHANDLED_ERRORS=1
RAY_USAGE_STATS_ENABLED=0 RAY_USAGE_STATS_PROMPT_ENABLED=0 TOKENIZERS_PARALLELISM=false
TRANSFORMERS_NO_ADVISORY_WARNINGS=1 TRANSFORMERS_VERBOSITY=error VLLM_LOGGING_LEVEL=ERROR
VLLM_NO_USAGE_STATS=1
"""
SILENCE = {k: v for k, _, v in (word.partition("=") for word in _SILENT_VARIABLES.split())}

# Exit status after Ctrl-C, SIGTERM, and of `| head`, as shells have it.
INTERRUPTED, TERMINATED, PIPE_CLOSED = 130, 143, 141


def command_line(
    failed: int = 1, *, left: str = ""
) -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Decorator of a command's `main`: where it ends early, a line and a status, no traceback.

    The status is `failed` after an EngineError, 130 after Ctrl-C and 141 after `| head`. `left`
    says what a signal leaves behind; with it, SIGTERM unwinds `main` as Ctrl-C does: 143.
    """

    def decorate(main: Callable[P, int | None]) -> Callable[P, int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            before = signal.signal(signal.SIGTERM, _terminate) if left else None
            try:
                try:
                    return _status(functools.partial(main, *args, **kwargs), failed, left)
                finally:
                    sys.stdout.flush()  # at Python's exit it would be too late
            except BrokenPipeError:
                closed = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
                if not closed:
                    raise  # another pipe's
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in closed:
                    os.dup2(nowhere, stream.fileno())
                return PIPE_CLOSED
            finally:
                if left:
                    signal.signal(signal.SIGTERM, before)

        return run

    return decorate


def _status(main: Callable[[], int | None], failed: int, left: str) -> int:
    try:
        return main() or 0
    except EngineError as error:
        say(f"error: {error}", error=True)
        return failed
    except KeyboardInterrupt:
        word, status = "interrupted", INTERRUPTED
    except SystemExit as ending:
        if ending.code != signal.SIGTERM:
            raise
        word, status = "terminated", TERMINATED
    say(f"{word}; {left}" if left else word, error=True)
    return status


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(number)  # as Ray's own handler does while it starts


def end_process(status: int) -> NoReturn:
    """End without Python's orderly end, which would wait for native code in a thread, or abort."""
    atexit.unregister(end_process)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def quiet() -> None:
    """Silence third-party chatter in this process and its children; errors still show.

    Call it before importing torch, ray, transformers, mlflow or vllm. A variable that the user set
    wins, so `VLLM_LOGGING_LEVEL=DEBUG` brings a library back.
    """
    for variable, value in SILENCE.items():
        os.environ.setdefault(variable, value)
    warnings.filterwarnings("ignore")
    for name in NOISY:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.ERROR))
    logging.setLogRecordFactory(_PresentableRecord)


class _PresentableRecord(logging.LogRecord):
    """A log record whose message is presentable."""

    def getMessage(self) -> str:
        return presentable(super().getMessage())


def say(line: str, *, error: bool = False) -> None:
    """Print a line to stdout, or to stderr for an `error`."""
    print(presentable(line), file=sys.stderr if error else sys.stdout, flush=True)


class Progress(AbstractContextManager["Progress"]):
    """Progress to a total, counted by `update`; a context manager.

    A terminal or a Jupyter notebook gets a bar; a pipe gets a line every few seconds and at the
    end, each with rate and time left.
    """

    def __init__(
        self, total: int, label: str, unit: str = "it", stream: TextIO | None = None
    ) -> None:
        self.total, self.label, self.unit, self.count = total, presentable(label), unit, 0
        self._stream = stream or sys.stderr
        self._notes = ""
        self._started = self._printed = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if self._stream.isatty() or in_notebook(self._stream):
            # A notebook has no width; its file number leads to the terminal of its server.
            width = NOTEBOOK_COLUMNS if in_notebook(self._stream) else None
            self._bar = tqdm(
                total=total, desc=self.label, unit=unit, file=self._stream, ncols=width,
                dynamic_ncols=width is None,
            )  # fmt: skip

    def update(self, step: int = 1, **notes: object) -> None:
        """Count `step` more; `notes` are shown behind, e.g. `loss=0.31`."""
        self.count += step
        if notes:
            shown = " ".join(f"{key}={_short(value)}" for key, value in notes.items())
            self._notes = presentable(shown)
        if self._bar is not None:
            if notes:
                self._bar.set_postfix_str(self._notes, refresh=False)
            self._bar.update(step)
        elif time.monotonic() - self._printed >= PIPED_SECONDS:
            self._printed = time.monotonic()
            print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """Return the plain line: label, count, share, rate, time left, notes."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rate = self.count / elapsed
        count, duration = f"{self.label}: {self.count}", human_time(elapsed)
        if self.total:
            count += f"/{self.total} ({100 * self.count / self.total:.0f} %)"
        if 0 < self.count < self.total:
            duration = f"{human_time((self.total - self.count) / rate)} left"
        rate_text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        parts = [count, f"{rate_text} {self.unit}/s", duration, self._notes]
        return " · ".join(filter(None, parts))

    def close(self) -> None:
        """End the bar, or print the last line; safe to call twice."""
        if self._bar is not None:
            self._bar.close()
        elif self.count:
            print(self.line(), file=self._stream, flush=True)
        self.count, self._bar = 0, None

    def __exit__(self, *_: object) -> None:
        self.close()


def in_notebook(stream: TextIO) -> bool:
    """Return whether the stream is shown in a Jupyter notebook, which redraws lines after `\\r`."""
    iostream = sys.modules.get("ipykernel.iostream")
    return iostream is not None and isinstance(stream, iostream.OutStream)


def table(title: str, rows: Sequence[Mapping[str, object]], stream: TextIO | None = None) -> None:
    """Print rows as a table whose columns are the keys of the first one; nothing is cut off."""
    grid = Table(title=presentable(title), title_justify="left", title_style="bold")
    columns = list(rows[0]) if rows else []
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float) for row in rows)
        grid.add_column(
            presentable(column), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        grid.add_row(*(presentable(_short(row.get(column, ""))) for column in columns))
    out = stream or sys.stdout
    # Without a terminal there is no width to keep to, and a path must stay on one line.
    width = None if out.isatty() else 200
    # In a notebook rich shows what it prints below the cell, whatever its file is.
    shown = None if in_notebook(out) else False
    Console(file=out, width=width, highlight=False, markup=False, force_jupyter=shown).print(grid)


def human_time(seconds: float) -> str:
    """Return a duration for people: `0.4 s`, `37 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded, minutes = round(seconds), round(seconds / 60)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def human_bytes(size: float) -> str:
    """Return a size for people in powers of 1024: `512 B`, `1.5 KiB`, `3.2 GiB`."""
    power = 0
    while abs(size) >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{size:.0f} B"


def points(change: Iterable[float], digits: int = 1) -> str:
    """Return a difference of two fractions, its mean and the ends of its interval, for people.

    >>> points((0.125, 0.091, 0.158))
    '+12.5 percentage points [+9.1, +15.8]'
    """
    # + 0.0 turns a negative zero into a plain one.
    mean, first, last = (f"{100 * value + 0.0:+.{digits}f}" for value in change)
    return f"{mean} percentage points [{first}, {last}]"


def display_path(path: Path) -> str:
    """Return the path relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
