"""The groups of asynchronous rollout, from the draw of a prompt to the batch that a step takes.

`RolloutQueue` has the prompts, the completions and the scoring of finished groups. `Admission`
decides by staleness which groups may start and which are consumed.

A group is the n completions of one prompt. The trainer's version v is the number of its updates;
an update consumes `batch` groups, also where it learns nothing from them. A group is as old as its
oldest token, and may be consumed at version v only if v - oldest <= η (`staleness`); η = 0 is
synchronous on-policy training. A prompt is identified by its position in the data stream (its
key); each sampling of it is a new attempt, and the answer of an attempt that was given up is
ignored. A key moves through these states:

    data stream ──start──> in flight ──finished──> queue ──take──> consumed
                 ^             │ lost
                 └ resample <──┘

One more group starts at version v only if ⌊(consumed + in flight + queued) / batch⌋ <= v + η
(AReaL, arXiv:2505.24298, staleness-aware training). The rule assumes that groups are consumed in
the order of their start. A slow group that others pass could still get too old: so the trainer
waits rather than make an update that pushes a group over its bound. No decoded token is discarded,
and slow (long) completions aren't under-represented in the data.

Invariants, after every transition (its tests check them):

1. No prompt is lost or doubled: each key that left the data stream is in exactly one place, or
   was consumed or rejected once.
2. in flight + queued <= (η + 1)·batch: every started group fits in the queue.
3. All that is in flight or queued is within η now; so is all that is consumed.
4. One batch is consumed an update: consumed is v·batch, or (v + 1)·batch while the update runs.
5. What is in flight or queued can be consumed in time, oldest first.

While one worker with current weights lives and finishes what it starts, `take` returns a batch
after finitely many transitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.batch import Batch, Future
from engine.errors import RolloutError
from engine.rollout.stream import Begun, PartialGroup, take_partial_groups, with_partial_groups


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    batch: int  # groups an update consumes (train_batch_size), e.g. 32
    staleness: int  # η: versions a group's oldest token may be behind at consumption, e.g. 1
    steps: int | None = None  # updates of the whole run; no group starts that they can't consume


@dataclass(frozen=True, slots=True)
class Ticket:
    key: int  # position of the prompt in the data stream, e.g. 17
    attempt: int  # number of this sampling among all of the run, e.g. 20


@dataclass(frozen=True, slots=True)
class AdmittedGroup:
    ticket: Ticket
    worker: str  # who samples it, e.g. "rollout-0"
    oldest: int  # version of its oldest token, e.g. 4
    newest: int  # version of its newest token; larger if weights changed under way, e.g. 5


@dataclass(frozen=True, slots=True)
class Admission:
    """Where each prompt is: an immutable value, whose transitions return the next one."""

    limits: AdmissionLimits
    version: int = 0  # v, updates done
    consumed: int = 0  # groups handed to the trainer
    drawn: int = 0  # prompts drawn from the data stream; the key of the next new one
    attempts: int = 0  # tickets given out
    resample: tuple[int, ...] = ()  # keys to sample again before any new one, ascending
    in_flight: Mapping[int, AdmittedGroup] = field(default_factory=dict)  # by key
    queue: tuple[AdmittedGroup, ...] = ()  # finished, oldest first
    reissued: int = 0  # groups given up because their worker was lost
    rejected: int = 0  # groups discarded by request (failed reward, dynamic sampling)
    late: int = 0  # answers ignored because their attempt had been given up or had answered

    @property
    def training(self) -> bool:
        """Whether a batch was taken whose update isn't done."""
        return self.consumed > self.version * self.limits.batch

    @property
    def capacity(self) -> int:
        """How many more groups a worker with the trainer's weights may start now."""
        updates = self.version + self.limits.staleness + 1
        if self.limits.steps is not None:
            updates = min(updates, self.limits.steps)
        unconsumed = len(self.in_flight) + len(self.queue)
        return updates * self.limits.batch - self.consumed - unconsumed

    def may_start(self, version: int, oldest: int | None = None) -> bool:
        """Whether a worker whose weights have `version` may start one more group.

        False if the group would be too old at its consumption: by the worker's weights, or by the
        `oldest` token that an earlier run sampled of it.
        """
        self._check_version(version)
        return self._has_room(version if oldest is None else min(version, oldest))

    def _has_room(self, age: int) -> bool:
        """Whether a group this old can be consumed in time besides all that there are."""
        step = self.consumed // self.limits.batch
        return self.capacity > 0 and self._in_time([*self._ages(), age], step)

    def _ages(self) -> list[int]:
        return [group.oldest for group in (*self.queue, *self.in_flight.values())]

    def start(
        self, worker: str, version: int, oldest: int | None = None
    ) -> tuple[Admission, Ticket]:
        """Start the next prompt, of tokens as old as `oldest`, under weights `version`."""
        if not self.may_start(version, oldest):
            raise RolloutError(
                f"worker {worker} may not start a group with version {version}: the trainer is at "
                f"{self.version}, with room for {self.capacity} groups; ask may_start first"
            )
        ticket = Ticket(self.resample[0] if self.resample else self.drawn, self.attempts)
        age = version if oldest is None else min(version, oldest)
        group = AdmittedGroup(ticket, worker, oldest=age, newest=version)
        state = replace(
            self,
            resample=self.resample[1:],
            drawn=self.drawn if self.resample else self.drawn + 1,
            attempts=self.attempts + 1,
            in_flight={**self.in_flight, ticket.key: group},
        )
        return state, ticket

    def finished(self, ticket: Ticket, versions: Collection[int]) -> tuple[Admission, bool]:
        """All completions of a group are finished; also returns whether the answer counts.

        `versions` are those of its tokens, e.g. {4, 5}. It doesn't count if the attempt was given
        up or has answered already: the caller discards it.
        """
        group = self._current(ticket)
        if group is None:
            return replace(self, late=self.late + 1), False
        if not versions or min(versions) < group.oldest:
            raise RolloutError(
                f"group {ticket.key} of worker {group.worker} was started with version "
                f"{group.oldest}, not {sorted(versions)}; report the version of each token"
            )
        self._check_version(max(versions))
        group = replace(group, oldest=min(versions), newest=max(versions))
        return self._without({ticket.key})._enqueue(group), True

    def enqueue_restored(self, versions: Collection[int]) -> tuple[Admission, int | None]:
        """Queue an earlier run's group; returns its key, None if it comes too late."""
        self._check_version(max(versions))
        if not self._has_room(min(versions)):
            return self, None
        ticket = Ticket(self.drawn, self.attempts)
        group = AdmittedGroup(ticket, "", oldest=min(versions), newest=max(versions))
        state = replace(self, drawn=self.drawn + 1, attempts=self.attempts + 1)
        return state._enqueue(group), ticket.key

    def _enqueue(self, group: AdmittedGroup) -> Admission:
        def age(group: AdmittedGroup) -> tuple[int, int]:
            return group.oldest, group.ticket.key

        return replace(self, queue=tuple(sorted((*self.queue, group), key=age)))

    def reject(self, ticket: Ticket) -> Admission:
        """Discard a group in flight; its prompt isn't sampled again."""
        if self._current(ticket) is None:
            return replace(self, late=self.late + 1)
        return replace(self._without({ticket.key}), rejected=self.rejected + 1)

    def lost(self, worker: str) -> tuple[Admission, tuple[Ticket, ...]]:
        """Give up what `worker`, which was lost, had in flight; returns what is sampled again."""
        lost = [group.ticket for group in self.in_flight.values() if group.worker == worker]
        keys = {ticket.key for ticket in lost}
        resample = tuple(sorted((*self.resample, *keys)))
        state = replace(self._without(keys), resample=resample, reissued=self.reissued + len(lost))
        return state, tuple(lost)

    def take(self) -> tuple[Admission, tuple[AdmittedGroup, ...]]:
        """The batch for the next update, oldest first; empty if it isn't complete yet."""
        if self.training:
            raise RolloutError(
                f"a batch was taken at version {self.version} and its update isn't done; call "
                "updated() before the next take()"
            )
        size = self.limits.batch
        chosen, rest = self.queue[:size], self.queue[size:]
        if len(chosen) < size:
            return self, ()
        left = [group.oldest for group in (*rest, *self.in_flight.values())]
        if not self._in_time(left, self.version + 1):
            return self, ()
        # Follows from the order of the queue and from `updated`; checked where it matters.
        if self.version - chosen[0].oldest > self.limits.staleness:
            raise RolloutError(f"group {chosen[0]} is too old for version {self.version}")
        return replace(self, queue=rest, consumed=self.consumed + size), chosen

    def updated(self, version: int) -> Admission:
        """The trainer has made its update to `version`."""
        if version != self.version + 1 or not self.training:
            raise RolloutError(
                f"version {version} can't follow version {self.version} "
                f"{'with' if self.training else 'without'} a batch taken; an update is one take()"
            )
        return replace(self, version=version)

    def _in_time(self, ages: Iterable[int], step: int) -> bool:
        """Whether groups this old can be consumed from update `step` on, oldest first."""
        size, bound = self.limits.batch, self.limits.staleness
        return all(step + i // size - oldest <= bound for i, oldest in enumerate(sorted(ages)))

    def _current(self, ticket: Ticket) -> AdmittedGroup | None:
        group = self.in_flight.get(ticket.key)
        return group if group is not None and group.ticket == ticket else None

    def _check_version(self, version: int) -> None:
        if version > self.version:
            raise RolloutError(
                f"a worker reports weights of version {version}, but the trainer is at "
                f"{self.version}; call updated() before the weights are sent out"
            )

    def _without(self, keys: set[int]) -> Admission:
        in_flight = {key: group for key, group in self.in_flight.items() if key not in keys}
        return replace(self, in_flight=in_flight)


EPISODES = "episode_turns"  # a column of groups of episodes
_SCORES = "token_level_scores"


@dataclass(slots=True)
class ScoringCall:
    groups: dict[Ticket, tuple[Batch, slice]]  # with their rows in the call; without lost ones
    scores: Future[Batch]  # `token_level_scores` [all groups' rows, R of the widest]

    def scored_groups(self) -> Iterator[tuple[Ticket, Batch]]:
        """Each group with its own scores `[n, response]`; raises what the scoring raised."""
        scores = self.scores.result()
        for ticket, (group, rows) in self.groups.items():
            own, width = scores.rows(rows), group["response_mask"].shape[1]
            # Wider groups may have been scored beside it.
            yield ticket, group | (own | {_SCORES: own[_SCORES][:, :width]})


class RolloutQueue:
    """Prompts that are being sampled, groups that are being scored, and finished groups.

    Not thread-safe: `AsyncRollout` calls it under its lock.
    """

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
        """Everything that no step has taken: finished groups with their prompts, oldest first.

        And unfinished prompts with what workers `reported` of their completions. Finished episodes
        whose scores aren't there yet come without them.
        """
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
        """Score groups in one call: a call a group would cost more than a fast reward's scores."""
        if not groups:
            return
        scores = self._score(Batch.concat([group for _, group in groups]))
        scored, start = {}, 0
        for ticket, group in groups:
            scored[ticket] = group, slice(start, start + len(group))
            start += len(group)
        self._scoring.append(ScoringCall(scored, scores))

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
        """Queue a group that an earlier run finished; one without scores is scored first."""
        state, versions, ticket = self.admission, _versions(group), None
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
        fields = {"group_ids": torch.full((len(group),), key)}
        if "episode_ids" in group:
            ids, order = torch.unique(group["episode_ids"], return_inverse=True)
            fields["episode_ids"] = key * len(ids) + order
        if ticket is None:
            self._scored[key] = group | fields
        else:
            self._begin_scoring([(ticket, group | fields)])


def _versions(group: Batch) -> set[int]:
    """The versions that sampled the group's tokens, or would have sampled any."""
    versions = set(group["token_versions"][group["response_mask"].bool()].tolist())
    return versions or set(group["policy_version"].tolist())
