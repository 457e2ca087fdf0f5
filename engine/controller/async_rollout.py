"""Asynchronous rollout: workers that never wait for the trainer, and a queue it takes batches from.

What the trainer sees of it lives here; `rollout_loop` keeps the workers at it. How completions are
scored and learned from is the caller's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.batch import Batch
from engine.controller.rollout_loop import RolloutLoop
from engine.controller.rollout_processes import spans_of
from engine.controller.timeline import Span
from engine.controller.weight_publisher import PublishedWeights
from engine.errors import WorkerError
from engine.rollout.partial_groups import PartialGroup, with_partial_groups

log = logging.getLogger(__name__)

_REPORT_S = 5.0  # how long workers may take to say what they have begun


class AsyncRollout(RolloutLoop):
    """Keeps `names` workers decoding; a context manager.

    `spawn(name, attempt)` starts a worker's process and returns roles with one role of that name
    that has `poll` and `load_weights`; `next_prompt()` gives the next prompt, a batch of one row;
    `score(group)` starts scoring a finished group; `keep(group)` says whether it may be learned
    from (None: always). The first three are called from a thread of this object's own. `finished`
    are groups that an earlier rollout's `paused` gave.
    """

    def take(self) -> tuple[Batch, Batch]:
        """The next prompts and their completions in whole groups, scored, oldest first; waits.

        Raises what stopped the rollout, or WorkerError when nothing comes within the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                self.admission, groups = self.admission.take()
                if groups:
                    keys = [group.ticket.key for group in groups]
                    prompts = Batch.concat([self._prompts.pop(key) for key in keys])
                    return prompts, Batch.concat([self._scored.pop(key) for key in keys])
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(
                        f"rollout gave no batch within {self._timeout_s:g} s "
                        f"({self._standing()}); look at its workers, or raise "
                        "trainer.step_timeout_s"
                    )

    def update_weights(self, weights: PublishedWeights) -> None:
        """The trainer has new weights: workers load them between two decode steps."""
        with self._changed:
            self._weights = weights
            self.admission = self.admission.updated(weights.version)
            self._act(*self.fleet.updated(weights.version, time.monotonic()))

    def metrics(self) -> dict[str, float]:
        """Totals and what is under way."""
        with self._changed:
            return {
                "async/completions": float(self.counts.completions),
                "async/generated_tokens": float(self.counts.tokens),
                "async/in_flight": float(len(self.admission.in_flight)),
                "async/queued": float(len(self.admission.queue)),
                "async/reissued": float(self.admission.reissued),
                "async/rejected": float(self.admission.rejected),
                "async/restarts": float(self.counts.restarts),
                "async/resyncs": float(self.counts.resyncs),
            }

    @contextmanager
    def paused(self) -> Iterator[tuple[list[tuple[Batch, Batch]], list[Batch]]]:
        """All that no batch has had yet: finished groups and their prompts, oldest first, and
        prompts that were begun, each with what is there of its completions (`PARTIAL_GROUP`).

        Until the block ends nothing is begun or finished. Workers are asked first; what one has
        begun that doesn't answer in time is given without completions.
        """
        with self._changed:
            self._ask()
            keys = [group.ticket.key for group in self.admission.queue]
            finished = [(self._prompts[key], self._scored[key]) for key in keys]
            said = self._begun | {
                ticket.key: PartialGroup.from_finished(group)
                for ticket, (group, _) in self._scoring.items()
            }
            open_keys = sorted(self._prompts.keys() - self._scored)
            begun = [with_partial_groups(self._prompts[key], [said.get(key)]) for key in open_keys]
            yield finished, [*begun, *self._again]

    def _ask(self) -> None:
        """Have workers say what they have begun; the lock is free while they do."""
        self._begun = {}
        self._asked = {group.worker for group in self.admission.in_flight.values()}
        deadline = time.monotonic() + _REPORT_S
        while self._asked and self._error is None and self._thread.is_alive():
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "%s did not say within %g s what they have begun; if the run goes on from this "
                    "checkpoint, it is sampled again", ", ".join(sorted(self._asked)), _REPORT_S,
                )  # fmt: skip
                break
        self._asked = set()

    def take_spans(self) -> list[Span]:
        """Spans of the workers since the last time; one that is dead or hangs has none."""
        with self._changed:
            every = list(self._processes.running.values())
        return spans_of(every)

    def close(self) -> None:
        """Stop the loop and all workers."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._thread.join(timeout=30)
        self._processes.close(timeout_s=30)

    def __enter__(self) -> AsyncRollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _standing(self) -> str:
        states = ", ".join(f"{w.name} {w.state}" for w in self.fleet.workers.values())
        return (
            f"{states}; {len(self.admission.in_flight)} groups in flight, "
            f"{len(self.admission.queue)} queued"
        )
