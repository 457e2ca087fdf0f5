"""MATH's rule: 1 where the answer equals the ground truth as mathematics, by `math-verify`.

The answer is what stands in the last `\\boxed{…}`; without one, the last expression of the text.
A comparison can take any time and memory, so it runs in a pool's process.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.rewards.boxed import LONGEST, last_boxed
from engine.rewards.registry import register_reward

_TAIL = 2000  # characters at the end that are searched for an answer without a box


@register_reward(
    "math", pooled=True, imports=("engine.rewards._latex_equality",), answer=last_boxed
)
def math(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    boxed_only: bool = False,
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0.

    A ground truth is LaTeX, e.g. "\\frac{1}{2}", or a solution that has it in a box. `boxed_only`
    gives 0 to an answer without a box.
    """
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_is_right(text, str(truth), boxed_only)) for text, truth in pairs]


def _is_right(text: str, truth: str, boxed_only: bool) -> bool:
    wanted = (last_boxed(truth) or truth).strip().strip("$").strip()
    found = last_boxed(text)
    if found is None and (boxed_only or "\\boxed" in text):  # a box without an end holds no answer
        return False
    if found is not None and _plain(found) == _plain(wanted):
        return True
    said = text[-_TAIL:] if found is None else f"\\boxed{{{found}}}"
    if len(wanted) > LONGEST:
        return False
    from engine.rewards._latex_equality import equal

    return equal(f"\\boxed{{{wanted}}}", said)


def _plain(latex: str) -> str:
    """Without what changes nothing: blanks, `\\left`, `\\dfrac`, a full stop."""
    for written, meant in (("\\left", ""), ("\\right", ""), ("dfrac", "frac"), ("tfrac", "frac")):
        latex = latex.replace(written, meant)
    return "".join(latex.split()).rstrip(".")
