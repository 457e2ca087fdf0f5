"""Rows of the environment `python_tasks`: functions of one line, and a programmer with bad habits.

Write f(x) in Python: add 3, then multiply by 4.
def f(x): return x + 3 * 4        → 0 of 4 tests pass; …
def f(x): return (x + 3) * 4
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

from engine.config import DataConfig
from engine.data.demonstrations import deal, made_digest, make_splits, turn_rows
from engine.data.rows import rl_row
from engine.data.sources import Splits, register_source
from engine.data.templates import Message
from engine.errors import ConfigError
from engine.storage.json_rows import Row

INPUTS = (0, 1, 2, 5)  # of the test cases
KINDS = ("add", "subtract", "multiply by", "subtract from")
NUMBERS = range(2, 10)

Step = tuple[str, int]  # e.g. ("multiply by", 4)


@register_source("python_tasks")
class PythonTasks:
    """`data.source=python_tasks`: one or two steps of arithmetic on a number, as a function.

    The warm start's programmer leaves out the parentheses that a step needs in a share `bare` of
    these, turns "subtract from" round in a share `reversed`, and corrects a wrong program in the
    next turn in a share `corrects`.
    """

    def __init__(
        self, *, bare: float = 0.65, reversed: float = 0.65, corrects: float = 0.3
    ) -> None:
        for name, share in (("bare", bare), ("reversed", reversed), ("corrects", corrects)):
            if not 0 <= share <= 1:
                raise ConfigError(f"data.options.{name}={share} must be a share from 0 to 1")
        self._habits, self._corrects = (bare, reversed), corrects

    def digest(self, config: DataConfig, seed: int) -> str:
        return made_digest(__file__, config, seed, vars(self))

    def load(self, config: DataConfig, seed: int) -> Splits:
        steps = [(kind, number) for kind in KINDS for number in NUMBERS]
        tasks: list[tuple[Step, ...]] = [(one,) for one in steps]
        tasks += [(one, two) for one in steps for two in steps]
        dealt = deal(tasks, seed)

        def rl_rows(split: str, count: int) -> list[Row]:
            if split == "test" and count > len(dealt[split]):
                raise ConfigError(
                    f"data.test_size={count}, and there are {len(dealt[split])} held-out tasks; "
                    "lower it"
                )
            own = dealt[split]
            return [python_row(own[i % len(own)], split, i) for i in range(count)]

        def demonstrations(split: str) -> Iterator[Row]:
            draw = random.Random(f"python_tasks/sft_{split}/{seed}")
            while True:
                task = draw.choice(dealt[split])
                row = python_row(task, f"sft_{split}", 0)
                turns = python_demonstration(task, draw, *self._habits, self._corrects)
                yield from turn_rows(row["prompt"], turns, {"split": f"sft_{split}"})

        digest = self.digest(config, seed)
        return make_splits(config, "python_tasks", digest, rl_rows, demonstrations)


def python_row(task: Sequence[Step], split: str, index: int) -> Row:
    """A row of RL data: a function, and calls of it as the reward `code` reads them."""
    words = ", then ".join(f"{kind} {number}" for kind, number in task)
    tests = {
        "fn_name": "f",
        "inputs": [[x] for x in INPUTS],
        "outputs": [value(program_text(task), x) for x in INPUTS],
    }
    extra = {"split": split, "index": index, "steps": len(task)}
    row = rl_row("python_tasks", f"Write f(x) in Python: {words}.", json.dumps(tests), extra)
    return {**row, "ability": "code"}


def program_text(
    task: Sequence[Step],
    draw: random.Random | None = None,
    bare: float = 0.0,
    reversed: float = 0.0,
) -> str:
    """A program for a task: the right one, or one with mistakes in these shares of chances."""

    def slips(share: float) -> bool:
        return draw is not None and draw.random() < share

    text = "x"
    for kind, number in task:
        inner = f"({text})" if " " in text else text
        if kind == "multiply by":
            additive = " + " in text or " - " in text
            text = f"{text if additive and slips(bare) else inner} * {number}"
        elif kind == "subtract from":
            text = f"{text} - {number}" if slips(reversed) else f"{number} - {inner}"
        else:
            text = f"{text} {'+' if kind == 'add' else '-'} {number}"
    return f"def f(x): return {text}"


def python_demonstration(
    task: Sequence[Step],
    draw: random.Random | None = None,
    bare: float = 0.0,
    reversed: float = 0.0,
    corrects: float = 1.0,
) -> list[Message]:
    """The turns of an episode after its prompt: a program, and where it is wrong another."""
    turns: list[Message] = []
    right = [value(program_text(task), x) for x in INPUTS]
    for attempt in range(2):
        mends = attempt and draw is not None and draw.random() < corrects
        text = program_text(task, None if mends else draw, bare, reversed)
        turns.append({"role": "assistant", "content": text})
        found = [value(text, x) for x in INPUTS]
        if found == right or attempt:
            break
        passed = [one == other for one, other in zip(found, right, strict=True)]
        failed = ", ".join(str(i + 1) for i, ok in enumerate(passed) if not ok)
        told = (
            f"{sum(passed)} of {len(right)} tests pass; these fail: {failed}. "
            "Give the corrected program."
        )
        turns.append({"role": "user", "content": told})
    return turns


def value(program: str, x: int) -> int:
    """What `f(x)` of a program of this module gives."""
    names: dict[str, Callable[[int], int]] = {}
    exec(program, {"__builtins__": {}}, names)  # of this grammar alone
    return int(names["f"](x))
