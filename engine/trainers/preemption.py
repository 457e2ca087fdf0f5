"""Pre-emption notice (SIGTERM): training saves after its current step, or ends at a deadline.

A trainer reads `received` between steps, saves and raises PreemptedError.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Self

from engine.errors import PreemptedError

log = logging.getLogger(__name__)


class PreemptionNotice:
    """Watches for SIGTERM while training runs; a context manager.

    After the signal `received` is true, and the training code has `grace_s` seconds to finish its
    step and save; then PreemptedError is raised wherever the main thread is. Outside of the main
    thread, where Python delivers no signals, `received` stays false.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._at = grace_s, 0.0
        self._main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def received(self) -> bool:
        """Whether the signal was received."""
        return self._at > 0.0

    def seconds_left(self) -> float:
        """Seconds until the deadline; `grace_s` before the signal."""
        if not self.received:
            return self._grace_s
        return max(0.0, self._at + self._grace_s - time.monotonic())

    def __enter__(self) -> Self:
        if self._main:
            self._before = {
                number: signal.signal(number, handler)
                for number, handler in (
                    (signal.SIGTERM, self._on_sigterm),
                    (signal.SIGALRM, self._on_deadline),
                )
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._main:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self._at = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            log.warning(
                "SIGTERM: the current step is finished and saved, within %g s", self._grace_s
            )

    def _on_deadline(self, number: int, frame: FrameType | None) -> NoReturn:
        raise PreemptedError(
            f"pre-empted, and no step was finished and saved in {self._grace_s:g} s; the run "
            "resumes from the checkpoint before (trainer.save_freq, trainer.preemption_grace_s)"
        )
