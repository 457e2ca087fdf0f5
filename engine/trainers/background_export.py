"""Model folders of a run's checkpoints, made while it trains: `<run>/huggingface/step_500`.

Each is made by `python -m engine.export` in a process of its own: loading a model draws on the
global random generators and defaults of its process, which training must find as they were. What
is to do is read from the folders, so a run that goes on makes what the one before it left. When
they go is the retention's matter (`engine.checkpoint.store`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from engine.checkpoint.layout import MARKER
from engine.checkpoint.store import EXPORTS, CheckpointStore
from engine.errors import CheckpointError
from engine.storage.folder import Folder
from engine.trainers.export import is_exported

log = logging.getLogger(__name__)

_NICENESS = 10  # training comes first
_SOURCES = str(Path(__file__).parents[2])


class Exports:
    """One at a time, in a thread that waits for processes; what fails is said, and left out."""

    def __init__(self, store: CheckpointStore, model: str, timeout_s: float) -> None:
        """`model` is what training started from; each export has `timeout_s` seconds."""
        self._store, self._model, self._timeout_s = store, model, timeout_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._given_up: set[str] = set()  # names of checkpoints

    def wake(self) -> None:
        """Look for checkpoints without a model folder, and make these; return at once."""
        with self._lock:
            self._asked = True
            if self._thread is None:
                # A daemon: a run that is told to end doesn't wait, and its child ends with it.
                self._thread = threading.Thread(target=self._work, name="exports", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when every checkpoint has its folder, or has been given up."""
        self.wake()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()  # each export has a deadline

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._thread = None
                    return
                self._asked = False
            try:
                while (name := self._next()) is not None:
                    self._make(name)
            except (CheckpointError, OSError) as error:
                log.warning("no model folders beside checkpoints: %s; training goes on", error)

    def _next(self) -> str | None:
        """The oldest checkpoint that lacks its folder."""
        for name in self._store.complete():
            if name not in self._given_up and not is_exported(self._place(name)):
                return name
        return None

    def _make(self, name: str) -> None:
        source, place = self._store.root / name, self._place(name)
        fault = self._export(source, place)
        gone = MARKER not in source.sizes()  # a newer one has taken its place
        if gone:
            place.remove()
        elif fault and not is_exported(place):  # an attempt before this one may be at it still
            self._given_up.add(name)
            log.warning("no model folder of checkpoint %s: %s; training goes on", source, fault)

    def _place(self, name: str) -> Folder:
        return self._store.root / EXPORTS / name

    def _export(self, source: Folder, place: Folder) -> str:
        """Run the command; return why it failed, or nothing."""
        command = [sys.executable, "-m", "engine.export", source.uri, "--out", place.uri]
        paths = [_SOURCES, os.environ.get("PYTHONPATH")]
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # training has them all
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [*command, "--model", self._model, "--beside"],
                env=os.environ | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=subprocess.DEVNULL,
                stderr=said,
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
            said.seek(0)
            lines = said.read().strip().splitlines() or [f"exit status {status}"]
        return lines[-1].removeprefix("error: ") if status else ""
