"""Whether two answers in LaTeX are equal, by `math-verify`.

Loading it takes a second, so `math` loads it only where it compares. It knows no deadline.
"""

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no deadline


def equal(expected: str, answer: str) -> bool:
    """Whether the answer in one text equals the one in another, e.g. "\\boxed{0.5}"."""
    gold, parsed = (parse(text, parsing_timeout=None) for text in (expected, answer))
    return bool(gold and parsed) and bool(verify(gold, parsed, timeout_seconds=None))


# The first comparison fills the parser's tables; those that are forked from this process have them.
equal(r"\boxed{\frac{1}{2}}", r"\boxed{x^2 + 0.5}")
