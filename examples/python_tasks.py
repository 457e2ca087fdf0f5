"""Python functions of one line with test cases: the policy sees which fail, and tries again.

    Write f(x) in Python: add 3, then multiply by 4.
    def f(x): return x + 3 * 4        → 0 of 4 tests pass; …
    def f(x): return (x + 3) * 4

`data.source=python_tasks` makes rows, with demonstrations of a programmer with bad habits; the
environment `python_tasks` runs each turn's program in the sandbox.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.agents import Action, Observation, register_environment
from engine.agents.tools import on_thread
from engine.config import DataConfig
from engine.data.chat_template import Message
from engine.data.rows import rl_row
from engine.data.sources import Splits, register_source
from engine.errors import ConfigError
from engine.rewards.code import CodeTests, Verdict, program, read_tests, require_containment
from engine.rewards.sandbox import Limits
from engine.storage.json_rows import Row
from examples.demonstrations import deal, made_digest, make_splits, truth_of, turn_rows

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

    disjoint_splits = True

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


@register_environment("python_tasks")
class PythonTasksEnvironment:
    """`reward_model.ground_truth` are test cases as the reward `code` reads them.

    Each turn's program, its last fenced block or the whole text, runs in the sandbox against all
    of them. The episode ends with the first that passes them all, or after `max_turns`. A turn
    earns what it adds to the share of tests that pass, so that an episode's turns add up to its
    best share; with `partial=False` only a program that passes them all earns 1.
    """

    def __init__(
        self,
        *,
        max_turns: int = 3,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        partial: bool = True,
        weak: bool = False,
    ) -> None:
        """`timeout_s` is for all tests of a turn; `weak` allows any host."""
        if max_turns < 1 or timeout_s <= 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_turns is at least 1, timeout_s above 0"
            )
        self._max_turns, self._timeout_s = max_turns, timeout_s
        self._limits = Limits(memory_mb=memory_mb)
        self._partial, self._weak = partial, weak
        self._row: Mapping[str, object] = {}
        self._tests: CodeTests | None = None
        self._turns, self._best = 0, 0.0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self._row, self._turns, self._best = row, 0, 0.0
        self._tests = read_tests(truth_of(row))
        return Observation()

    async def step(self, action: Action) -> Observation:
        assert self._tests is not None
        self._turns += 1
        tests, text = self._tests, program(action.text)
        verdict: Verdict = await on_thread(
            lambda: tests.judge(text, self._limits, self._timeout_s, stop=False)
        )
        require_containment(verdict.layers, self._weak)
        passed, solved = sum(verdict.passed), sum(verdict.passed) == len(tests)
        worth = passed / len(tests) if self._partial else float(solved)
        reward, self._best = max(0.0, worth - self._best), max(worth, self._best)
        done = solved or self._turns >= self._max_turns
        info = {"passed": passed / len(tests), "solved": solved, "turns": self._turns}
        told = {"role": "user", "content": _told(verdict, len(tests))}
        return Observation(() if done else (told,), reward, done, info)

    async def close(self) -> None:
        """Nothing is held: sandboxes end with their turn."""

    def get_state(self) -> object:
        return dict(self._row), self._turns, self._best

    def set_state(self, state: Any) -> None:
        self._row, self._turns, self._best = state
        self._tests = read_tests(truth_of(self._row))


def _told(verdict: Verdict, count: int) -> str:
    """What the policy reads: which tests fail, and nothing of what they expect."""
    passed = verdict.passed + [False] * (count - len(verdict.passed))
    failed = [str(place + 1) for place, ok in enumerate(passed) if not ok]
    shown = ", ".join(failed[:10]) + (", …" if len(failed) > 10 else "")
    return f"{sum(passed)} of {count} tests pass; these fail: {shown}. Give the corrected program."
