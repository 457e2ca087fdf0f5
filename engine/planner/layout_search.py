"""The search for a layout: every one that can run is priced, and those that fit are ranked.

The search is pure: the same workload, machines and settings give the same plan.

In the modes that run ahead (`search_apart`) some GPUs decode and the others compute. A step then
takes as long as the slower of the two. More samplers decode faster and leave fewer ranks, so the
cheapest split is where both take about as long.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from engine.errors import ConfigError, EngineError, PlacementError, counted
from engine.parallel.layout import AXES, Layout, ModelShape, check_layout, rollout_layout
from engine.planner import resources
from engine.planner.cost import Price, price, rollout_seconds
from engine.planner.memory import RUNTIME, USABLE, Memory, estimate, sampler_need, usable_bytes
from engine.planner.resources import GIB, HOST_LINK, Allocation, Cluster
from engine.planner.sizes import (
    Candidate,
    Checkpointing,
    FixedSettings,
    Samplers,
    Workload,
    decodes_by,
    sizes,
)

BUDGET = 16384  # tokens of a micro-batch, at most: what the settings start from
_SHARES = tuple(n / 20 for n in range(18, 3, -1))  # of a GPU for an engine whose own doesn't fit
_FEWEST_ROWS = 8  # decoded at once


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate on a part of the cluster. Most are too large, and are never priced."""

    work: Workload = field(repr=False)
    candidate: Candidate
    allocation: Allocation

    @cached_property
    def memory(self) -> Memory:
        gpu_memory = self.allocation.memory if self.allocation.gpus else 0
        return estimate(self.work, self.candidate, gpu=gpu_memory > 0, there=gpu_memory)

    @cached_property
    def price(self) -> Price:
        return price(self.work, self.candidate, self.allocation)

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0

    @cached_property
    def excess_bytes(self) -> float:
        """The bytes that a rank lacks on the device or its machine; at most 0 if it fits."""
        usable = usable_bytes(self.allocation.memory)
        return max(self.memory.peak - usable, self._host_excess, self.memory.short or -usable)

    @property
    def _host_excess(self) -> float:
        return self.memory.host - usable_bytes(self.allocation.host_memory)

    @property
    def lacks(self) -> str:
        """The phase, or machine, that lacks memory; empty where the candidate fits."""
        if self.fits:
            return ""
        if self._host_excess == self.excess_bytes:
            return "the machine's memory"
        return "rollout" if self.memory.short == self.excess_bytes else self.memory.when

    @property
    def rollout_memory(self) -> str:
        """What rollout decodes with, in words; empty where another process does."""
        if not self.work.decodes or self.work.runs_ahead:
            return ""
        share = self.work.memory_share
        text = f"{share:g} of the GPU" if share else f"{self.work.decode_rows} rows at once"
        return f"{text}, adapters beside the base" if self.work.shares_base else text

    @property
    def rollout_excess(self) -> float:
        """The bytes that rollout lacks; at most 0 if it fits."""
        memory = self.memory
        return max(memory.sampling - usable_bytes(self.allocation.memory), memory.short)

    @property
    def order(self) -> tuple[float | int, ...]:
        """A key that sorts by price, then larger micro-batches first, then the plainest."""
        c, price = self.candidate, self.price
        flags = c.offload_policy + c.offload_optimizer + bool(c.activation_checkpointing)
        return price.total, price.trainer, -c.tokens, flags, c.rollout_tp, *c.layout.sizes.values()


def _options(
    work: Workload, layout: Layout, rollout_tp: int, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """Yield the memory options of a layout: what is kept, recomputed or offloaded, fastest first.

    Larger micro-batches never cost more without a pipeline, and nothing is cheaper than to keep
    all; what follows one that fits is left out then. Smaller ones never need more memory: where
    the smallest don't fit, they stand for all.
    """

    def of(tokens: int, offload: tuple[bool, bool], recompute: Checkpointing) -> PricedCandidate:
        candidate = replace(
            fixed.options, layout=layout, rollout_tp=rollout_tp, tokens=tokens,
            offload_policy=offload[0], offload_optimizer=offload[1],
            activation_checkpointing=recompute,
        )  # fmt: skip
        best = PricedCandidate(work, candidate, allocation)
        two_fit = best.rollout_excess <= 0 and not work.memory_share  # vLLM has one where it can
        if work.shares_base is None and allocation.gpus and not two_fit:
            best = PricedCandidate(replace(work, shares_base=True), candidate, allocation)
        without_cache = best.memory.sampling - best.memory.cache
        if best.rollout_excess > 0 and without_cache < usable_bytes(allocation.memory):
            for smaller in _smaller_rollouts(best.work, allocation, fixed):
                other = PricedCandidate(smaller, candidate, allocation)
                best = min(best, other, key=lambda priced: max(0.0, priced.rollout_excess))
                if best.rollout_excess <= 0:
                    break
        return best

    budgets = _budgets(work, layout, fixed)
    recomputes: tuple[Checkpointing, ...] = (False, "selective", True)
    if fixed.activation_checkpointing is not None:
        recomputes = (fixed.activation_checkpointing,)
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


def _smaller_rollouts(
    work: Workload, allocation: Allocation, fixed: FixedSettings
) -> Iterator[Workload]:
    """Yield `work` with less for rollout, or more where the engine has a share, of a small GPU."""
    if not allocation.gpus or fixed.rollout_memory or work.kv_cache:
        return
    if work.memory_share:
        yield from (replace(work, memory_share=share) for share in _SHARES)
        return
    while work.decode_rows > _FEWEST_ROWS:
        work = replace(work, decode_rows=work.decode_rows // 2)
        yield work


def fitted(
    work: Workload, candidate: Candidate, allocation: Allocation, fixed: FixedSettings
) -> PricedCandidate | None:
    """Return the fastest memory options of a layout that fit, offloading as set, or the smallest.

    None where the layout can't offload so.
    """
    options = _options(work, candidate.layout, candidate.rollout_tp, allocation, fixed)
    as_set = (p for p in options if p.candidate.offload == fixed.options.offload)
    return min(as_set, key=lambda p: (max(0.0, p.excess_bytes), p.order), default=None)


def candidates(
    work: Workload, allocation: Allocation, fixed: FixedSettings
) -> Iterator[PricedCandidate]:
    """Yield those on the ranks of `allocation`, whether they fit or not."""
    for degrees in _products(allocation.ranks, len(AXES)):
        layout = Layout(*degrees)
        if _takes(work, layout, allocation, fixed):
            for rollout_tp in _rollout_sizes(work, layout, allocation, fixed):
                yield from _options(work, layout, rollout_tp, allocation, fixed)


def _takes(work: Workload, layout: Layout, allocation: Allocation, fixed: FixedSettings) -> bool:
    """Tell whether the model can be sharded so, and it may pay."""
    # What talks in every layer stays on a machine, unless the user says otherwise.
    leaves_machine = layout.tp * layout.sp > allocation.per_machine
    if (
        any(getattr(layout, axis) != size for axis, size in fixed.axes.items())
        or (layout.tp * layout.pp > 1 and not work.families)
        or (layout.sp > 1 and not work.cuts_sequences)
        or layout.data_ranks > work.rows
        or (leaves_machine and not {"tp", "sp"} & set(fixed.axes))
    ):
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
        if allocation.ranks % tp == 0 and decodes_by(shape, tp):
            with suppress(ConfigError):
                rollout_layout(layout, tp=tp)
                yield tp


def _offloads(
    layout: Layout, allocation: Allocation, fixed: FixedSettings
) -> list[tuple[bool, bool]]:
    """Return pairs of offload_policy and offload_optimizer; without a GPU nothing can move."""
    least = fixed.options.offload
    if not allocation.gpus:
        return [least]
    sharded = layout.fsdp * layout.sp > 1
    pairs = [(False, False), (False, True), *([(True, True)] if sharded else [])]
    return [pair for pair in pairs if pair[0] >= least[0] and pair[1] >= least[1]]


def _budgets(work: Workload, layout: Layout, fixed: FixedSettings) -> list[int]:
    """Return tokens of a micro-batch: halves of the largest, down to one row, that differ."""
    if fixed.tokens:
        return [fixed.tokens]
    all_tokens = work.rows_of(layout) * work.length
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
    # With samplers: the best candidate beside each number of them, the chosen one first.
    splits: tuple[PricedCandidate, ...] = ()
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
    fixed, refused = fixed or FixedSettings(), list[str]()
    allocations = cluster.allocations(reserved_cpus)
    valid = [priced for part in allocations for priced in candidates(work, part, fixed)]
    ranked = sorted((priced for priced in valid if priced.fits), key=lambda priced: priced.order)
    too_large = [priced for priced in valid if not priced.fits]
    listed = _first(ranked, refusal, refused)
    if not listed:
        too_large.sort(key=lambda priced: priced.excess_bytes)
        smallest = _first(too_large, refusal, refused, 1)
        error = _nothing(smallest, refused, cluster, fixed, work.shape)
        if fixed.axes:
            with suppress(EngineError):
                free = replace(fixed, axes={})
                next_best = search(work, cluster, free, refusal, reserved_cpus).chosen.candidate
                error = error.with_message(f"{error}; next best, without these: {next_best}")
        raise error
    best = listed[0]
    memory = best.allocation.memory
    # A process that only decodes has a GPU of its own.
    on_gpu = work.samplers and work.decodes and best.allocation.gpus and not work.ahead
    if on_gpu and (need := sampler_need(work)) > usable_bytes(memory):
        raise PlacementError(
            f"a process that only decodes needs {need / USABLE / GIB + RUNTIME / GIB:.2f} GiB, and "
            f"a GPU has {memory / GIB:.2f} GiB; set trainer.mode=sync, whose rollout is sharded, "
            "or rollout.dtype=bfloat16"
        )
    fastest: dict[object, PricedCandidate] = {}  # options of each layout and rollout: the first
    for priced in valid:
        candidate = priced.candidate
        fastest.setdefault((candidate.layout, candidate.rollout_tp, priced.allocation), priced)
    cheaper = [
        priced
        for priced in fastest.values()
        if not priced.fits
        and priced.price.total < best.price.total
        and priced.candidate.layout != best.candidate.layout
    ]
    cheaper.sort(key=lambda priced: priced.order)
    return PlacementPlan(
        chosen=best,
        others=tuple(listed[1:]),
        too_large=tuple(_first(cheaper, refusal, [], 2)),
        cluster=cluster,
        considered=len(valid),
        fitting=len(ranked),
        lacking=Counter(priced.lacks for priced in too_large),
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
    smallest: list[PricedCandidate],
    refused: list[str],
    cluster: Cluster,
    fixed: FixedSettings,
    shape: ModelShape,
) -> ConfigError | PlacementError:
    """Return the error that says why there is no plan."""
    on_what = f"on {cluster}" + (f" with {fixed}" if str(fixed) else "")
    if not smallest:
        try:
            check_layout(set_axes := Layout(**fixed.axes), set_axes.world_size, shape)
        except ConfigError as error:
            refused = [*refused, str(error)]
        why = f": {refused[0]}" if refused else "; set fewer of them, or other ones"
        return ConfigError(f"trainer.placement=auto finds no valid layout {on_what}{why}")
    closest = smallest[0]
    work, on_host = closest.work, closest.lacks not in _SMALLER
    when = closest.memory.when if on_host else closest.lacks
    allocation = closest.allocation
    where = "machine" if on_host or not allocation.gpus else "device"
    limit = allocation.host_memory if on_host else allocation.memory
    need = limit + closest.excess_bytes / USABLE
    smaller = _SMALLER[when]
    if work.quantized:
        smaller += "; the base of model.lora.quantize is whole on each rank"
    elif work.adapters:
        smaller = "set model.lora.quantize=nf4"
    elif when == "rollout" and work.memory_share and fixed.rollout_memory:
        change = "raise" if closest.memory.short else "lower"
        smaller = f"{change} rollout.vllm.gpu_memory_utilization={work.memory_share}"
    return PlacementError(
        f"trainer.placement=auto finds no layout that fits {on_what}: the smallest, "
        f"{closest.candidate}, needs {need / GIB:.2f} GiB of {where} memory a rank and there are "
        f"{limit / GIB:.2f} GiB, {(need - limit) / GIB:.2f} GiB too few, most in {when}; add "
        f"workers or larger ones, or {smaller}"
    )


Plan = Callable[[Workload, Cluster], PlacementPlan]  # of the trainer's ranks


def search_apart(
    work: Workload,
    cluster: Cluster,
    plan: Plan,
    counts: Sequence[int] = (),
    tps: Sequence[int] = (1,),
) -> PlacementPlan:
    """Return the cheapest split of `cluster`'s GPUs: the plan of what computes, and other splits.

    `plan` searches the layouts of the trainer on what is left. `counts` of samplers, empty: any,
    have `tps` GPUs each. Raises PlacementError where no sampler fits, or no trainer beside one.
    """
    samplers = _fastest(work, cluster, counts, tps)
    if not samplers:
        raise _too_large(work, cluster, counts, tps)
    plans: dict[int, PlacementPlan] = {}
    errors: dict[int, EngineError] = {}

    def decode_longer(index: int) -> bool:
        """Plan beside `samplers[index]`; False where the trainer has no layout there."""
        left = cluster.less_gpus(samplers[index].gpus)
        try:
            plans[index] = plan(replace(work, ahead=samplers[index]), left)
        except (ConfigError, PlacementError) as error:
            errors[index] = error
            return False
        price = plans[index].chosen.price
        return price.ahead > price.trainer

    # The first whose samplers are not the slower ones, and the one before.
    first = bisect_left(range(len(samplers) - 1), True, key=lambda i: not decode_longer(i))
    for index in {first, max(0, first - 1)} - plans.keys() - errors.keys():
        decode_longer(index)
    if not plans:
        raise errors[min(errors)]
    best, *others = sorted(plans.values(), key=lambda plan: plan.chosen.price.total)
    return replace(best, splits=(best.chosen, *(other.chosen for other in others)))


def _fastest(
    work: Workload, cluster: Cluster, counts: Sequence[int], tps: Sequence[int]
) -> list[Samplers]:
    """Return, for each number of GPUs that may decode, the fastest samplers; fewest GPUs first."""
    priced: list[Samplers] = []
    available = cluster.gpus - 1  # the trainer gets one
    for tp in tps:
        most = available // tp
        looked_at = (n for n in range(1, most + 1) if most <= 16 or not n % 8 or n.bit_count() == 1)
        for count in counts or looked_at:
            if count <= most and (samplers := priced_samplers(work, cluster, count, tp)):
                priced.append(samplers)
    faster: list[Samplers] = []
    for samplers in sorted(priced, key=lambda samplers: (samplers.gpus, samplers.seconds)):
        if not faster or samplers.seconds < faster[-1].seconds:  # else fewer GPUs are as fast
            faster.append(samplers)
    return faster


def priced_samplers(work: Workload, cluster: Cluster, count: int, tp: int) -> Samplers | None:
    """Return samplers and what they take of a step; None where the model doesn't go on them."""
    shape, machines = work.shape, [machine for machine in cluster.machines if machine.gpus]
    gpus_a_machine = max(machine.gpus for machine in machines)
    if tp > gpus_a_machine or not decodes_by(shape, tp):
        return None
    gpu_memory, need = min(m.gpu_memory for m in machines), sampler_need(work, count, tp)
    if need > min(usable_bytes(gpu_memory), (work.memory_share or 1.0) * gpu_memory):
        return None
    devices = (resources.gpu(m.accelerator, cluster.kinds) for m in machines)
    device = min(devices, key=lambda device: device.bandwidth)
    allocation = Allocation(count * tp, gpus_a_machine, 1.0, 0, 0, device, 1.0)
    size = work.sampler_bytes
    decoding = replace(work, weight_bytes=size, compute_bytes=size, runs_ahead=False)
    candidate = Candidate(Layout(dp=count * tp), rollout_tp=tp)
    weights = sizes(shape).total * size
    way = HOST_LINK if len(cluster.machines) == 1 else device.network
    taking = weights / way + weights / tp / HOST_LINK
    seconds = rollout_seconds(decoding, candidate, allocation) + taking
    return Samplers(count, tp, seconds, weights / HOST_LINK)


def _too_large(
    work: Workload, cluster: Cluster, counts: Sequence[int], tps: Sequence[int]
) -> PlacementError:
    tp, share = max(tps), work.memory_share
    need = sampler_need(work, counts[0] if counts else max(1, cluster.gpus // 2), tp)
    gpu_memory = min(machine.gpu_memory for machine in cluster.machines if machine.gpus)
    there = f"a GPU has {gpu_memory / GIB:.2f} GiB; lower rollout.max_num_seqs"
    if share:
        there = (
            f"rollout.vllm.gpu_memory_utilization={share} of a GPU is "
            f"{share * gpu_memory / GIB:.2f} GiB; raise it"
        )
    else:
        need = need / USABLE + RUNTIME
    return PlacementError(
        f"trainer.placement=auto finds no GPUs for processes that only decode on {cluster}: one "
        f"needs {need / GIB:.2f} GiB on each of {counted(tp, 'GPU')}, and {there}, set "
        "rollout.dtype=bfloat16, give a sampler more GPUs (rollout.engine=vllm with "
        "rollout.vllm.in_process=false), or set trainer.mode=sync, whose rollout is sharded"
    )
