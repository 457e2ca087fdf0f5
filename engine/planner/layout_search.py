"""The search for a layout: every one that can run is priced, and those that fit are ranked.

Also placements of roles in the modes that run ahead. Prices are in `memory` and `cost`, the
words in `explain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from engine.errors import ConfigError, EngineError, PlacementError
from engine.parallel.layout import AXES, Layout, check_layout, rollout_layout
from engine.planner import resources
from engine.planner.cost import Price, price, rollout_seconds
from engine.planner.memory import (
    RUNTIME,
    USABLE,
    Memory,
    estimate,
    fits,
    kv_cache,
    row_cache,
    sampler,
    sizes,
    usable_bytes,
)
from engine.planner.resources import GIB, HOST_LINK, Allocation, Cluster
from engine.planner.sizes import Candidate, FixedSettings, Samplers, Workload

# Every layout that the model and the machines take, with what can be kept, recomputed or put away.
#
# `search` chooses among them.

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
    for degrees in _products(allocation.ranks, len(AXES)):
        layout = Layout(**dict(zip(AXES, degrees, strict=True)))
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


# Which layout: every one that the model and the machines take, priced; those that fit, ranked.
#
# Pure: the same workload, machines and settings give the same plan. What else the trainer refuses
# is
# given as `refusal`.

KEPT = 8  # runners-up that a plan lists
_SMALLER = {  # what makes a peak smaller
    "training": "shorten data.max_response_length, or set model.lora.rank",
    "rollout": "lower rollout.max_num_seqs",
    "loading": "store the weights in bfloat16 (model.dtype)",
}
Refusal = Callable[[Candidate, Allocation], str]  # why the trainer refuses it; empty: it doesn't


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs that compute, those that decode meanwhile, and the seconds of both."""

    ranks: int
    samplers: Samplers
    computes: float
    decodes: float


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """What was chosen, and what else there was."""

    chosen: PricedCandidate
    others: tuple[PricedCandidate, ...]  # the next ones that fit, a layout once, cheapest first
    too_large: tuple[PricedCandidate, ...]  # cheaper ones that don't fit, if any, a layout once
    cluster: Cluster
    considered: int
    fitting: int
    lacking: Mapping[str, int]  # how many that don't fit lack memory in what
    fixed: FixedSettings
    splits: tuple[Split, ...] = ()  # of the GPUs by role, the chosen one first
    together: float | None = None  # seconds of a step whose roles take turns on all GPUs


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
        valid += candidates(work, allocation, fixed)
    ranked = sorted((one for one in valid if one.fits), key=lambda one: one.order)
    listed = _first(ranked, refusal, refused)
    if not listed:
        smallest = sorted((one for one in valid if not one.fits), key=lambda one: one.excess_bytes)
        raise _nothing(_first(smallest, refusal, refused, 1), refused, cluster, fixed)
    _check_sampler(work, listed[0])
    best = listed[0]
    cheaper = [
        one
        for one in _plainest(valid)
        if not one.fits
        and one.price.total < best.price.total
        and one.candidate.layout != best.candidate.layout
    ]
    too_large = _first(sorted(cheaper, key=lambda one: one.order), refusal, [], 2)
    lacking = Counter(one.lacks for one in valid if not one.fits)
    return PlacementPlan(
        best,
        tuple(listed[1:]),
        tuple(too_large),
        cluster,
        len(valid),
        len(ranked),
        lacking,
        fixed,
    )


def _plainest(valid: list[PricedCandidate]) -> list[PricedCandidate]:
    """The fastest option of each layout and rollout, which is the first."""
    found: dict[object, PricedCandidate] = {}
    for one in valid:
        key = (one.candidate.layout, one.candidate.rollout_tp, one.allocation)
        found.setdefault(key, one)
    return list(found.values())


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
    on_host = one.lacks not in _SMALLER
    where = "machine" if on_host or not one.allocation.gpus else "device"
    there = one.allocation.host_memory if on_host else one.allocation.memory
    need = there + one.excess_bytes / USABLE
    smaller = _SMALLER[one.memory.when]
    if one.work.quantized:
        smaller += "; the base of model.lora.quantize is whole on each rank"
    if one.memory.when == "rollout" and one.work.memory_share and not one.work.runs_ahead:
        smaller = f"lower rollout.vllm.gpu_memory_utilization={one.work.memory_share}"
    return PlacementError(
        f"trainer.placement=auto finds no layout that fits on {cluster}{with_fixed}: the smallest, "
        f"{one.candidate}, needs {need / GIB:.2f} GiB of {where} memory a rank "
        f"and there are {there / GIB:.2f} GiB, {(need - there) / GIB:.2f} GiB too few, "
        f"most in {one.memory.when}; add workers or larger ones, or {smaller}"
    )


def _check_sampler(work: Workload, chosen: PricedCandidate) -> None:
    """A process that only decodes has a GPU of its own."""
    if work.ahead or not (work.samplers and work.decodes and chosen.allocation.gpus):
        return
    need = sampler(work)
    if not fits(need, chosen.allocation.memory):
        raise PlacementError(
            f"a process that only decodes needs {need / USABLE / GIB + RUNTIME / GIB:.2f} GiB, and "
            f"a GPU has {chosen.allocation.memory / GIB:.2f} GiB; set trainer.mode=sync, whose "
            "rollout is sharded, or rollout.dtype=bfloat16"
        )


# Placements of roles in the modes that run ahead: so many GPUs decode, the others compute.
#
# A step then takes as long as the slower of the two: the samplers take new weights and decode a
# step's completions, while the trainer's ranks compute, and hand their weights out. More samplers
# decode faster and leave fewer ranks, so the cheapest split is where both take about as long.

_FEW = 16  # GPUs up to which every split is looked at
Plan = Callable[[Workload, Cluster], PlacementPlan]  # of the trainer's ranks


@dataclass(frozen=True, slots=True)
class SamplerChoices:
    """What the settings leave open."""

    counts: Sequence[int] | None = None  # of samplers; None: any
    sizes: Sequence[int] = (1,)  # GPUs of one


def search_apart(
    work: Workload, cluster: Cluster, choices: SamplerChoices, plan: Plan
) -> PlacementPlan:
    """The cheapest split of `cluster`'s GPUs, with the plan of what computes and the next splits.

    `plan` searches the layouts of the trainer on what is left. Raises PlacementError where no
    sampler fits, or no trainer beside one.
    """
    found = _fastest(work, cluster, choices)
    if not found:
        raise _too_large(work, cluster, choices)
    plans: dict[int, PlacementPlan | EngineError] = {}

    def at(index: int) -> PlacementPlan | EngineError:
        if index not in plans:
            samplers = found[index]
            try:
                left = cluster.less_gpus(samplers.gpus)
                plans[index] = plan(replace(work, ahead=samplers), left)
            except (ConfigError, PlacementError) as error:  # of what is left
                plans[index] = error
        return plans[index]

    low, high = 0, len(found) - 1  # the first split whose samplers are not the slower ones
    while low < high:
        middle = (low + high) // 2
        one = at(middle)
        decodes_longer = isinstance(one, PlacementPlan) and _waits(one)
        low, high = (middle + 1, high) if decodes_longer else (low, middle)
    for index in (low, max(0, low - 1)):
        at(index)
    good = [one for one in plans.values() if isinstance(one, PlacementPlan)]
    if not good:
        first = at(0)
        assert isinstance(first, EngineError)
        raise first
    good.sort(key=lambda one: one.chosen.price.total)
    return replace(good[0], splits=tuple(_split(one) for one in good))


def _waits(plan: PlacementPlan) -> bool:
    """Whether the trainer's ranks wait for completions."""
    return plan.chosen.price.ahead > plan.chosen.price.own


def _split(plan: PlacementPlan) -> Split:
    samplers = plan.chosen.work.ahead
    assert samplers is not None
    price = plan.chosen.price
    return Split(plan.chosen.allocation.ranks, samplers, price.own, price.ahead)


def _fastest(work: Workload, cluster: Cluster, choices: SamplerChoices) -> list[Samplers]:
    """For each number of GPUs that may decode, the samplers that do it fastest; fewest first."""
    best: dict[int, Samplers] = {}
    for count, tp in _shapes(cluster, choices):
        one = priced_samplers(work, cluster, count, tp)
        if one is not None and (one.gpus not in best or one.seconds < best[one.gpus].seconds):
            best[one.gpus] = one
    found: list[Samplers] = []
    for gpus in sorted(best):  # one that is no faster than fewer GPUs is no choice
        if not found or best[gpus].seconds < found[-1].seconds:
            found.append(best[gpus])
    return found


def _shapes(cluster: Cluster, choices: SamplerChoices) -> Iterator[tuple[int, int]]:
    """Numbers of samplers and of the GPUs of one, that leave the trainer one."""
    most = cluster.gpus - 1
    for tp in choices.sizes:
        counts: Iterable[int] = choices.counts or _worth_a_look(most // tp)
        yield from ((count, tp) for count in counts if 0 < count * tp <= most)


def _worth_a_look(most: int) -> list[int]:
    if most <= _FEW:
        return list(range(1, most + 1))
    return sorted({1 << power for power in range(most.bit_length())} | set(range(0, most + 1, 8)))


def priced_samplers(work: Workload, cluster: Cluster, count: int, tp: int) -> Samplers | None:
    """Samplers and what they take of a step; None where the model doesn't go on them."""
    shape, machines = work.shape, [machine for machine in cluster.machines if machine.gpus]
    most = max(machine.gpus for machine in machines)
    if tp > most or shape.heads % tp or shape.intermediate % tp:
        return None
    own = _decoding(work)
    candidate = Candidate(Layout(dp=count * tp), rollout_tp=tp)
    there = min(machine.gpu_memory for machine in machines)
    need = _bytes(own, candidate)
    if not fits(need, there) or need > (own.memory_share or 1.0) * there:
        return None
    device = min((resources.gpu(m.accelerator, cluster.kinds) for m in machines), key=_bandwidth)
    allocation = Allocation(count * tp, most, 1.0, 0, 0, device, 1.0)
    weights = sizes(shape).total * own.weight_bytes
    way = HOST_LINK if len(cluster.machines) == 1 else device.network
    taking = weights / way + weights / tp / HOST_LINK
    seconds = rollout_seconds(own, candidate, allocation) + taking
    return Samplers(count, tp, seconds, weights / HOST_LINK)


def _decoding(work: Workload) -> Workload:
    """The work of processes that only decode."""
    size = work.sampler_bytes
    return replace(work, weight_bytes=size, compute_bytes=size, runs_ahead=False)


def _bytes(own: Workload, candidate: Candidate) -> float:
    """On one GPU of a sampler."""
    weights, tp = sizes(own.shape).total * own.weight_bytes, candidate.rollout_tp
    # An engine with a share of the memory has cache in what is left, and queues what it can't hold.
    cache = row_cache(own, tp) if own.memory_share else kv_cache(own, candidate)
    return weights / tp + cache


def _bandwidth(device: resources.Device) -> float:
    return device.bandwidth


def _too_large(work: Workload, cluster: Cluster, choices: SamplerChoices) -> PlacementError:
    tp, count = max(choices.sizes), (choices.counts or [max(1, cluster.gpus // 2)])[0]
    need = _bytes(_decoding(work), Candidate(Layout(dp=count * tp), rollout_tp=tp))
    there = min(machine.gpu_memory for machine in cluster.machines if machine.gpus)
    if work.memory_share:
        return PlacementError(
            f"trainer.placement=auto finds no GPUs for processes that only decode on {cluster}: "
            f"one needs {need / GIB:.2f} GiB on each of {tp} GPU(s) for its weights and a row, and "
            f"rollout.vllm.gpu_memory_utilization={work.memory_share} of a GPU is "
            f"{work.memory_share * there / GIB:.2f} GiB; raise it, give a sampler more GPUs "
            "(rollout.vllm.in_process=false, rollout.tensor_parallel_size), or set "
            "trainer.mode=sync, whose rollout is sharded"
        )
    return PlacementError(
        f"trainer.placement=auto finds no GPUs for processes that only decode on {cluster}: one "
        f"needs {need / USABLE / GIB + RUNTIME / GIB:.2f} GiB on each of {tp} GPU(s), and a GPU "
        f"has {there / GIB:.2f} GiB; lower rollout.max_num_seqs, set rollout.dtype=bfloat16, or "
        "rollout.engine=vllm with rollout.vllm.in_process=false, whose samplers take several "
        "GPUs; or set trainer.mode=sync, whose rollout is sharded"
    )
