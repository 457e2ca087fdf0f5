"""The groups of asynchronous rollout, from the draw of a prompt to the batch that a step takes.

`staleness.Admission` decides which may begin and be taken; here are their prompts and completions,
and the scoring of finished ones. Not thread-safe: `async_rollout` calls it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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


@dataclass(slots=True)
class ScoringCall:
    """Groups that are being scored in one call of the reward role."""

    groups: dict[Ticket, tuple[Batch, slice]]  # with their rows in the call; without lost ones
    scores: Future[Batch]  # `token_level_scores` [all groups' rows, R of the widest]

    def scored_groups(self) -> Iterator[tuple[Ticket, Batch]]:
        """Each group with its own scores `[n, response]`; raises what the scoring raised."""
        scores = self.scores.result()
        for ticket, (group, rows) in self.groups.items():
            own = scores.rows(rows)
            width = group["response_mask"].shape[1]  # wider groups may have been scored beside it
            yield ticket, group | (own | {_SCORES: own[_SCORES][:, :width]})


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
        self._scoring: list[ScoringCall] = []
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

    def finish(self, worker: str, groups: Sequence[Batch]) -> None:
        """Start scoring groups that a worker has finished, except for those that were given up."""
        current: list[tuple[Ticket, Batch]] = []
        for group in groups:
            in_flight = self.admission.in_flight.get(int(group["group_ids"][0]))
            if in_flight is not None and in_flight.worker == worker:
                current.append((in_flight.ticket, group))
        self._begin_scoring(current)
        for _, group in current:
            self.completions += len(group)
            self.tokens += int(group["response_mask"].sum())

    def poll_scores(self) -> bool:
        """Queue the groups whose scores are there, or drop them; return whether there were any."""
        done = [scoring for scoring in self._scoring if scoring.scores.done()]
        for scoring in done:
            self._scoring.remove(scoring)
            for ticket, group in scoring.scored_groups():
                self._scored_group(ticket, group)
        return bool(done)

    def worker_lost(self, worker: str) -> None:
        """Sample again what a worker had in flight."""
        self.admission, lost = self.admission.lost(worker)
        for scoring in self._scoring:
            for ticket in lost:
                scoring.groups.pop(ticket, None)

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
        scoring = [item for call in self._scoring for item in call.groups.items()]
        for ticket, (group, _) in scoring:
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

    def _begin_scoring(self, groups: Sequence[tuple[Ticket, Batch]]) -> None:
        """Score groups in one call: a call a group would cost more than the scores of a fast
        reward, and takes its time from the cores of rollout and trainer."""
        if not groups:
            return
        ends = list(accumulate(len(group) for _, group in groups))
        rows = [slice(end - len(group), end) for (_, group), end in zip(groups, ends, strict=True)]
        scores = self._score(Batch.concat([group for _, group in groups]))
        found = {ticket: (group, own) for (ticket, group), own in zip(groups, rows, strict=True)}
        self._scoring.append(ScoringCall(found, scores))

    def _scored_group(self, ticket: Ticket, group: Batch) -> None:
        """Queue a group, or drop it where nothing is to be learned from it."""
        if self._keep is not None and not self._keep(group):
            self.admission = self.admission.reject(ticket)
            self._prompts.pop(ticket.key, None)
            return
        self.admission, counts = self.admission.finished(ticket, _versions(group))
        if counts:
            self._scored[ticket.key] = group

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
            self._begin_scoring([(ticket, group)])


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
