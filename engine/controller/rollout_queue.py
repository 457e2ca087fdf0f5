"""The groups of asynchronous rollout, from the draw of a prompt to the batch that a step takes.

`staleness.Admission` decides which may begin and be taken; here are their prompts and completions,
and the scoring of finished ones. Not thread-safe: `async_rollout` calls it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.batch import Batch
from engine.controller.staleness import Admission, AdmissionLimits, Ticket
from engine.futures import Future
from engine.rollout.partial_groups import (
    Begun,
    PartialGroup,
    take_partial_groups,
    with_partial_groups,
)

EPISODES = "episode_turns"  # a column of groups of episodes
_SCORES = "token_level_scores"


class RolloutQueue:
    """Prompts that are being sampled, groups that are being scored, and finished groups."""

    def __init__(
        self,
        limits: AdmissionLimits,
        version: int,
        *,
        next_prompt: Callable[[], Batch],
        score: Callable[[Batch], Future[Batch]],
        keep: Callable[[Batch], bool] | None = None,
        finished: Sequence[tuple[Batch, Batch]] = (),
    ) -> None:
        """`version` is the trainer's. The others are as in `AsyncRollout`."""
        self._next_prompt, self._score, self._keep = next_prompt, score, keep
        consumed = version * limits.batch
        self.admission = Admission(limits, version=version, consumed=consumed, drawn=consumed)
        self.completions = self.tokens = 0  # finished since the start
        self._prompts: dict[int, Batch] = {}  # by key, until consumed
        self._scoring: dict[Ticket, tuple[Batch, Future[Batch]]] = {}
        self._scored: dict[int, Batch] = {}
        self._resample: deque[Batch] = deque()  # prompts that come before all others
        for prompt, group in finished:
            self._restore(prompt, group)

    def begin(self, worker: str, version: int, share: int) -> list[Batch]:
        """Prompts that a worker with weights `version` begins now, `share` of them at most."""
        started: list[Batch] = []
        while len(started) < share and self.admission.may_start(version):
            started.append(self._begin_one(worker, version))
        return started

    def finish(self, worker: str, group: Batch) -> None:
        """Start scoring a group that a worker has finished, unless it was given up."""
        in_flight = self.admission.in_flight.get(int(group["group_ids"][0]))
        if in_flight is None or in_flight.worker != worker:
            return
        self.completions += len(group)
        self.tokens += int(group["response_mask"].sum())
        self._scoring[in_flight.ticket] = (group, self._score(group))

    def poll_scores(self) -> bool:
        """Queue the groups whose scores are there, or drop them; return whether there were any."""
        done = [ticket for ticket, (_, score) in self._scoring.items() if score.done()]
        for ticket in done:
            group, score = self._scoring.pop(ticket)
            group = group | score.result()
            if self._keep is not None and not self._keep(group):
                self.admission = self.admission.reject(ticket)
                self._prompts.pop(ticket.key, None)
                continue
            self.admission, counts = self.admission.finished(ticket, _versions(group))
            if counts:
                self._scored[ticket.key] = group
        return bool(done)

    def worker_lost(self, worker: str) -> None:
        """Sample again what a worker had in flight."""
        self.admission, lost = self.admission.lost(worker)
        for ticket in lost:
            self._scoring.pop(ticket, None)

    def take(self) -> tuple[Batch, Batch] | None:
        """Prompts and completions of the next batch, oldest first; None if it isn't there yet."""
        self.admission, groups = self.admission.take()
        if not groups:
            return None
        keys = [group.ticket.key for group in groups]
        prompts = Batch.concat([self._prompts.pop(key) for key in keys])
        return prompts, Batch.concat([self._scored.pop(key) for key in keys])

    def unused(
        self, reported: Mapping[int, Begun]
    ) -> tuple[list[tuple[Batch, Batch]], list[Batch]]:
        """Everything that no step has taken: finished groups with their prompts, oldest first, and
        unfinished prompts with what workers `reported` of their completions.

        Finished episodes whose scores aren't there yet come without them."""
        keys = [group.ticket.key for group in self.admission.queue]
        finished = [(self._prompts[key], self._scored[key]) for key in keys]
        partial, unscored = {**reported}, set()
        for ticket, (group, _) in self._scoring.items():
            if EPISODES in group:
                unscored.add(ticket.key)
                finished.append((self._prompts[ticket.key], group))
            else:
                partial[ticket.key] = PartialGroup.from_finished(group)
        unfinished = [
            with_partial_groups(self._prompts[key], [partial.get(key)])
            for key in sorted(self._prompts.keys() - self._scored - unscored)
        ]
        return finished, [*unfinished, *self._resample]

    def _begin_one(self, worker: str, version: int) -> Batch:
        """The next prompt, with its partial group if an earlier run started one."""
        if self.admission.resample:
            self.admission, ticket = self.admission.start(worker, version)
            return with_partial_groups(self._prompts[ticket.key], [None])
        row = self._resample.popleft() if self._resample else self._next_prompt()
        prompt, [partial] = take_partial_groups(row)
        oldest = partial.oldest_version if partial is not None else None
        if not self.admission.may_start(version, oldest):
            partial = oldest = None  # it would be too old when it is taken
        self.admission, ticket = self.admission.start(worker, version, oldest)
        self._prompts[ticket.key] = prompt | {"group_ids": torch.tensor([ticket.key])}
        return with_partial_groups(self._prompts[ticket.key], [partial])

    def _restore(self, prompt: Batch, group: Batch) -> None:
        """Queue a group that an earlier run finished, under a key of this one; score it first,
        where that hadn't been done."""
        state, versions = self.admission, _versions(group)
        if _SCORES in group:
            self.admission, key = state.enqueue_restored(versions)
        elif state.may_start(state.version, min(versions)):
            self.admission, ticket = state.start("", state.version, min(versions))
            key = ticket.key
        else:
            key = None
        if key is None:
            self._resample.append(prompt)
            return
        self._prompts[key] = prompt | {"group_ids": torch.tensor([key])}
        group = group | _with_key(group, key)
        if _SCORES in group:
            self._scored[key] = group
        else:
            self._scoring[ticket] = (group, self._score(group))


def _versions(group: Batch) -> set[int]:
    """The versions of the weights that sampled the group's tokens; without any, those that they
    would have been sampled under."""
    found = set(group["token_versions"][group["response_mask"].bool()].tolist())
    return found or set(group["policy_version"].tolist())


def _with_key(group: Batch, key: int) -> dict[str, torch.Tensor]:
    """The fields of a group that name it."""
    fields = {"group_ids": torch.full((len(group),), key)}
    if "episode_ids" in group:
        ids, order = torch.unique(group["episode_ids"], return_inverse=True)
        fields["episode_ids"] = key * len(ids) + order
    return fields
