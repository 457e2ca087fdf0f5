"""A plan in a few lines: what there is, what was chosen and why, and what else there was."""

from __future__ import annotations

from collections.abc import Sequence

from engine.planner.layout_search import PlacementPlan, PricedCandidate
from engine.planner.memory import RUNTIME, USABLE
from engine.planner.resources import GIB

SHOWN = 5
_HEADS = (
    *("layout", "ranks", "rollout tp", "tokens", "keeps", "GiB", "train s", "move s", "roll s"),
    "lost by",
)


def explain(plan: PlacementPlan, shown: int = SHOWN) -> str:
    """The choice, its reason, and a table of the cheapest candidates with their prices.

    Seconds and bytes are the model's (`cost`, `memory`), with every row as long as the longest.
    """
    one = plan.chosen
    pinned = f"; as set: {plan.fixed}" if str(plan.fixed) else ""
    lines = [
        f"placement: auto found {plan.cluster}",
        f"  chosen  {one.candidate}{_ranks(one)}{pinned}",
        f"  memory  {_gib(one):.2f} of {one.allocation.memory / GIB:.2f} GiB a rank, most in "
        f"{one.memory.when}: {_parts(one)}",
        f"  why     {_why(plan)}",
        *_roles(plan),
    ]
    rows = [("*", one), *((" ", other) for other in plan.others[: shown - 1])]
    rows += [("-", other) for other in plan.too_large]
    return "\n".join([*lines, *_table(rows)])


def _roles(plan: PlacementPlan) -> list[str]:
    """Which GPUs decode while the others compute, and what else was looked at."""
    if not plan.splits:
        return []
    best, *others = plan.splits
    decode = "decodes" if best.samplers.count == 1 else "decode"
    lines = [
        f"  roles   {best.ranks} GPU(s) compute for {best.computes:.3g} s, while {best.samplers} "
        f"{decode} for {best.decodes:.3g} s"
    ]
    also = [
        f"{one.ranks} and {one.samplers} {max(one.computes, one.decodes):.3g} s"
        for one in others[:SHOWN]
    ]
    if plan.together is not None:
        also.append(f"taking turns on all GPUs (trainer.mode=sync) {plan.together:.3g} s")
    return lines + ([f"          instead of that: {'; '.join(also)}"] if also else [])


def _ranks(one: PricedCandidate) -> str:
    count = one.allocation.ranks
    return "" if count == 1 else f": {count} ranks on {one.allocation.machines} machine(s)"


def _why(plan: PlacementPlan) -> str:
    one, cheaper = plan.chosen, plan.too_large
    text = f"least estimated time, {one.price.total:.3g} s a step, of the {plan.fitting} that fit"
    text += f" ({plan.considered} considered{_lacking(plan)})"
    if plan.others:
        ratio = plan.others[0].price.total / one.price.total
        text += f"; the next layout takes {ratio:.2f} times as long"
    if cheaper:
        text += f"; {cheaper[0].candidate.layout} would be faster but lacks "
        text += f"{cheaper[0].excess_bytes / USABLE / GIB:.2f} GiB a rank"
    return text


def _lacking(plan: PlacementPlan) -> str:
    """How many were too large, and when."""
    found = sorted(plan.lacking.items(), key=lambda item: -item[1])
    return "".join(f", {count} too large in {phase}" for phase, count in found)


def _lost(one: PricedCandidate, chosen: PricedCandidate) -> str:
    """Why the chosen one was taken before it: what it lacks, or what costs it most time."""
    if one is chosen:
        return ""
    if not one.fits:
        return f"{one.excess_bytes / USABLE / GIB:.2f} GiB in {one.lacks}"
    names = ("train", "move", "roll")
    more = [a - b for a, b in zip(_seconds(one), _seconds(chosen), strict=True)]
    most = max(range(len(more)), key=more.__getitem__)
    return f"{more[most]:.2g} s to {names[most]}" if more[most] > 0 else "equal"


def _seconds(one: PricedCandidate) -> tuple[float, float, float]:
    """Of training, of what moves between ranks, and of rollout."""
    price = one.price
    return price.compute, price.traffic + price.switch, price.rollout + price.ahead


def _parts(one: PricedCandidate) -> str:
    """The large parts of the peak."""
    names = {
        "training": ("weights", "gradients", "moments", "activations", "rollout"),
        "rollout": ("weights", "moments", "rollout", "cache"),
        "loading": ("loading",),
    }
    shown = {name: getattr(one.memory, name) / GIB for name in names[one.memory.when]}
    large = [f"{name} {size:.2f}" for name, size in shown.items() if size >= 0.005]
    return ", ".join([*large, f"process {RUNTIME / GIB:.2f}"])


def _gib(one: PricedCandidate) -> float:
    """What the rank's memory must have for it."""
    return (one.memory.peak / USABLE + RUNTIME) / GIB


def _table(rows: Sequence[tuple[str, PricedCandidate]]) -> list[str]:
    chosen = rows[0][1]
    cells = [("", *_HEADS), *((mark, *_cells(one), _lost(one, chosen)) for mark, one in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if column in (1, 5, 10) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    note = ["  (-: too large)"] if any(mark == "-" for mark, _ in rows) else []
    return [f"  {line}" for line in lines] + note


def _cells(one: PricedCandidate) -> tuple[str, ...]:
    c = one.candidate
    return (
        str(c.layout),
        str(one.allocation.ranks),
        str(c.rollout_tp),
        str(c.tokens),
        c.memory_options,
        f"{_gib(one):.2f}",
        *(f"{value:.3g}" for value in _seconds(one)),
    )
