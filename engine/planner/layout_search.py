"""The search for a layout: every one that can run is priced, and those that fit are ranked.

The search is pure: the same workload, machines and settings give the same plan. `refusal` says what
else the trainer refuses. Prices are in `memory` and `cost`, the words in `explain`.

In the modes that run ahead (`search_apart`) some GPUs decode and the others compute. A step then
takes as long as the slower of the two: samplers take new weights and decode a step's completions,
while the trainer's ranks compute, and hand their weights out. More samplers decode faster and leave
fewer ranks, so the cheapest split is where both take about as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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

BUDGET = 16384  # tokens of a micro-batch, at most: what the settings start from


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate on a part of the cluster. Most are too large, and are never priced."""

    work: Workload = field(repr=False)
    candidate: Candidate
    allocation: Allocation

    @cached_property
    def memory(self) -> Memory:
        """Return the memory that a rank needs."""
        allocation = self.allocation
        memory = allocation.memory if allocation.gpus else 0
        return estimate(self.work, self.candidate, gpu=memory > 0, there=memory)

    @cached_property
    def price(self) -> Price:
        """Return what a step costs."""
        return price(self.work, self.candidate, self.allocation)

    @property
    def fits(self) -> bool:
        """Tell whether each rank's device and machine hold it."""
        return self.excess_bytes <= 0

    @cached_property
    def excess_bytes(self) -> float:
        """Return the bytes that a rank lacks on the device or its machine; at most 0 if it fits."""
        host = self.memory.host - usable_bytes(self.allocation.host_memory)
        return max(self.memory.peak - usable_bytes(self.allocation.memory), host)

    @property
    def lacks(self) -> str:
        """Return the phase, or machine, that lacks memory; empty where the candidate fits."""
        if self.fits:
            return ""
        on_machine = self.memory.host - usable_bytes(self.allocation.host_memory)
        return "the machine's memory" if on_machine == self.excess_bytes else self.memory.when

    @property
    def order(self) -> tuple[float | int, ...]:
        """Return a key that sorts by price, then larger micro-batches first, then the plainest."""
        c, price = self.candidate, self.price
        flags = c.offload_params + c.offload_optimizer + c.activation_checkpointing
        return price.total, price.trainer, -c.tokens, flags, c.rollout_tp, *c.layout.sizes.values()


def _options(
    work: Workload, layout: Layout, rollout_tp: int, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """Yield the memory options of a layout: what is kept, recomputed or offloaded, fastest first.

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
            priced = of(tokens, offload, recompute)
            yield priced
            if priced.fits and layout.pp == 1:
                if tokens >= BUDGET and not (recompute or any(offload)):
                    return
                break


def candidates(
    work: Workload, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """Yield those on the ranks of `allocation`, whether they fit or not."""
    for degrees in _products(allocation.ranks, len(AXES)):
        layout = Layout(**dict(zip(AXES, degrees, strict=True)))
        if _takes(work, layout, allocation, fixed):
            for rollout_tp in _rollout_sizes(work, layout, allocation, fixed):
                yield from _options(work, layout, rollout_tp, allocation, fixed)


def _takes(work: Workload, layout: Layout, allocation: Allocation, fixed: FixedSettings) -> bool:
    """Tell whether the model can be sharded so, and it may pay."""
    if any(getattr(layout, axis) != size for axis, size in fixed.axes.items()):
        return False
    if layout.tp * layout.pp > 1 and not work.families:
        return False
    if layout.data_ranks > work.rows or (layout.sp > 1 and not work.cuts_sequences):
        return False
    # What talks in every layer stays on a machine, unless the user says otherwise.
    if layout.tp * layout.sp > allocation.per_machine and not {"tp", "sp"} & set(fixed.axes):
        return False
    try:
        check_layout(layout, allocation.ranks, work.shape)
    except ConfigError:
        return False
    return not isinstance(work.critic, Layout) or work.critic.world_size == layout.world_size


def _rollout_sizes(
    work: Workload, layout: Layout, allocation: Allocation, fixed: FixedSettings
) -> Iterator[int]:
    """Yield sizes of the groups of ranks that decode together."""
    shape, per_machine = work.shape, allocation.per_machine
    if work.runs_ahead:  # the trainer's own rollout validates only
        sizes = [layout.tp]
    elif fixed.rollout_tp:
        sizes = [fixed.rollout_tp]
    elif work.adapters or work.kv_cache or not work.decodes or not work.decodes_shards:
        sizes = [1]  # adapters are decoded whole, and other engines by one process a rank
    else:
        sizes = [n for n in range(1, per_machine + 1) if per_machine % n == 0]
    for tp in sizes:
        counts = (allocation.ranks, shape.heads, shape.kv_heads, shape.intermediate)
        if not any(count % tp for count in counts):
            with suppress(ConfigError):
                rollout_layout(layout, tp=tp)
                yield tp


def _offloads(
    layout: Layout, allocation: Allocation, fixed: FixedSettings
) -> list[tuple[bool, bool]]:
    """Return pairs of offload_params and offload_optimizer; without a GPU nothing can move."""
    params, optimizer = fixed.offload_params, fixed.offload_optimizer
    if not allocation.gpus:
        return [(params, optimizer)]
    sharded = layout.fsdp * layout.sp > 1
    pairs = [(False, False), (False, True), *([(True, True)] if sharded else [])]
    return [pair for pair in pairs if pair[0] >= params and pair[1] >= optimizer]


def _budgets(work: Workload, layout: Layout, fixed: FixedSettings) -> list[int]:
    """Return tokens of a micro-batch: halves of the largest, down to one row, that differ."""
    if fixed.tokens:
        return [fixed.tokens]
    all_tokens = -(-work.rows // layout.data_ranks) * work.length
    sizes = [BUDGET]
    while sizes[-1] > max(64, work.length):
        sizes.append(max(sizes[-1] // 2, 64))
    return [BUDGET, *(size for size in sizes[1:] if size < all_tokens)]


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `number` as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            for rest in _products(number // factor, count - 1):
                yield (factor, *rest)


RUNNERS_UP = 8  # other layouts that a plan lists
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
    """The chosen layout, and the others."""

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
    ranked = sorted((priced for priced in valid if priced.fits), key=lambda priced: priced.order)
    listed = _first(ranked, refusal, refused)
    if not listed:
        smallest = sorted(
            (priced for priced in valid if not priced.fits), key=lambda priced: priced.excess_bytes
        )
        raise _nothing(_first(smallest, refusal, refused, 1), refused, cluster, fixed)
    best = listed[0]
    memory = best.allocation.memory
    # A process that only decodes has a GPU of its own.
    on_gpu = work.samplers and work.decodes and best.allocation.gpus and not work.ahead
    if on_gpu and not fits(need := sampler(work), memory):
        raise PlacementError(
            f"a process that only decodes needs {need / USABLE / GIB + RUNTIME / GIB:.2f} GiB, and "
            f"a GPU has {memory / GIB:.2f} GiB; set trainer.mode=sync, whose rollout is sharded, "
            "or rollout.dtype=bfloat16"
        )
    fastest: dict[object, PricedCandidate] = {}  # options of each layout and rollout: the first
    for priced in valid:
        fastest.setdefault(
            (priced.candidate.layout, priced.candidate.rollout_tp, priced.allocation), priced
        )
    cheaper = [
        priced
        for priced in fastest.values()
        if not priced.fits
        and priced.price.total < best.price.total
        and priced.candidate.layout != best.candidate.layout
    ]
    return PlacementPlan(
        chosen=best,
        others=tuple(listed[1:]),
        too_large=tuple(_first(sorted(cheaper, key=lambda priced: priced.order), refusal, [], 2)),
        cluster=cluster,
        considered=len(valid),
        fitting=len(ranked),
        lacking=Counter(priced.lacks for priced in valid if not priced.fits),
        fixed=fixed,
    )


def _first(
    ranked: list[PricedCandidate], refusal: Refusal, refused: list[str], count: int = RUNNERS_UP
) -> list[PricedCandidate]:
    """Return the first `count` that the trainer takes, each layout and rollout once."""
    first: dict[tuple[Layout, int], PricedCandidate] = {}
    reasons: dict[tuple[Layout, int], str] = {}
    for priced in ranked:
        key = (priced.candidate.layout, priced.candidate.rollout_tp)
        if key not in reasons:
            reasons[key] = refusal(priced.candidate, priced.allocation)
            if not reasons[key]:
                first[key] = priced
        if len(first) == count:
            break
    refused += filter(None, reasons.values())
    return list(first.values())


def _nothing(
    smallest: list[PricedCandidate], refused: list[str], cluster: Cluster, fixed: FixedSettings
) -> ConfigError | PlacementError:
    """Return the error that says why there is no plan."""
    on_what = f"on {cluster}" + (f" with {fixed}" if str(fixed) else "")
    if not smallest:
        why = f": {refused[0]}" if refused else "; set fewer of them, or other ones"
        return ConfigError(f"trainer.placement=auto finds no valid layout {on_what}{why}")
    closest = smallest[0]
    work, when, on_host = closest.work, closest.memory.when, closest.lacks not in _SMALLER
    allocation = closest.allocation
    where = "machine" if on_host or not allocation.gpus else "device"
    limit = allocation.host_memory if on_host else allocation.memory
    need = limit + closest.excess_bytes / USABLE
    smaller = _SMALLER[when]
    if work.quantized:
        smaller += "; the base of model.lora.quantize is whole on each rank"
    if when == "rollout" and work.memory_share and not work.runs_ahead:
        smaller = f"lower rollout.vllm.gpu_memory_utilization={work.memory_share}"
    return PlacementError(
        f"trainer.placement=auto finds no layout that fits {on_what}: the smallest, "
        f"{closest.candidate}, needs {need / GIB:.2f} GiB of {where} memory a rank and there are "
        f"{limit / GIB:.2f} GiB, {(need - limit) / GIB:.2f} GiB too few, most in {when}; add "
        f"workers or larger ones, or {smaller}"
    )


Plan = Callable[[Workload, Cluster], PlacementPlan]  # of the trainer's ranks


@dataclass(frozen=True, slots=True)
class SamplerChoices:
    """The samplers that the settings allow."""

    counts: Sequence[int] | None = None  # of samplers; None: any
    sizes: Sequence[int] = (1,)  # GPUs of one


def search_apart(
    work: Workload, cluster: Cluster, choices: SamplerChoices, plan: Plan
) -> PlacementPlan:
    """Return the cheapest split of `cluster`'s GPUs: the plan of what computes, and other splits.

    `plan` searches the layouts of the trainer on what is left. Raises PlacementError where no
    sampler fits, or no trainer beside one.
    """
    splits = _fastest(work, cluster, choices)
    if not splits:
        raise _too_large(work, cluster, choices)
    plans: dict[int, PlacementPlan | EngineError] = {}

    def at(index: int) -> PlacementPlan | EngineError:
        if index not in plans:
            samplers = splits[index]
            try:
                left = cluster.less_gpus(samplers.gpus)
                plans[index] = plan(replace(work, ahead=samplers), left)
            except (ConfigError, PlacementError) as error:  # of what is left
                plans[index] = error
        return plans[index]

    low, high = 0, len(splits) - 1  # the first split whose samplers are not the slower ones
    while low < high:
        middle = (low + high) // 2
        result = at(middle)
        price = result.chosen.price if isinstance(result, PlacementPlan) else None
        decodes_longer = price is not None and price.ahead > price.trainer
        low, high = (middle + 1, high) if decodes_longer else (low, middle)
    for index in (low, max(0, low - 1)):
        at(index)
    good = {i: result for i, result in plans.items() if isinstance(result, PlacementPlan)}
    if not good:
        first = at(0)
        assert isinstance(first, EngineError)
        raise first
    order = sorted(good, key=lambda index: good[index].chosen.price.total)
    chosen = [(splits[index], good[index].chosen) for index in order]
    priced_splits = tuple(
        Split(priced.allocation.ranks, samplers, priced.price.trainer, priced.price.ahead)
        for samplers, priced in chosen
    )
    return replace(good[order[0]], splits=priced_splits)


def _fastest(work: Workload, cluster: Cluster, choices: SamplerChoices) -> list[Samplers]:
    """Return, for each number of GPUs that may decode, the fastest samplers; fewest GPUs first."""
    best: dict[int, Samplers] = {}
    available = cluster.gpus - 1  # the trainer gets one
    for tp in choices.sizes:
        number = available // tp
        worth_a_look: Iterable[int] = range(1, number + 1)
        if number > 16:
            powers = {1 << power for power in range(number.bit_length())}
            worth_a_look = sorted(powers | set(range(0, number + 1, 8)))
        for count in choices.counts or worth_a_look:
            if not 0 < count * tp <= available:
                continue
            samplers = priced_samplers(work, cluster, count, tp)
            if samplers is None:
                continue
            known = best.get(samplers.gpus)
            if known is None or samplers.seconds < known.seconds:
                best[samplers.gpus] = samplers
    faster: list[Samplers] = []
    for gpus in sorted(best):  # one that is no faster than fewer GPUs is no choice
        if not faster or best[gpus].seconds < faster[-1].seconds:
            faster.append(best[gpus])
    return faster


def priced_samplers(work: Workload, cluster: Cluster, count: int, tp: int) -> Samplers | None:
    """Return samplers and what they take of a step; None where the model doesn't go on them."""
    shape, machines = work.shape, [machine for machine in cluster.machines if machine.gpus]
    gpus_a_machine = max(machine.gpus for machine in machines)
    if tp > gpus_a_machine or shape.heads % tp or shape.intermediate % tp:
        return None
    candidate = Candidate(Layout(dp=count * tp), rollout_tp=tp)
    gpu_memory = min(machine.gpu_memory for machine in machines)
    decoding, need = _decoding(work, candidate)
    if not fits(need, gpu_memory) or need > (work.memory_share or 1.0) * gpu_memory:
        return None
    devices = (resources.gpu(m.accelerator, cluster.kinds) for m in machines)
    device = min(devices, key=lambda device: device.bandwidth)
    allocation = Allocation(count * tp, gpus_a_machine, 1.0, 0, 0, device, 1.0)
    weights = sizes(shape).total * decoding.weight_bytes
    way = HOST_LINK if len(cluster.machines) == 1 else device.network
    taking = weights / way + weights / tp / HOST_LINK
    seconds = rollout_seconds(decoding, candidate, allocation) + taking
    return Samplers(count, tp, seconds, weights / HOST_LINK)


def _decoding(work: Workload, candidate: Candidate) -> tuple[Workload, float]:
    """Return the work of processes that only decode, and its bytes on one GPU of a sampler."""
    size, tp = work.sampler_bytes, candidate.rollout_tp
    decoding = replace(work, weight_bytes=size, compute_bytes=size, runs_ahead=False)
    # An engine with a share of the memory has cache in what is left, and queues what it can't hold.
    cache = row_cache(decoding, tp) if decoding.memory_share else kv_cache(decoding, candidate)
    return decoding, sizes(decoding.shape).total * size / tp + cache


def _too_large(work: Workload, cluster: Cluster, choices: SamplerChoices) -> PlacementError:
    tp, count = max(choices.sizes), (choices.counts or [max(1, cluster.gpus // 2)])[0]
    _, need = _decoding(work, Candidate(Layout(dp=count * tp), rollout_tp=tp))
    gpu_memory = min(machine.gpu_memory for machine in cluster.machines if machine.gpus)
    if work.memory_share:
        why = (
            f"{need / GIB:.2f} GiB on each of {tp} GPU(s) for its weights and a row, and "
            f"rollout.vllm.gpu_memory_utilization={work.memory_share} of a GPU is "
            f"{work.memory_share * gpu_memory / GIB:.2f} GiB; raise it, give a sampler more GPUs "
            "(rollout.vllm.in_process=false, rollout.tensor_parallel_size), or"
        )
    else:
        why = (
            f"{need / USABLE / GIB + RUNTIME / GIB:.2f} GiB on each of {tp} GPU(s), and a GPU has "
            f"{gpu_memory / GIB:.2f} GiB; lower rollout.max_num_seqs, set rollout.dtype=bfloat16, "
            "or rollout.engine=vllm with rollout.vllm.in_process=false, whose samplers take "
            "several GPUs; or"
        )
    return PlacementError(
        f"trainer.placement=auto finds no GPUs for processes that only decode on {cluster}: one "
        f"needs {why} set trainer.mode=sync, whose rollout is sharded"
    )
