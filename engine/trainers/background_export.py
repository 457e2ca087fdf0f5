"""Hugging Face folders of a run's checkpoints, exported during training.

Each checkpoint is exported to `<run>/huggingface/step_500` by `python -m engine.export` in a
separate process: loading a model changes global random generators and defaults, which training
relies on. Pending exports are found by listing the folders, so a resumed run exports what the run
before it left. `engine.checkpoint.store` deletes old exports.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from engine.checkpoint.format import MARKER
from engine.checkpoint.store import EXPORTS, CheckpointStore
from engine.errors import CheckpointError
from engine.storage.folder import Folder
from engine.trainers.export import is_exported

log = logging.getLogger(__name__)

_NICENESS = 10  # training comes first
_SOURCES = str(Path(__file__).parents[2])


class BackgroundExporter:
    """Exports one checkpoint at a time, from a thread; a failed export is logged and skipped."""

    def __init__(self, store: CheckpointStore, model: str, timeout_s: float) -> None:
        """`model` is the start model's path; each export has `timeout_s` seconds."""
        self._store, self._model, self._timeout_s = store, model, timeout_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._requested = False
        self._given_up: set[str] = set()  # names of checkpoints

    def wake(self) -> None:
        """Export all checkpoints that have no model folder yet; return at once."""
        with self._lock:
            self._requested = True
            if self._thread is None:
                # A daemon: a terminated run doesn't wait, and its child process ends with it.
                self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when every checkpoint is exported, or its export has failed."""
        self.wake()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()  # each export has a deadline

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._requested:
                    self._thread = None
                    return
                self._requested = False
            try:
                while (name := self._next_unexported()) is not None:
                    self._export_checkpoint(name)
            except (CheckpointError, OSError) as error:
                log.warning("no model folders of checkpoints: %s; training continues", error)

    def _next_unexported(self) -> str | None:
        """The oldest checkpoint that is not exported."""
        for name in self._store.complete():
            if name not in self._given_up and not is_exported(self._target(name)):
                return name
        return None

    def _export_checkpoint(self, name: str) -> None:
        source, place = self._store.root / name, self._target(name)
        fault = self._run_export(source, place)
        gone = MARKER not in source.sizes()  # deleted by retention
        if gone:
            place.remove()
        elif fault and not is_exported(place):  # an earlier attempt's process may still export it
            self._given_up.add(name)
            log.warning("no model folder of checkpoint %s: %s; training continues", source, fault)

    def _target(self, name: str) -> Folder:
        return self._store.root / EXPORTS / name

    def _run_export(self, source: Folder, place: Folder) -> str:
        """Run the command; return why it failed, or nothing."""
        command = [sys.executable, "-m", "engine.export", source.uri, "--out", place.uri]
        paths = [_SOURCES, os.environ.get("PYTHONPATH")]
        hidden = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }  # training uses the devices and cores
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(
                [*command, "--model", self._model, "--beside"],
                env=os.environ | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            assert process.stdin is not None
            with process.stdin:
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
                try:
                    status = process.wait(self._timeout_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    return f"it was not made in {self._timeout_s:g} s"
            stderr.seek(0)
            lines = stderr.read().strip().splitlines() or [f"exit status {status}"]
        return lines[-1].removeprefix("error: ") if status else ""
