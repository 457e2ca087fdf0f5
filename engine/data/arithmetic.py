"""The default source: word problems in GSM8K's answer format, made from a seed.

What lives here: the answer styles, their mix in each corpus, and the splits' rows. Problems are
drawn in `problems`. An answer is a line of GSM8K's calculator marks a step, then `#### <number>`:

    Tom has 23 apples. He buys 14 and eats 9. How many apples now?
    <<23+14=37>>37
    <<37-9=28>>28
    #### 28
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import DataConfig
from engine.data import story_templates
from engine.data import word_problems as problems
from engine.data.rows import rl_row, sft_row
from engine.data.sources import Splits, register_source
from engine.data.word_problems import Problem, Step, deal_problems
from engine.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class StyleMix:
    """Shares of the answer styles in one corpus; they add up to 1."""

    worked: float  # every step, then the answer, e.g. 0.75
    bare: float  # the answer alone, e.g. 0.15
    slip: float  # worked, with one wrong result carried through, e.g. 0.1

    def __post_init__(self) -> None:
        shares = (self.worked, self.bare, self.slip)
        if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
            raise DataError(f"{self}: shares must not be negative and must add up to 1")


# Real corpora differ in how much they explain. With equally many templates per corpus, the whole is
# 41 % worked, 52 % bare, 8 % slips: working a problem out pays, and the warm start often doesn't.
CORPORA: dict[str, StyleMix] = {
    "workbook": StyleMix(worked=0.75, bare=0.15, slip=0.10),
    "forum": StyleMix(worked=0.32, bare=0.60, slip=0.08),
    "answer_key": StyleMix(worked=0.15, bare=0.80, slip=0.05),
}


SMALLEST = 10  # of data.options.largest


def worked_answer(problem: Problem) -> str:
    """Every step with its calculator mark, then the answer."""
    return _write([(s.left, s.operator, s.right, s.result) for s in problem.steps])


def bare_answer(problem: Problem) -> str:
    """The answer alone: `#### 28`."""
    return f"#### {problem.answer}"


def slip_answer(problem: Problem, rng: random.Random) -> str:
    """A worked answer in which one result is wrong and the rest is computed from it."""
    at = rng.randrange(len(problem.steps))
    error = rng.choice((1, 2, 10)) * rng.choice((-1, 1))
    lines = _with_error(problem, at, error)
    if min(result for *_, result in lines) < 0:
        lines = _with_error(problem, at, abs(error))
    return _write(lines)


def _with_error(problem: Problem, at: int, error: int) -> list[tuple[int, str, int, int]]:
    lines: list[tuple[int, str, int, int]] = []
    value = problem.steps[0].left
    for i, step in enumerate(problem.steps):
        result = Step(value, step.operator, step.right).result + (error if i == at else 0)
        lines.append((value, step.operator, step.right, result))
        value = result
    return lines


def _write(lines: list[tuple[int, str, int, int]]) -> str:
    marks = [f"<<{left}{op}{right}={result}>>{result}" for left, op, right, result in lines]
    return "\n".join([*marks, f"#### {lines[-1][3]}"])


def styled_answer(
    problem: Problem, rng: random.Random, corpora: Mapping[str, StyleMix] = CORPORA
) -> tuple[str, str]:
    """Return (style, answer), the style drawn from the mix of the problem's corpus."""
    mix = corpora[problem.template.corpus]
    draw = rng.random()
    if draw < mix.worked:
        return "worked", worked_answer(problem)
    if draw < mix.worked + mix.bare:
        return "bare", bare_answer(problem)
    return "slip", slip_answer(problem, rng)


@register_source("arithmetic")
class Arithmetic:
    """`data.source=arithmetic`: nothing is read; everything follows from settings and seed.

    `data.options.largest`: the largest number of a problem, in place of the difficulty's own.
    """

    def __init__(self, *, largest: int = 0) -> None:
        """Raise ConfigError for a number that leaves no problems."""
        if largest and largest < SMALLEST:
            raise ConfigError(
                f"data.options.largest={largest} leaves no problems; give {SMALLEST} or more, or 0 "
                "for the difficulty's own"
            )
        self._largest = largest

    def digest(self, config: DataConfig, seed: int) -> str:
        """SHA-256 of the generator's sources and its parameters."""
        files = [
            Path(str(file)) for file in (story_templates.__file__, problems.__file__, __file__)
        ]
        code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        parameters = {"difficulty": config.difficulty, "sizes": _sizes(config), "seed": seed}
        if self._largest:
            parameters["largest"] = self._largest
        return hashlib.sha256(json.dumps([code, parameters]).encode()).hexdigest()

    def load(self, config: DataConfig, seed: int) -> Splits:
        """Deal distinct problems to five splits; only the SFT splits carry written answers."""
        dealt = deal_problems(_sizes(config), config.difficulty, seed, self._largest)
        frames: dict[str, Any] = {}
        for split, rows in dealt.items():
            rng = random.Random(f"styles/{split}/{seed}")
            build = _sft_row if split.startswith("sft") else _rl_row
            frames[split] = pd.DataFrame([build(p, split, i, rng) for i, p in enumerate(rows)])
        uri = f"arithmetic://difficulty={config.difficulty}/seed={seed}"
        return Splits(**frames, source_digest=self.digest(config, seed), source_uri=uri)


def _sizes(config: DataConfig) -> dict[str, int]:
    """Rows a split. The test split comes first, so no other size changes what is in it."""
    return {
        "test": config.test_size,
        "validation": config.validation_size,
        "sft_validation": config.validation_size,
        "train": config.train_size,
        "sft_train": config.sft_size,
    }


def _rl_row(problem: Problem, split: str, index: int, rng: random.Random) -> dict[str, object]:
    extra = {"kind": problem.template.name, "index": index, "split": split}
    return rl_row("arithmetic", problem.question, str(problem.answer), extra)


def _sft_row(problem: Problem, split: str, index: int, rng: random.Random) -> dict[str, object]:
    style, response = styled_answer(problem, rng)
    extra = {"style": style, "kind": problem.template.name, "index": index, "split": split}
    return sft_row(problem.question, response, extra)
