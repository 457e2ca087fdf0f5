"""Which layout: every one that the model and the machines take, priced; those that fit, ranked.

Pure: the same workload, machines and settings give the same plan. What else the trainer refuses is
given as `refusal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from engine.errors import ConfigError, PlacementError
from engine.parallel.layout import AXES, Layout, check_layout
from engine.parallel.rollout_layout import rollout_layout
from engine.planner.cost import Price, price
from engine.planner.hardware import GIB
from engine.planner.memory import RUNTIME, USABLE, Memory, estimate, fits, sampler, usable_bytes
from engine.planner.resources import Allocation, Cluster
from engine.planner.workload import Candidate, FixedSettings, Workload

BUDGET = 16384  # tokens of a micro-batch, at most: what the settings start from
KEPT = 8  # runners-up that a plan lists
_SMALLER = {  # what makes a peak smaller
    "training": "shorten data.max_response_length, or set model.lora.rank",
    "rollout": "lower rollout.max_num_seqs",
    "loading": "store the weights in bfloat16 (model.dtype)",
}
Refusal = Callable[[Candidate, Allocation], str]  # why the trainer refuses it; empty: it doesn't


@dataclass(frozen=True, slots=True)
class PricedCandidate:
    """A candidate on a part of the cluster."""

    candidate: Candidate
    allocation: Allocation
    memory: Memory
    price: Price

    @property
    def fits(self) -> bool:
        """Whether each rank's device and machine hold it."""
        return self.excess_bytes <= 0

    @property
    def excess_bytes(self) -> float:
        """Bytes that a rank needs beyond what there is, on the device or its machine."""
        host = self.memory.host - usable_bytes(self.allocation.host_memory)
        return max(self.memory.peak - usable_bytes(self.allocation.memory), host)

    @property
    def order(self) -> tuple[float | int, ...]:
        """Cheapest first; of equals the one with larger micro-batches, then the plainest."""
        c = self.candidate
        flags = c.offload_params + c.offload_optimizer + c.activation_checkpointing
        return (self.price.total, -c.tokens, flags, c.rollout_tp, *c.layout.sizes.values())


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What was chosen, and what else there was."""

    chosen: PricedCandidate
    others: tuple[PricedCandidate, ...]  # the next ones that fit, a layout once, cheapest first
    too_large: tuple[PricedCandidate, ...]  # cheaper ones that don't fit, if any, a layout once
    cluster: Cluster
    considered: int
    fitting: int
    fixed: FixedSettings


def search(
    work: Workload,
    cluster: Cluster,
    fixed: FixedSettings | None = None,
    refusal: Refusal = lambda candidate, allocation: "",
    reserved_cpus: float = 0.0,
) -> PlacementPlan:
    """Return the cheapest way to run `work` on `cluster` that fits, and the next ones.

    `reserved_cpus` of a machine are left to other processes. Raises ConfigError where no layout is
    valid, and PlacementError, with what is missing, where none fits.
    """
    fixed = fixed or FixedSettings()
    refused: list[str] = []
    valid: list[PricedCandidate] = []
    for allocation in cluster.allocations(reserved_cpus):
        for layout in _layouts(work, allocation, fixed):
            for rollout_tp in _rollout_sizes(work, layout, allocation, fixed):
                valid += _options(work, layout, rollout_tp, allocation, fixed)
    ranked = sorted((one for one in valid if one.fits), key=lambda one: one.order)
    listed = _first(ranked, refusal, refused)
    if not listed:
        smallest = sorted((one for one in valid if not one.fits), key=lambda one: one.excess_bytes)
        raise _nothing(_first(smallest, refusal, refused, 1), refused, cluster, fixed)
    _check_sampler(work, listed[0])
    best = listed[0]
    cheaper = [
        one
        for one in valid
        if not one.fits
        and one.price.total < best.price.total
        and one.candidate.layout != best.candidate.layout
    ]
    too_large = _first(sorted(cheaper, key=lambda one: one.order), refusal, [], 2)
    return PlacementPlan(
        listed[0], tuple(listed[1:]), tuple(too_large), cluster, len(valid), len(ranked), fixed
    )


def _options(
    work: Workload, layout: Layout, rollout_tp: int, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """What can be kept, recomputed or put away under a layout, whether it fits or not.

    Larger micro-batches never cost more without a pipeline, and nothing is cheaper than to keep
    all; what follows one that fits is left out then.
    """
    recomputes = (True,) if fixed.activation_checkpointing else (False, True)
    for offload, recompute in product(_offloads(layout, allocation, fixed), recomputes):
        for tokens in _budgets(work, layout, fixed):
            candidate = Candidate(
                layout,
                rollout_tp,
                tokens,
                *offload,
                activation_checkpointing=recompute,
                sequence_parallel=fixed.sequence_parallel,
            )
            memory = estimate(work, candidate, gpu=allocation.gpus > 0)
            one = PricedCandidate(candidate, allocation, memory, price(work, candidate, allocation))
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
    if fixed.rollout_tp:
        wanted = [fixed.rollout_tp]
    elif work.runs_ahead:
        wanted = [layout.tp]
    elif work.adapters or work.kv_cache or not work.decodes or not work.families:
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


def _first(
    ranked: list[PricedCandidate], refusal: Refusal, refused: list[str], count: int = KEPT
) -> list[PricedCandidate]:
    """The first `count` that the trainer takes, each layout and rollout once."""
    found: dict[tuple[Layout, int], PricedCandidate] = {}
    asked: dict[tuple[Layout, int], str] = {}
    for one in ranked:
        key = (one.candidate.layout, one.candidate.rollout_tp)
        if key not in asked:
            asked[key] = refusal(one.candidate, one.allocation)
            refused += [asked[key]] if asked[key] else []
        if not asked[key]:
            found.setdefault(key, one)
        if len(found) == count:
            break
    return list(found.values())


def _nothing(
    smallest: list[PricedCandidate], refused: list[str], cluster: Cluster, fixed: FixedSettings
) -> ConfigError | PlacementError:
    """The error that says why there is no plan."""
    with_fixed = f" with {fixed}" if str(fixed) else ""
    if not smallest:
        why = f": {refused[0]}" if refused else "; set fewer of them, or other ones"
        return ConfigError(
            f"trainer.placement=auto finds no valid layout on {cluster}{with_fixed}{why}"
        )
    one = smallest[0]
    on_host = one.memory.host - usable_bytes(one.allocation.host_memory) == one.excess_bytes
    where = "machine" if on_host or not one.allocation.gpus else "device"
    there = one.allocation.host_memory if on_host else one.allocation.memory
    need = there + one.excess_bytes / USABLE
    return PlacementError(
        f"trainer.placement=auto finds no layout that fits on {cluster}{with_fixed}: the smallest, "
        f"{one.candidate}, needs {need / GIB:.2f} GiB of {where} memory a rank "
        f"and there are {there / GIB:.2f} GiB, {(need - there) / GIB:.2f} GiB too few, "
        f"most in {one.memory.when}; add workers or larger ones, or {_SMALLER[one.memory.when]}"
    )


def _check_sampler(work: Workload, chosen: PricedCandidate) -> None:
    """A process that only decodes has a GPU of its own."""
    if not (work.samplers and chosen.allocation.gpus):
        return
    need = sampler(work)
    if not fits(need, chosen.allocation.memory):
        raise PlacementError(
            f"a process that only decodes needs {need / USABLE / GIB + RUNTIME / GIB:.2f} GiB, and "
            f"a GPU has {chosen.allocation.memory / GIB:.2f} GiB; set trainer.mode=sync, whose "
            "rollout is sharded, or rollout.dtype=bfloat16"
        )
