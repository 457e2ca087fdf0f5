"""Which layout: every one that the model and the machines take, priced; those that fit, ranked.

Pure: the same workload, machines and settings give the same plan. What else the trainer refuses is
given as `refusal`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.errors import ConfigError, PlacementError
from engine.parallel.layout import Layout
from engine.planner.candidates import PricedCandidate, candidates
from engine.planner.hardware import GIB
from engine.planner.memory import RUNTIME, USABLE, fits, sampler
from engine.planner.resources import Allocation, Cluster
from engine.planner.workload import Candidate, FixedSettings, Samplers, Workload

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
