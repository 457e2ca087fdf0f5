"""Whether two answers in LaTeX are equal, by `math-verify`.

Loading it takes a second, so `math` loads it only where it compares. It knows no deadline.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no deadline


def equal(wanted: str, said: str) -> bool:
    """Whether the answer in `said` equals the one in `wanted`, e.g. "\\boxed{0.5}"."""
    gold = parse(wanted, parsing_timeout=None)
    answer = parse(said, parsing_timeout=None)
    return bool(gold and answer) and bool(verify(gold, answer, timeout_seconds=None))


# The first comparison fills the parser's tables; those that are forked from this process have them.
equal(r"\boxed{\frac{1}{2}}", r"\boxed{x^2 + 0.5}")
