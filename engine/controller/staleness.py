"""Which groups asynchronous rollout may begin, and which of them the trainer may consume.

A group is the n completions of one prompt. The trainer's version v is the number of its updates;
an update consumes `batch` groups, also where it learns nothing from them. A group is as old as its
oldest token, and may be consumed at version v only if v - oldest <= η (`staleness`); η = 0 is
synchronous on-policy training.

This is a pure state machine: `Admission` is a value, a transition returns the next one. Prompts,
completions, threads, clocks and Ray are the caller's. A prompt is its position in the data stream
(its key: 0, 1, 2, …); each sampling of it is a new attempt, and what an attempt says after it was
given up is ignored. A key takes one way through the state:

    data stream ──start──> in flight ──finished──> queue ──take──> consumed
                 ^             │ lost
                 └── again <───┘

Admission (AReaL, arXiv:2505.24298, staleness-aware training): one more group is begun at version v
only if ⌊(consumed + in flight + queued) / batch⌋ <= v + η. The rule counts groups and trusts that
they are consumed in the order of their start. A slow group, overtaken by fast ones, could still get
too old: so the trainer waits rather than make an update that pushes a group over its bound. No
decoded token is thrown away, and slow (long) completions aren't sampled out of the data.

Invariants, after every transition (`Admission.check`):

1. No prompt is lost or doubled: each key that left the data stream is in exactly one place, or
   was consumed or rejected once.
2. in flight + queued <= (η + 1)·batch: what is begun has its place in the queue.
3. All that is in flight or queued is within η now; so is all that is consumed.
4. One batch is consumed an update: consumed is v·batch, or (v + 1)·batch while the update runs.
5. What is in flight or queued can be consumed in time, oldest first.

Liveness: while one worker with current weights lives and finishes what it begins, `take` gives a
batch after finitely many transitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from engine.errors import ConfigError, RolloutError


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the rollout; raises ConfigError where the trainer could never get a batch."""

    batch: int  # groups an update consumes (train_batch_size), e.g. 32
    staleness: int  # η: versions a group's oldest token may be behind at consumption, e.g. 1
    steps: int | None = None  # updates of the whole run; nothing is begun that they can't consume

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch", self.batch, 1),
            ("staleness", self.staleness, 0),
            ("steps", self.steps, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it has to be at least {least}")


@dataclass(frozen=True, slots=True)
class Ticket:
    """One sampling of one prompt."""

    key: int  # position of the prompt in the data stream, e.g. 17
    attempt: int  # number of this sampling among all of the run, e.g. 20


@dataclass(frozen=True, slots=True)
class Group:
    """A group in flight or queued."""

    ticket: Ticket
    worker: str  # who samples it, e.g. "rollout-0"
    oldest: int  # version of its oldest token, e.g. 4
    newest: int  # version of its newest token; larger if weights changed under way, e.g. 5

    @property
    def age_order(self) -> tuple[int, int]:
        return self.oldest, self.ticket.key


@dataclass(frozen=True, slots=True)
class Admission:
    """The state: where each prompt is. Begin with `Admission(Limits(…))`."""

    limits: Limits
    version: int = 0  # v, updates done
    consumed: int = 0  # groups handed to the trainer
    begun: int = 0  # prompts drawn from the data stream; the key of the next new one
    attempts: int = 0  # tickets given out
    again: tuple[int, ...] = ()  # keys to sample again before any new one, ascending
    in_flight: Mapping[int, Group] = field(default_factory=dict)  # by key
    queue: tuple[Group, ...] = ()  # finished, oldest first
    reissued: int = 0  # groups given up because their worker died
    rejected: int = 0  # groups thrown away by request (failed reward, dynamic sampling)
    late: int = 0  # answers ignored because their attempt had been given up or had answered

    @property
    def training(self) -> bool:
        """Whether a batch was taken whose update isn't done."""
        return self.consumed > self.version * self.limits.batch

    @property
    def room(self) -> int:
        """How many more groups may be begun now, by a worker with the trainer's weights."""
        updates = self.version + self.limits.staleness + 1
        if self.limits.steps is not None:
            updates = min(updates, self.limits.steps)
        unconsumed = len(self.in_flight) + len(self.queue)
        return updates * self.limits.batch - self.consumed - unconsumed

    def may_start(self, version: int, oldest: int | None = None) -> bool:
        """Whether a worker whose weights have `version` may begin one more group.

        A worker that is behind may not begin what would be too old when its turn comes; nor may a
        group go on whose `oldest` token, of an earlier run, would be.
        """
        self._check_version(version)
        step = self.consumed // self.limits.batch
        age = version if oldest is None else min(version, oldest)
        return self.room > 0 and self._in_time([*self._ages(), age], step)

    def start(
        self, worker: str, version: int, oldest: int | None = None
    ) -> tuple[Admission, Ticket]:
        """`worker` begins the next prompt with weights `version`: one to sample again, or a new.

        `oldest` is the version of the oldest token that a new one has already.
        """
        if not self.may_start(version, oldest):
            raise RolloutError(
                f"worker {worker} may not begin a group with weights of version {version}: the "
                f"trainer is at {self.version}, and there is room for {self.room} groups; ask "
                "may_start first"
            )
        ticket = Ticket(self.again[0] if self.again else self.begun, self.attempts)
        age = version if oldest is None else min(version, oldest)
        group = Group(ticket, worker, oldest=age, newest=version)
        state = replace(
            self,
            again=self.again[1:],
            begun=self.begun if self.again else self.begun + 1,
            attempts=self.attempts + 1,
            in_flight={**self.in_flight, ticket.key: group},
        )
        return state, ticket

    def finished(self, ticket: Ticket, versions: Collection[int]) -> tuple[Admission, bool]:
        """All completions of a group are there; says whether the answer counts.

        `versions` are those of its tokens, e.g. {4, 5}. An answer doesn't count if its attempt
        was given up or has answered already: the caller throws it away.
        """
        group = self._current(ticket)
        if group is None:
            return replace(self, late=self.late + 1), False
        if not versions or min(versions) < group.oldest:
            raise RolloutError(
                f"group {ticket.key} of worker {group.worker} was begun with weights of version "
                f"{group.oldest}, but its tokens have versions {sorted(versions)}; the worker has "
                "to report the version of each token"
            )
        self._check_version(max(versions))
        group = replace(group, oldest=min(versions), newest=max(versions))
        queue = tuple(sorted((*self.queue, group), key=lambda g: g.age_order))
        return replace(self._without({ticket.key}), queue=queue), True

    def restored(self, versions: Collection[int]) -> tuple[Admission, int | None]:
        """Queue a group that an earlier run had finished; returns its new key.

        None, without effect, where it could not be consumed in time: its prompt is sampled again.
        """
        self._check_version(max(versions))
        step = self.consumed // self.limits.batch
        if self.room <= 0 or not self._in_time([*self._ages(), min(versions)], step):
            return self, None
        ticket = Ticket(self.begun, self.attempts)
        group = Group(ticket, "", oldest=min(versions), newest=max(versions))
        queue = tuple(sorted((*self.queue, group), key=lambda g: g.age_order))
        state = replace(self, begun=self.begun + 1, attempts=self.attempts + 1, queue=queue)
        return state, ticket.key

    def reject(self, ticket: Ticket) -> Admission:
        """Throw a group in flight away for good; its prompt isn't sampled again."""
        if self._current(ticket) is None:
            return replace(self, late=self.late + 1)
        return replace(self._without({ticket.key}), rejected=self.rejected + 1)

    def lost(self, worker: str) -> tuple[Admission, tuple[Ticket, ...]]:
        """Give up all that `worker` had in flight (it died); returns what is sampled again."""
        lost = [group.ticket for group in self.in_flight.values() if group.worker == worker]
        keys = {ticket.key for ticket in lost}
        again = tuple(sorted((*self.again, *keys)))
        state = replace(self._without(keys), again=again, reissued=self.reissued + len(lost))
        return state, tuple(lost)

    def take(self) -> tuple[Admission, tuple[Group, ...]]:
        """The batch for the next update, oldest first; empty if it isn't there yet."""
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
        # The order of the queue and `updated` see to it; consumption is where it must hold.
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

    def check(self) -> None:
        """Raise RolloutError naming each invariant of the module's docstring that is broken."""
        size, bound = self.limits.batch, self.limits.staleness
        groups = (*self.in_flight.values(), *self.queue)
        keys = [*self.again, *(group.ticket.key for group in groups)]
        step = self.consumed // size
        invariants = {
            "1: a key is in two places": len(set(keys)) == len(keys),
            "1: a key is lost or doubled": self.begun == self.consumed + self.rejected + len(keys)
            and all(0 <= key < self.begun for key in keys),
            "2: more groups than places": len(groups) <= (bound + 1) * size,
            "2: more prompts than updates": len(keys)
            <= (self.version + bound + 1) * size - self.consumed,
            "3: a group is too old": all(self.version - g.oldest <= bound for g in groups),
            "3: a version is unknown": all(g.oldest <= g.newest <= self.version for g in groups),
            "4: not one batch an update": self.consumed % size == 0
            and step - self.version in (0, 1),
            "5: a group can't be consumed in time": self._in_time(self._ages(), step),
        }
        broken = [name for name, holds in invariants.items() if not holds]
        if broken:
            raise RolloutError(f"admission breaks {'; '.join(broken)}: {self}")

    def _in_time(self, ages: Iterable[int], step: int) -> bool:
        """Whether groups this old can be consumed from update `step` on, oldest first."""
        size, bound = self.limits.batch, self.limits.staleness
        return all(step + i // size - oldest <= bound for i, oldest in enumerate(sorted(ages)))

    def _ages(self) -> list[int]:
        return [group.oldest for group in (*self.queue, *self.in_flight.values())]

    def _current(self, ticket: Ticket) -> Group | None:
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
