"""Describe a plan in a few lines: the machines, the choice with its reason, and the others."""

from collections.abc import Sequence

from engine.errors import counted
from engine.planner.layout_search import PlacementPlan, PricedCandidate
from engine.planner.memory import RUNTIME, USABLE
from engine.planner.resources import GIB

SHOWN = 5
_HEADS = (
    *("layout", "ranks", "rollout tp", "tokens", "to save memory", "GiB"),
    *("train s", "move s", "roll s", "lost by"),
)
_LEGEND = (
    "  (*: chosen; x: too large; tokens: of a micro-batch; GiB: of a rank; seconds of a step: "
    "training, what moves between ranks, rollout)"
)


def explain(plan: PlacementPlan, shown: int = SHOWN) -> str:
    """Return the choice, its reason, and a table of the cheapest candidates with their prices.

    Seconds and bytes are the model's (`cost`, `memory`), with every row as long as the longest.
    """
    chosen, allocation = plan.chosen, plan.chosen.allocation
    several = f": {allocation.ranks} ranks on {counted(allocation.machines, 'machine')}"
    pinned = f"; as set: {plan.fixed}" if str(plan.fixed) else ""
    lacking = sorted(plan.lacking.items(), key=lambda item: -item[1])
    too_large = "".join(f", {count} too large in {phase}" for phase, count in lacking)
    why = (
        f"least estimated time, {seconds_text(chosen.price.total)} s a step, of the "
        f"{plan.fitting} that fit "
        f"({plan.considered} considered{too_large})"
    )
    if plan.others:
        ratio = plan.others[0].price.total / chosen.price.total
        why += f"; the next layout takes {ratio:.2f} times as long"
    if plan.too_large:
        faster = plan.too_large[0]
        why += f"; {faster.candidate.layout} would be faster but lacks {_excess(faster)} GiB a rank"
    lines = [
        f"placement: auto found {plan.cluster}",
        f"  chosen  {chosen.candidate}{several if allocation.ranks > 1 else ''}{pinned}",
        f"  memory  {rank_gib(chosen):.2f} of {allocation.memory / GIB:.2f} GiB a rank, most in "
        f"{chosen.memory.when}: {peak_parts(chosen)}"
        + (f"; rollout with {chosen.rollout_memory}" if chosen.rollout_memory else ""),
        f"  why     {why}",
        *_roles(plan),
    ]
    table = _table([chosen, *plan.others[: shown - 1], *plan.too_large])
    return "\n".join([*lines, *table])


def explain_memory(chosen: PricedCandidate, most: PricedCandidate) -> str:
    """Return what was chosen for a GPU whose layout is set, and what `most` would have taken."""
    of = f"of {chosen.allocation.memory / GIB:.1f} GiB a GPU by the planner's estimate"
    line = (
        f"memory: {options_text(chosen)}: {rank_gib(chosen):.1f} {of}, most in {chosen.memory.when}"
    )
    if options_text(most) != options_text(chosen):
        line += f"; {options_text(most)} would take {rank_gib(most):.1f}"
    return line if chosen.fits else f"{line}; {chosen.lacks} lacks memory, and may fail"


def options_text(priced: PricedCandidate) -> str:
    """Return what a plan keeps in memory, and what not."""
    c, rollout = priced.candidate, priced.rollout_memory
    text = f"{c.tokens} tokens a micro-batch, {c.memory_options or 'activations kept'}"
    return f"{text}, rollout with {rollout}" if rollout else text


def _excess(priced: PricedCandidate) -> str:
    return f"{priced.excess_bytes / USABLE / GIB:.2f}"


def _roles(plan: PlacementPlan) -> list[str]:
    """Return which GPUs decode while the others compute, and what else was looked at."""
    if not plan.splits:
        return []
    best, *others = plan.splits
    samplers, price = best.work.ahead, best.price
    ranks = best.allocation.ranks
    gpus, compute = counted(ranks, "GPU"), "computes" if ranks == 1 else "compute"
    decode = "decodes" if samplers and samplers.count == 1 else "decode"
    also = [
        f"{other.allocation.ranks} and {other.work.ahead} {seconds_text(other.price.total)} s"
        for other in others[:SHOWN]
    ]
    if plan.together is not None:
        turns = "taking turns on all GPUs (trainer.mode=sync)"
        also.append(f"{turns} {seconds_text(plan.together)} s")
    return [
        f"  roles   {gpus} {compute} for {seconds_text(price.trainer)} s, "
        f"while {samplers} {decode} for {seconds_text(price.ahead)} s",
        *([f"          instead of that: {'; '.join(also)}"] if also else []),
    ]


def _lost(priced: PricedCandidate, chosen: PricedCandidate) -> str:
    """Return why the chosen one was taken first: what this lacks, or what costs it most time."""
    if priced is chosen:
        return ""
    if not priced.fits:
        return f"{_excess(priced)} GiB in {priced.lacks}"
    pairs = zip(_seconds(priced), _seconds(chosen), ("train", "move", "roll"), strict=True)
    excess, name = max((seconds - best, name) for seconds, best, name in pairs)
    return f"{excess:.2g} s to {name}" if excess > 0 else "equal"


def _seconds(priced: PricedCandidate) -> tuple[float, float, float]:
    """Return seconds of training, of what moves between ranks, and of rollout."""
    price = priced.price
    return price.compute, price.traffic + price.switch, price.rollout + price.ahead


def peak_parts(priced: PricedCandidate) -> str:
    """Return the large parts of a rank's peak, in GiB."""
    memory = priced.memory
    names = {
        "training": ("weights", "gradients", "moments", "activations"),
        "rollout": ("weights", "moments", "rollout", "cache"),
        "loading": ("loading",),
    }
    sizes = {name: getattr(memory, name) / GIB for name in names[memory.when]}
    if memory.when == "training":
        sizes["rollout"] = memory.awake / GIB
    elif memory.when == "rollout":
        sizes["weights"] -= min(memory.away, memory.cache) / GIB
    large = [f"{name} {size:.2f}" for name, size in sizes.items() if size >= 0.005]
    return ", ".join([*large, f"process {RUNTIME / GIB:.2f}"])


def rank_gib(priced: PricedCandidate) -> float:
    """Return what the rank's memory must have for it, in GiB."""
    return (priced.memory.peak / USABLE + RUNTIME) / GIB


def seconds_text(seconds: float) -> str:
    """Return three digits and no exponent of large numbers: `0.0128`, `23.6`, `3,390`."""
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def _table(rows: Sequence[PricedCandidate]) -> list[str]:
    """Return the lines of a table, the chosen candidate first."""
    cells: list[tuple[str, ...]] = [("", *_HEADS)]
    for priced in rows:
        c, mark = priced.candidate, "*" if priced is rows[0] else " " if priced.fits else "x"
        options = c.memory_options or "nothing"
        numbers = (c.layout, priced.allocation.ranks, c.rollout_tp, c.tokens, options)
        seconds = map(seconds_text, _seconds(priced))
        lost = _lost(priced, rows[0])
        cells.append((mark, *map(str, numbers), f"{rank_gib(priced):.2f}", *seconds, lost))
    columns = list(zip(*cells, strict=True))
    for index, column in enumerate(columns):
        justify = str.ljust if index in (1, 5, 10) else str.rjust
        columns[index] = tuple(justify(text, max(map(len, column))) for text in column)
    return [*(f"  {'  '.join(row).rstrip()}" for row in zip(*columns, strict=True)), _LEGEND]
