"""Ranks that generate together: each comes with prompts of its own, and leaves with its answers.

Ranks of one training data share (they differ in tp only) bring the same prompts. Ranks of a rollout
group decode together what all of them brought; groups that were brought the same prompts decode a
part each. Which weights they decode with is the matter of `spread.py`. Nothing here moves tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from engine.errors import ConfigError, EngineError, RolloutError
from engine.parallel.layout import Layout
from engine.rollout.protocol import Completion, SamplingParams

Prompts = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What this rank's rollout group decodes."""

    prompts: list[Sequence[int]]  # may be none
    params: SamplingParams  # of the first rank; `first_prompt` numbers the prompts of all ranks
    brought: dict[int, Prompts]  # by data share, of all ranks


class Peers:
    """All ranks of an actor. Every method is a collective: all ranks call it together."""

    def __init__(self, layout: Layout, rank: int, groups: Sequence[Sequence[int]]) -> None:
        """`groups`: ranks that share matrices in rollout, group by group."""
        self._layout, self._rank = layout, rank
        self._groups = [sorted(group) for group in groups]
        shares = [tuple(sorted({self._share(r) for r in group})) for group in self._groups]
        # Groups of the same data shares do the same job, a part each; jobs are in order of shares.
        self._jobs = {job: [g for g, s in enumerate(shares) if s == job] for job in sorted(shares)}
        self._job_of = shares
        self._group = next(g for g, members in enumerate(self._groups) if rank in members)

    def agree(self, problem: EngineError | None) -> None:
        """Raise on every rank what one of them has met: its own error, or the first one's."""
        try:
            every: list[EngineError | None] = self._gather(problem)
        except RolloutError:
            if problem is None:
                raise
            every = []  # why it broke is what this rank knows
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(every):
            if theirs is not None:
                raise type(theirs)(f"rank {rank} of {len(every)}: {theirs}")

    def any(self, flag: bool) -> bool:
        """Whether any rank's `flag` is set."""
        return any(self._gather(flag))

    def share_out(self, prompts: Prompts, params: SamplingParams) -> Task:
        """What this rank's group decodes, of what all ranks came with.

        Raises ConfigError, on every rank, where they ask for different things.
        """
        every = self._gather((list(map(list, prompts)), params))
        brought = self._by_share(every)
        for rank, (_, theirs) in enumerate(every):
            if dataclasses.replace(theirs, seed=0) != dataclasses.replace(every[0][1], seed=0):
                raise ConfigError(
                    f"rank {rank} generates with {theirs} and rank 0 with {every[0][1]}; call "
                    "generate with the same arguments on all ranks"
                )
        job = self._job_of[self._group]
        before = sum(len(brought[share]) for other in self._jobs if other < job for share in other)
        union = [prompt for share in job for prompt in brought[share]]
        groups = self._jobs[job]
        index = groups.index(self._group)
        low, high = (len(union) * i // len(groups) for i in (index, index + 1))
        first = every[0][1]
        params = dataclasses.replace(first, first_prompt=first.first_prompt + before + low)
        return Task(union[low:high], params, brought)

    def collect(self, task: Task, done: Sequence[Completion]) -> list[Completion]:
        """The completions of this rank's own prompts, of what its and other groups decoded."""
        job = self._job_of[self._group]
        whole = list(done)
        if max(map(len, self._jobs.values())) > 1:
            speaks = self._rank == self._groups[self._group][0]
            every = self._gather(whole if speaks else None)
            whole = [c for g in self._jobs[job] for c in every[self._groups[g][0]]]
        mine, n = self._share(self._rank), task.params.n
        before = sum(len(task.brought[share]) for share in job if share < mine)
        count = len(task.brought[mine])
        return [
            dataclasses.replace(completion, prompt_index=index // n)
            for index, completion in enumerate(whole[before * n : (before + count) * n])
        ]

    def _by_share(self, every: Sequence[tuple[Prompts, SamplingParams]]) -> dict[int, Prompts]:
        """The prompts of each data share; its ranks must have brought the same."""
        found: dict[int, tuple[int, Prompts]] = {}
        for rank, (prompts, _) in enumerate(every):
            first, known = found.setdefault(self._share(rank), (rank, prompts))
            if known != prompts:
                raise ConfigError(
                    f"ranks {first} and {rank} share their rows (tp_size={self._layout.tp}) and "
                    "were given different prompts; give both the same"
                )
        return {share: prompts for share, (_, prompts) in found.items()}

    def _share(self, rank: int) -> int:
        """Which of the training layout's data shares `rank` belongs to."""
        where = self._layout.coordinates(rank)
        return where["dp"] * self._layout.fsdp + where["fsdp"]

    def _gather(self, mine: Any) -> list[Any]:
        every: list[Any] = [None] * self._layout.world_size
        try:
            dist.all_gather_object(every, mine)
        except RuntimeError as error:
            raise RolloutError(
                f"rank {self._rank} of {len(every)} did not meet the others: {error}; all ranks "
                "must call the actor's methods together. Start the ranks anew"
            ) from error
        return every
