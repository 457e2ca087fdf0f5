"""Every layout that the model and the machines take, with what can be kept, recomputed or put away.

`search` chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from engine.errors import ConfigError
from engine.parallel.layout import AXES, Layout, check_layout
from engine.parallel.rollout_layout import rollout_layout
from engine.planner.cost import Price, price
from engine.planner.memory import Memory, estimate, usable_bytes
from engine.planner.resources import Allocation
from engine.planner.workload import Candidate, FixedSettings, Workload

BUDGET = 16384  # tokens of a micro-batch, at most: what the settings start from


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate on a part of the cluster. Most are too large, and never priced."""

    work: Workload = field(repr=False)
    candidate: Candidate
    allocation: Allocation

    @cached_property
    def memory(self) -> Memory:
        """What a rank needs."""
        gpu = self.allocation.memory if self.allocation.gpus else 0
        return estimate(self.work, self.candidate, gpu=gpu > 0, there=gpu)

    @cached_property
    def price(self) -> Price:
        """What a step costs."""
        return price(self.work, self.candidate, self.allocation)

    @property
    def fits(self) -> bool:
        """Whether each rank's device and machine hold it."""
        return self.excess_bytes <= 0

    @cached_property
    def excess_bytes(self) -> float:
        """Bytes that a rank needs beyond what there is, on the device or its machine."""
        host = self.memory.host - usable_bytes(self.allocation.host_memory)
        return max(self.memory.peak - usable_bytes(self.allocation.memory), host)

    @property
    def lacks(self) -> str:
        """What it has too little memory in: a phase, or the machine's; empty where it fits."""
        if self.fits:
            return ""
        on_machine = self.memory.host - usable_bytes(self.allocation.host_memory)
        return "the machine's memory" if on_machine == self.excess_bytes else self.memory.when

    @property
    def order(self) -> tuple[float | int, ...]:
        """Cheapest first; of equals the one with larger micro-batches, then the plainest."""
        c = self.candidate
        flags = c.offload_params + c.offload_optimizer + c.activation_checkpointing
        return (
            self.price.total,
            self.price.own,
            -c.tokens,
            flags,
            c.rollout_tp,
            *c.layout.sizes.values(),
        )


def candidates(
    work: Workload, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """Those on the ranks of `allocation`, whether they fit or not."""
    for layout in _layouts(work, allocation, fixed):
        for rollout_tp in _rollout_sizes(work, layout, allocation, fixed):
            yield from _options(work, layout, rollout_tp, allocation, fixed)


def _options(
    work: Workload, layout: Layout, rollout_tp: int, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """What can be kept, recomputed or put away under a layout: first all kept, the fastest.

    Larger micro-batches never cost more without a pipeline, and nothing is cheaper than to keep
    all; what follows one that fits is left out then. Smaller ones never need more memory: where
    the smallest don't fit, they stand for all.
    """

    def of(tokens: int, offload: tuple[bool, bool], recompute: bool) -> PricedCandidate:
        candidate = Candidate(
            layout,
            rollout_tp,
            tokens,
            *offload,
            activation_checkpointing=recompute,
            sequence_parallel=fixed.sequence_parallel,
        )
        return PricedCandidate(work, candidate, allocation)

    budgets = _budgets(work, layout, fixed)
    recomputes = (True,) if fixed.activation_checkpointing else (False, True)
    for number, (offload, recompute) in enumerate(
        product(_offloads(layout, allocation, fixed), recomputes)
    ):
        smallest = of(budgets[-1], offload, recompute)
        if not smallest.fits:
            if number == 0 and len(budgets) > 1:
                yield of(budgets[0], offload, recompute)
            yield smallest
            continue
        for tokens in budgets:
            one = of(tokens, offload, recompute)
            yield one
            if one.fits and layout.pp == 1:
                if tokens >= BUDGET and not (recompute or any(offload)):
                    return
                break


def _layouts(work: Workload, allocation: Allocation, fixed: FixedSettings) -> Iterator[Layout]:
    for sizes in _products(allocation.ranks, len(AXES)):
        layout = Layout(**dict(zip(AXES, sizes, strict=True)))
        if any(getattr(layout, axis) != size for axis, size in fixed.axes.items()):
            continue
        if _takes(work, layout, allocation, fixed):
            yield layout


def _takes(work: Workload, layout: Layout, allocation: Allocation, fixed: FixedSettings) -> bool:
    """Whether the model can be sharded so, and it may pay."""
    cut, chatty = layout.tp * layout.pp, layout.tp * layout.sp
    if (cut > 1 and not work.families) or (layout.sp > 1 and not work.cuts_sequences):
        return False
    if layout.data_ranks > work.rows:
        return False
    # What talks in every layer stays on a machine, unless the user says otherwise.
    if chatty > allocation.per_machine and not {"tp", "sp"} & set(fixed.axes):
        return False
    try:
        check_layout(layout, allocation.ranks, work.shape)
    except ConfigError:
        return False
    return not isinstance(work.critic, Layout) or work.critic.world_size == layout.world_size


def _rollout_sizes(
    work: Workload, layout: Layout, allocation: Allocation, fixed: FixedSettings
) -> Iterator[int]:
    """Sizes of the groups of ranks that decode together."""
    if work.runs_ahead:  # the trainer's own rollout validates only
        wanted = [layout.tp]
    elif fixed.rollout_tp:
        wanted = [fixed.rollout_tp]
    elif work.adapters or work.kv_cache or not work.decodes or not work.decodes_shards:
        wanted = [1]  # adapters are decoded whole, and other engines by one process a rank
    else:
        wanted = [
            n for n in range(1, allocation.per_machine + 1) if allocation.per_machine % n == 0
        ]
    shape = work.shape
    for tp in wanted:
        if (
            allocation.ranks % tp
            or shape.heads % tp
            or shape.kv_heads % tp
            or shape.intermediate % tp
        ):
            continue
        try:
            rollout_layout(layout, tp=tp)
        except ConfigError:
            continue
        yield tp


def _offloads(
    layout: Layout, allocation: Allocation, fixed: FixedSettings
) -> list[tuple[bool, bool]]:
    """Pairs of offload_params and offload_optimizer. Without a GPU there is nowhere to go."""
    if not allocation.gpus:
        return [(fixed.offload_params, fixed.offload_optimizer)]
    sharded = layout.fsdp * layout.sp > 1
    every = [(False, False), (False, True), *([(True, True)] if sharded else [])]
    wanted = (fixed.offload_params, fixed.offload_optimizer)
    return [pair for pair in every if pair[0] >= wanted[0] and pair[1] >= wanted[1]]


def _budgets(work: Workload, layout: Layout, fixed: FixedSettings) -> list[int]:
    """Tokens of a micro-batch: halves of the largest, down to one row; each makes a difference."""
    if fixed.tokens:
        return [fixed.tokens]
    most = -(-work.rows // layout.data_ranks) * work.length
    sizes = [BUDGET]
    while sizes[-1] > max(64, work.length):
        sizes.append(max(sizes[-1] // 2, 64))
    return [BUDGET, *(size for size in sizes[1:] if size < most)]


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _products(number // factor, count - 1):
                yield (factor, *rest)
