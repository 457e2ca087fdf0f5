"""Samples of a run's rollouts, written beside training: Parquet, the page, and whoever wants them.

The training loop copies a few rows and goes on; a thread decodes, writes and renders. What goes
wrong there costs the sample and a sentence in the log, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from engine.batch import Batch
from engine.errors import EngineError
from engine.rollouts.columns import TRAIN
from engine.rollouts.files import (
    PAGE,
    Metrics,
    SampleFolder,
    SampleName,
    as_bytes,
    copy_samples,
)
from engine.rollouts.page import render_page, run_name
from engine.rollouts.page_data import PageData
from engine.rollouts.sample import Sample, as_table, pick
from engine.rollouts.token_texts import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAGE_SECONDS = 10.0  # between two renderings of the page, while samples come
CLOSE_SECONDS = 60.0  # for what is still to be written when the run ends
MOST_WAITING = 8  # steps; a store that is slower loses samples

log = logging.getLogger(__name__)

OnFile = Callable[[Path], None]  # a file that was written, under its own name
OnPage = Callable[[str], None]  # the page as HTML


class RolloutLog:
    """Samples every `every` steps, the first and the last one; a context manager."""

    def __init__(
        self,
        folder: str | Path,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        *,
        every: int,
        rows: int,
        last_step: int,
        previous: str | Path | None = None,
        on_file: OnFile | None = None,
        on_page: OnPage | None = None,
    ) -> None:
        """`folder` may be s3://…; `previous` is that of an attempt before, which is resumed from.

        `rows` are the completions of a sample; `every=0` turns it all off. `load_tokenizer` is
        called in the thread, and so are `on_file` and `on_page`.
        """
        self.every, self.rows, self.last_step = every, rows, last_step
        self._picked: list[Sample] = []
        self._worker = _Worker(str(folder), load_tokenizer, previous, on_file, on_page)

    def rollouts(self, split: str, step: int, batch: Batch) -> None:
        """Take a sample of a step's batch, if it is due; `step_done` lets it be written."""
        due = step in (1, self.last_step) or (self.every and step % self.every == 0)
        if self.every and (due or split != TRAIN):
            self._picked.append(pick(batch, step, split, self.rows))

    def step_done(self, history: Sequence[Metrics]) -> None:
        """Write what was taken; `history` are the metrics of all steps so far, a row a step."""
        picked, self._picked = self._picked, []
        if picked:
            self._worker.put(lambda: self._worker.write(picked, list(history)))

    def resumed(self, step: int) -> None:
        """The run goes on after `step`: samples of later steps are void."""
        self._picked.clear()
        if self.every:
            self._worker.put(lambda: self._worker.resume(step), wait=True)

    def close(self) -> None:
        """Write what is left, for at most `CLOSE_SECONDS`."""
        self._worker.close()

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Worker:
    """The thread, and what it alone touches."""

    def __init__(
        self,
        uri: str,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        previous: str | Path | None,
        on_file: OnFile | None,
        on_page: OnPage | None,
    ) -> None:
        self._uri, self._previous = uri, previous
        self._load_tokenizer = load_tokenizer
        self._on_file, self._on_page = on_file, on_page
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._fault = ""  # of the job before, without its numbers
        self._texts: TokenTexts | None = None
        self._data = PageData()
        self._metrics_up_to = 0  # step whose metrics are in a file
        self._page_due = 0.0  # of time.monotonic

    def put(self, job: Callable[[], None], wait: bool = False) -> None:
        """Let the thread do a job; without `wait`, leave it out where too many do wait."""
        if self._thread is None:
            # A daemon: a run that is killed doesn't wait for a store that gives no answer.
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()
        try:
            self._jobs.put(job, timeout=CLOSE_SECONDS if wait else 0.0)
        except queue.Full:
            log.warning("a sample of rollouts is left out: %s is too slow", self._uri)

    def close(self) -> None:
        """Do what waits and end, for at most `CLOSE_SECONDS`."""
        if self._thread is None:
            return
        end = time.monotonic() + CLOSE_SECONDS
        for job in (self.write_last_page, None):
            with contextlib.suppress(queue.Full):
                self._jobs.put(job, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the last samples of rollouts may be missing: %s is too slow", self._uri)

    def write(self, samples: Sequence[Sample], history: Sequence[Metrics]) -> None:
        """Write the samples of a step, with the metrics since the last ones, and the page."""
        folder, written = self._folder(), dict[str, bytes]()
        if self._texts is None:
            self._texts = TokenTexts(self._load_tokenizer())
        for sample in samples:
            name, table = SampleName(sample.step, sample.split), as_table(sample, self._texts)
            metrics = [row for row in history if row["step"] > self._metrics_up_to]
            content = written[name.file] = as_bytes(table, metrics)
            folder.write_bytes(name.file, content)
            self._add(name, table, metrics)
        if time.monotonic() >= self._page_due:
            self._write_page(folder)
            self._page_due = time.monotonic() + PAGE_SECONDS
        self._hand_over(written)

    def resume(self, step: int) -> None:
        """Remove samples of later steps; read those that stay."""
        folder = self._folder()
        for name in folder.names():
            if name.step > step:
                folder.remove(name)
        if self._previous is not None and step > 0 and not folder.names():
            copy_samples(self._previous, folder.uri, up_to=step)
        self._data, self._metrics_up_to = PageData(), 0
        for name in folder.names():
            self._add(name, *folder.read(name))
            self._hand_over({name.file: folder.read_bytes(name.file)})

    def write_last_page(self) -> None:
        """Write the page of all samples."""
        if len(self._data):
            page = self._write_page(self._folder())
            self._hand_over({PAGE: page.encode()})

    def _add(self, name: SampleName, table: pa.Table, metrics: Sequence[Metrics]) -> None:
        self._data.add(name, table, metrics)
        self._metrics_up_to = max([self._metrics_up_to, *(int(row["step"]) for row in metrics)])

    def _write_page(self, folder: SampleFolder) -> str:
        page = render_page(self._data, run_name(folder.uri))
        folder.write_bytes(PAGE, page.encode())
        if self._on_page is not None:
            self._on_page(page)
        return page

    def _folder(self) -> SampleFolder:
        return SampleFolder(self._uri)

    def _hand_over(self, files: Mapping[str, bytes]) -> None:
        if self._on_file is None:
            return
        with tempfile.TemporaryDirectory(prefix="rollouts-") as place:
            for name, content in files.items():
                path = Path(place, name)
                path.write_bytes(content)
                self._on_file(path)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # whatever it is, training goes on
                self._warn(error)
            else:
                self._fault = ""

    def _warn(self, error: Exception) -> None:
        """Log a fault, but not again for each step that has it."""
        known = isinstance(error, EngineError | OSError)
        fault = str(error) if known else f"{type(error).__name__}: {error}"
        kind = re.sub(r"\d+", "", fault)  # sentences name the step's file
        if kind != self._fault:
            log.warning("no sample of rollouts: %s; training continues", fault)
        self._fault = kind
