"""Placements of roles in the modes that run ahead: so many GPUs decode, the others compute.

A step then takes as long as the slower of the two: the samplers take new weights and decode a
step's completions, while the trainer's ranks compute, and hand their weights out. More samplers
decode faster and leave fewer ranks, so the cheapest split is where both take about as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.errors import ConfigError, EngineError, PlacementError
from engine.parallel.layout import Layout
from engine.planner import hardware
from engine.planner.cost import rollout_seconds
from engine.planner.hardware import GIB, HOST_LINK
from engine.planner.memory import RUNTIME, USABLE, fits, kv_cache, row_cache, sizes
from engine.planner.resources import Allocation, Cluster
from engine.planner.search import PlacementPlan, Split
from engine.planner.workload import Candidate, Samplers, Workload

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
    device = min((hardware.gpu(m.accelerator, cluster.kinds) for m in machines), key=_bandwidth)
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


def _bandwidth(device: hardware.Device) -> float:
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
