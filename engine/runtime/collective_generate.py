"""Collective generation: each rank passes its own prompts and gets their completions back.

Ranks of one data-parallel index (they differ in tp only) pass the same prompts. The ranks of a
rollout group decode the union of their prompts together; groups with the same union decode a part
of it each. Only Python objects are exchanged here, no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from engine.errors import ConfigError, EngineError, RolloutError
from engine.parallel.layout import Layout
from engine.rollout.protocol import Completion, SamplingParams

Prompts = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutTask:
    """What this rank's rollout group decodes."""

    prompts: list[Sequence[int]]  # may be empty
    params: SamplingParams  # of the first rank; `first_prompt` numbers the prompts of all ranks
    by_data_index: dict[int, Prompts]  # the prompts of all ranks


class RolloutPeers:
    """All ranks of an actor. Every method is a collective: all ranks call it together."""

    def __init__(self, layout: Layout, rank: int, groups: Sequence[Sequence[int]]) -> None:
        """`groups`: ranks that share matrices in rollout, group by group."""
        self._layout, self._rank = layout, rank
        self._groups = [sorted(group) for group in groups]
        indices = [tuple(sorted({self._data_index(r) for r in group})) for group in self._groups]
        # Groups of the same data indices split one union of prompts; unions are ordered by index.
        self._unions = {u: [g for g, i in enumerate(indices) if i == u] for u in sorted(indices)}
        self._union_of = indices
        self._group = next(g for g, members in enumerate(self._groups) if rank in members)

    def raise_everywhere(self, problem: EngineError | None) -> None:
        """Raise on every rank if any has a `problem`: its own error, else the lowest rank's."""
        try:
            every: list[EngineError | None] = self._gather(problem)
        except RolloutError:
            if problem is None:
                raise
            every = []  # this rank's own problem is the cause
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(every):
            if theirs is not None:
                raise type(theirs)(f"rank {rank} of {len(every)}: {theirs}")

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank's `flag` is set."""
        return any(self._gather(flag))

    def scatter(self, prompts: Prompts, params: SamplingParams) -> RolloutTask:
        """What this rank's group decodes of all ranks' prompts.

        Raises ConfigError, on every rank, where their arguments differ.
        """
        every = self._gather((list(map(list, prompts)), params))
        by_index = self._by_data_index(every)
        for rank, (_, theirs) in enumerate(every):
            if dataclasses.replace(theirs, seed=0) != dataclasses.replace(every[0][1], seed=0):
                raise ConfigError(
                    f"rank {rank} generates with {theirs} and rank 0 with {every[0][1]}; call "
                    "generate with the same arguments on all ranks"
                )
        own = self._union_of[self._group]
        before = sum(len(by_index[i]) for other in self._unions if other < own for i in other)
        union = [prompt for i in own for prompt in by_index[i]]
        groups = self._unions[own]
        index = groups.index(self._group)
        low, high = (len(union) * i // len(groups) for i in (index, index + 1))
        first = every[0][1]
        params = dataclasses.replace(first, first_prompt=first.first_prompt + before + low)
        return RolloutTask(union[low:high], params, by_index)

    def gather(self, task: RolloutTask, done: Sequence[Completion]) -> list[Completion]:
        """The completions of this rank's own prompts, from its own and other groups."""
        own = self._union_of[self._group]
        whole = list(done)
        if max(map(len, self._unions.values())) > 1:
            leads = self._rank == self._groups[self._group][0]
            every = self._gather(whole if leads else [])
            whole = [c for g in self._unions[own] for c in every[self._groups[g][0]]]
        mine, n = self._data_index(self._rank), task.params.n
        before = sum(len(task.by_data_index[i]) for i in own if i < mine)
        count = len(task.by_data_index[mine])
        return [
            dataclasses.replace(completion, prompt_index=index // n)
            for index, completion in enumerate(whole[before * n : (before + count) * n])
        ]

    def _by_data_index(self, every: Sequence[tuple[Prompts, SamplingParams]]) -> dict[int, Prompts]:
        """The prompts of each data index; its ranks must have passed the same."""
        found: dict[int, tuple[int, Prompts]] = {}
        for rank, (prompts, _) in enumerate(every):
            first, known = found.setdefault(self._data_index(rank), (rank, prompts))
            if known != prompts:
                raise ConfigError(
                    f"ranks {first} and {rank} share their rows (tp_size={self._layout.tp}) and "
                    "were given different prompts; give both the same"
                )
        return {index: prompts for index, (_, prompts) in found.items()}

    def _data_index(self, rank: int) -> int:
        """The index of `rank` among the training layout's data-parallel ranks."""
        where = self._layout.coordinates(rank)
        return where["dp"] * self._layout.fsdp + where["fsdp"]

    def _gather(self, mine: T) -> list[T]:
        every: list[Any] = [None] * self._layout.world_size
        try:
            dist.all_gather_object(every, mine)
        except RuntimeError as error:
            raise RolloutError(
                f"rank {self._rank} of {len(every)} got no answer from the others: {error}; "
                "all ranks must call the actor's methods together. Restart the ranks"
            ) from error
        return every
