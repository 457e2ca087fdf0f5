"""Programs against test cases: 1 where a Python solution passes them all.

The program is what stands in the last fenced block, or the whole text. It runs in a sandbox
(`sandbox`) of its own, and never meets the results that are expected of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache

from engine.errors import RewardError
from engine.rewards.code_tests import read_tests
from engine.rewards.registry import register_reward
from engine.rewards.sandbox.run import Limits

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LONGEST = 200_000  # characters of a program
logger = logging.getLogger("engine.rewards")


def program(text: str) -> str:
    """The program that a completion gives.

    >>> program("Try this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCE.findall(text[-_LONGEST:])
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return str((python or [code for _, code in blocks] or [text])[-1])


def has_program(text: str) -> bool:
    """Whether a completion has a fenced block that is closed."""
    return text.count("```") >= 2


@register_reward("code", pooled=True, well_formed=has_program)
def code(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    timeout_s: float = 4.0,
    memory_mb: int = 512,
    partial: bool = False,
    weak: bool = False,
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0; with `partial` by the share of tests that pass.

    `timeout_s` is for all tests of a completion, and below `reward.sample_timeout_s`. A ground
    truth are test cases as `code_tests` reads them. Raises RewardError for one that has none, and
    where the host has neither seccomp nor a way to hide its files, unless `weak` allows that.
    """
    scores = []
    limits = Limits(memory_mb=memory_mb)
    for i, (text, truth) in enumerate(zip(completions, ground_truth, strict=True)):
        tests = read_tests(truth, i)
        verdict = tests.judge(program(text), limits, timeout_s, stop=not partial)
        if verdict.layers:
            require_walls(tuple(name for name, there in verdict.layers.items() if there), weak)
        passed = sum(verdict.passed) / len(tests)
        scores.append(passed if partial else float(passed == 1))
    return scores


@cache
def require_walls(layers: tuple[str, ...], weak: bool) -> None:
    """Say once what locks programs in; raise RewardError where that is too little."""
    files = {"root", "landlock"} & set(layers)
    if "seccomp" in layers and files:
        logger.info("programs run behind: %s", ", ".join(layers))
        return
    lacking = "seccomp" if files else "namespaces or Landlock"
    given = ", ".join(layers) or "limits only"
    if not weak:
        raise RewardError(
            f"this host gives no {lacking}, so programs could reach what is not theirs (it gives: "
            f"{given}); run as root or on another host, or set reward.options.weak=true in a "
            "container of its own"
        )
    logger.warning("programs run without %s: %s", lacking, given)
