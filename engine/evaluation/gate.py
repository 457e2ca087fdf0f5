"""The promotion rule: is the new model surely better than the present champion?

A pure function of three facts. It fails closed: whatever is missing, not finite or out of order
ends in "not promoted" with the reason. Moving the alias lives in `tasks/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.evaluation.metrics import Interval


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to promote, and a sentence that says why with its numbers."""

    promote: bool
    reason: str


def decide(gain: Interval | None, minimum_gain: float, has_champion: bool) -> Decision:
    """Decide on the gain in pass@1 (fractions: 0.1 is 10 points) over what was compared with.

    No champion: promote. Else promote if the interval's lower end is above `minimum_gain`.
    The gain must be readable in either case: an evaluation that gave no numbers promotes nothing.
    """
    fault = _fault(gain, minimum_gain)
    if fault:
        return Decision(False, f"Not promoted: {fault}.")
    assert gain is not None  # _fault has refused None
    shown = f"{_points(gain.mean)} [{_points(gain.low)}, {_points(gain.high)}]"
    if has_champion is False:  # not `not has_champion`: unknown must not read as "none"
        return Decision(True, f"Promoted: there is no champion yet; pass@1 gain {shown} points.")
    bound = f"the required gain of {_points(minimum_gain)} points"
    if gain.low > minimum_gain:
        return Decision(True, f"Promoted: pass@1 gain {shown} points, its lower end above {bound}.")
    return Decision(
        False,
        f"Not promoted: pass@1 gain {shown} points; its lower end must be above {bound}.",
    )


def read_interval(value: object) -> Interval | None:
    """Read `{"mean", "low", "high"}` from a manifest; None when it is anything else."""
    if not isinstance(value, Mapping):
        return None
    numbers = [value.get(name) for name in ("mean", "low", "high")]
    if not all(_is_number(number) for number in numbers):
        return None
    mean, low, high = (float(number) for number in numbers)  # type: ignore[arg-type]
    return Interval(mean, low, high)


def _fault(gain: Interval | None, minimum_gain: float) -> str:
    """Return what makes the numbers unusable, or an empty string."""
    if gain is None:
        return "the evaluation gives no gain; run the evaluation again"
    for name, value in (("mean", gain.mean), ("low", gain.low), ("high", gain.high)):
        if not _is_number(value) or not math.isfinite(value):
            return f"the gain's {name} is {value!r}, not a finite number"
    if not _is_number(minimum_gain) or not math.isfinite(minimum_gain):
        return f"promote.minimum_gain is {minimum_gain!r}, not a finite number"
    if not (-1 <= gain.low <= gain.high <= 1 and -1 <= gain.mean <= 1):
        return (
            f"the gain {gain.mean} [{gain.low}, {gain.high}] is no difference of two rates; "
            "its numbers must be in order and between -1 and 1"
        )
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.2f}"  # + 0.0 turns a negative zero into a plain one
