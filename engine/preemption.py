"""Pre-emption notice (SIGTERM): training ends after its step, saved, or at a deadline, as it is.

A trainer asks `came` between steps. What it saves, and how a task says "try again" to its
scheduler, is not settled here.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from engine.errors import PreemptedError

log = logging.getLogger(__name__)


class Notice:
    """Watches for SIGTERM while training runs; a context manager.

    After the signal `came` is true, and the training code has `grace_s` seconds to reach its next
    step and save; then PreemptedError is raised wherever the main thread is. Outside of the main
    thread, where Python delivers no signals, `came` stays false.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._at = grace_s, 0.0
        self._main = threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    @property
    def came(self) -> bool:
        """Whether this process was told to end."""
        return self._at > 0.0

    def left_s(self) -> float:
        """Seconds until the deadline; `grace_s` before any notice."""
        return max(0.0, self._at + self._grace_s - time.monotonic()) if self.came else self._grace_s

    def __enter__(self) -> Self:
        if self._main:
            self._before = {
                number: signal.signal(number, handler)
                for number, handler in (
                    (signal.SIGTERM, self._told),
                    (signal.SIGALRM, self._late),
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

    def _told(self, number: int, frame: FrameType | None) -> None:
        if not self.came:
            self._at = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            log.warning(
                "SIGTERM: the step under way is finished and saved, within %g s", self._grace_s
            )

    def _late(self, number: int, frame: FrameType | None) -> NoReturn:
        raise PreemptedError(
            f"pre-empted, and no step was finished and saved in {self._grace_s:g} s; the run goes "
            "on from the checkpoint before (trainer.save_freq, trainer.preemption_grace_s)"
        )
