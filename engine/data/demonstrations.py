"""Rows of the demonstration tasks: guessing, products and Python tasks, with scripted players.

Their environments are in `engine.agents.example_environments`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from engine.config import DataConfig
from engine.data.rows import rl_row
from engine.data.sources import Splits, register_source
from engine.data.templates import Message
from engine.errors import ConfigError
from engine.storage.json_rows import Row

# Episodes that a scripted player wrote, as rows of the warm start; and splits made from a seed.
#
# A source of an environment's rows deals its prompts to splits here, so that no held-out prompt is
# trained on. A demonstration becomes one SFT row for each of the player's turns, with all that
# came
# before as its prompt: what the policy reads there in RL.

T = TypeVar("T")

HELD_OUT = {"test": 0.2, "validation": 0.1}  # shares of the prompts; the rest is trained on


def turn_rows(
    prompt: Sequence[Message], turns: Sequence[Message], extra_info: Mapping[str, object]
) -> Iterator[Row]:
    """An SFT row for each assistant message of `turns`, the messages after a prompt.

    >>> turns = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "higher"},
    ...          {"role": "assistant", "content": "7"}]
    >>> [row["response"] for row in turn_rows([{"role": "user", "content": "Guess."}], turns, {})]
    ['5', '7']
    """
    seen = [dict(message) for message in prompt]
    for turn in turns:
        if turn["role"] == "assistant":
            yield {
                "prompt": list(seen),
                "response": turn["content"],
                "extra_info": {**extra_info, "turn": sum(m["role"] == "assistant" for m in seen)},
            }
        seen.append(dict(turn))


def deal(values: Sequence[T], seed: int) -> dict[str, list[T]]:
    """Deal values to `test`, `validation` and `train`, none to two; the order is drawn by `seed`.

    Raises ConfigError where a split would get none.
    """
    drawn = list(values)
    random.Random(f"deal/{seed}").shuffle(drawn)
    dealt: dict[str, list[T]] = {}
    for name, share in HELD_OUT.items():
        count = round(share * len(values))
        dealt[name], drawn = drawn[:count], drawn[count:]
    dealt["train"] = drawn
    if not all(dealt.values()):
        raise ConfigError(
            f"data.options leave {len(values)} different prompts, too few for the splits; widen "
            "them"
        )
    return dealt


def make_splits(
    config: DataConfig,
    source: str,
    digest: str,
    rl_rows: Callable[[str, int], Sequence[Row]],
    demonstrations: Callable[[str], Iterator[Row]],
) -> Splits:
    """All five splits: `rl_rows(split, count)` of RL, and the first SFT rows of `demonstrations`.

    `demonstrations(split)`, of `train` or `validation`, goes on without an end.
    """
    counts = {
        "test": config.test_size,
        "validation": config.validation_size,
        "train": config.train_size,
    }
    sft = {"sft_train": config.sft_size, "sft_validation": config.validation_size}
    for name, count in (("train_size", config.train_size), ("sft_size", config.sft_size)):
        if not count:
            raise ConfigError(f"data.{name}=0 (all rows) needs data.source=files; give a number")
    frames: dict[str, Any] = {
        name: pd.DataFrame(rl_rows(name, count)) for name, count in counts.items()
    }
    for name, count in sft.items():
        rows = demonstrations(name.removeprefix("sft_"))
        frames[name] = pd.DataFrame([next(rows) for _ in range(count)])
    return Splits(**frames, source_digest=digest, source_uri=f"{source}://")


def made_digest(file: str, config: DataConfig, seed: int, options: Mapping[str, object]) -> str:
    """SHA-256 (hex) of what rows that are made depend on: the code of `file`, sizes and options."""
    sizes = (config.sft_size, config.train_size, config.validation_size, config.test_size)
    code = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (file, __file__)]
    text = json.dumps([code, sizes, seed, dict(options)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# Rows of the environment `guessing`, with demonstrations of a careless player.
#
# Ada has a number from 2 to 8. Guess it; the answer is higher or lower.
# 6 → lower → 3 → higher → 5

HIGHER, LOWER = "higher", "lower"  # what the environment says
NAMES = (
    *("Ada", "Amir", "Anna", "Ben", "Bo", "Carl", "Cleo", "Dana", "Dev", "Ella", "Emil", "Eva"),
    *("Finn", "Gina", "Hana", "Hugo", "Ida", "Igor", "Ines", "Ivan", "Jack", "Jana", "Joel"),
    *("June", "Kai", "Kim", "Lars", "Lena", "Liam", "Lily", "Luis", "Mara", "Max", "Mia", "Mona"),
    *("Nils", "Nina", "Noah", "Nora", "Olga", "Omar", "Otto", "Paul", "Petra", "Rita", "Rosa"),
    *("Sam", "Sara", "Tara", "Theo", "Tom", "Uma", "Vera", "Wei", "Yara", "Yuri", "Zoe"),
)


@register_source("guessing")
class GuessingGames:
    """`data.source=guessing`: somebody's number, one of `span` numbers, `largest` at most.

    Who has it tells held-out prompts from those that are trained on. The warm start's player
    guesses at random among what is left, a share `careless` of its guesses anywhere, and gives up
    after `max_turns`.
    """

    def __init__(
        self, *, span: int = 7, largest: int = 9, careless: float = 0.3, max_turns: int = 6
    ) -> None:
        if span < 2 or largest < span or not 0 <= careless <= 1 or max_turns < 1:
            raise ConfigError(
                f"data.options span={span}, largest={largest}, careless={careless}, "
                f"max_turns={max_turns} make no games; give a span of 2 or more, up to largest, a "
                "share from 0 to 1, and a turn"
            )
        self._span, self._largest = span, largest
        self._careless, self._max_turns = careless, max_turns

    def digest(self, config: DataConfig, seed: int) -> str:
        return made_digest(__file__, config, seed, vars(self))

    def load(self, config: DataConfig, seed: int) -> Splits:
        names = deal(NAMES, seed)

        def game(split: str, draw: random.Random) -> tuple[str, int, int, int]:
            low = draw.randint(1, self._largest - self._span + 1)
            high = low + self._span - 1
            return draw.choice(names[split]), low, high, draw.randint(low, high)

        def rl_rows(split: str, count: int) -> list[Row]:
            draw = random.Random(f"guessing/{split}/{seed}")
            return [guessing_row(*game(split, draw), split, i) for i in range(count)]

        def demonstrations(split: str) -> Iterator[Row]:
            draw = random.Random(f"guessing/sft_{split}/{seed}")
            while True:
                row = guessing_row(*game(split, draw), f"sft_{split}", 0)
                turns = guessing_demonstration(row, draw, self._careless, self._max_turns)
                yield from turn_rows(row["prompt"], turns, {"split": f"sft_{split}"})

        digest = self.digest(config, seed)
        return make_splits(config, "guessing", digest, rl_rows, demonstrations)


def guessing_row(who: str, low: int, high: int, secret: int, split: str, index: int) -> Row:
    """A row of RL data: a number from `low` to `high`."""
    question = (
        f"{who} has a number from {low} to {high}. Guess it; the answer is {HIGHER} or {LOWER}."
    )
    extra = {"split": split, "index": index, "low": low, "high": high}
    return {**rl_row("guessing", question, str(secret), extra), "ability": "game"}


def guessing_demonstration(
    row: Row,
    draw: random.Random | None = None,
    careless: float = 0.0,
    max_turns: int = 100,
) -> list[Message]:
    """The turns of a game after its prompt: bisection, or guesses that are drawn.

    Drawn ones stay within what is left, but for a share `careless`, which are any of the game's.
    """
    first, last = int(row["extra_info"]["low"]), int(row["extra_info"]["high"])
    secret, low, high = int(row["reward_model"]["ground_truth"]), first, last
    turns: list[Message] = []
    while True:
        guess = (low + high) // 2
        if draw is not None:
            anywhere = draw.random() < careless
            guess = draw.randint(first, last) if anywhere else draw.randint(low, high)
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == secret or len(turns) > 2 * (max_turns - 1):
            return turns
        turns.append({"role": "user", "content": HIGHER if guess < secret else LOWER})
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))


# Rows of the environment `arithmetic`: products beyond a small model, and who calls a calculator.
#
# What is 482 * 937? Give the answer in the last line as "#### number".
# <tool_call>{"name": "calculator", "arguments": {"expression": "482 * 937"}}</tool_call>
# → 451634
# #### 451634

_FORM = 'Give the answer in the last line as "#### number".'


@dataclass(frozen=True, slots=True)
class Habits:
    """Shares of what a player does; the rest is answered from the head, and wrong."""

    calls: float  # calls the calculator, e.g. 0.3
    slips: float  # calls it with another expression
    malformed: float  # writes a call that can't be read


CAREFUL = Habits(calls=1.0, slips=0.0, malformed=0.0)


@register_source("products")
class Products:
    """`data.source=products`: products of two numbers of `digits` (from, to) digits each.

    The warm start's player calls the calculator in a share `calls` of the problems, asks it
    something else in a share `slips`, forgets to close a call's JSON in a share `malformed`, and
    otherwise writes a number of about the right size.
    """

    def __init__(
        self,
        *,
        digits: tuple[int, int] = (3, 3),
        calls: float = 0.3,
        slips: float = 0.1,
        malformed: float = 0.1,
    ) -> None:
        if not 1 <= digits[0] <= digits[1] or min(calls, slips, malformed) < 0:
            raise ConfigError(
                f"data.options digits={list(digits)}, calls={calls}, slips={slips}, "
                f"malformed={malformed}: digits are two numbers above 0, the lower first, and "
                "shares are not negative"
            )
        if calls + slips + malformed > 1:
            raise ConfigError(
                f"data.options calls + slips + malformed is {calls + slips + malformed:g}; shares "
                "add up to 1 at most"
            )
        self._digits, self._habits = digits, Habits(calls, slips, malformed)

    def digest(self, config: DataConfig, seed: int) -> str:
        options = {"digits": self._digits, "habits": str(self._habits)}
        return made_digest(__file__, config, seed, options)

    def load(self, config: DataConfig, seed: int) -> Splits:
        low, high = 10 ** (self._digits[0] - 1), 10 ** self._digits[1]

        def problem(split: str, draw: random.Random) -> tuple[int, int]:
            """Two numbers, the first of which is in no other split's problems."""
            while True:
                a, b = draw.randrange(low, high), draw.randrange(low, high)
                if split_of(a + seed) == split:
                    return a, b

        def rl_rows(split: str, count: int) -> list[Row]:
            draw = random.Random(f"products/{split}/{seed}")
            return [product_row(*problem(split, draw), split, i) for i in range(count)]

        def demonstrations(split: str) -> Iterator[Row]:
            draw = random.Random(f"products/sft_{split}/{seed}")
            while True:
                row = product_row(*problem(split, draw), f"sft_{split}", 0)
                turns = product_demonstration(row, draw, self._habits)
                yield from turn_rows(row["prompt"], turns, {"split": f"sft_{split}"})

        digest = self.digest(config, seed)
        return make_splits(config, "products", digest, rl_rows, demonstrations)


def split_of(number: int) -> str:
    """The split of problems that begin with a number: 2 of 10 are tests, 1 is for validation."""
    return {0: "test", 1: "test", 2: "validation"}.get(number % 10, "train")


def product_row(a: int, b: int, split: str, index: int) -> Row:
    """A row of RL data: the product of two numbers."""
    extra = {"split": split, "index": index, "expression": f"{a} * {b}"}
    return rl_row("products", f"What is {a} * {b}? {_FORM}", str(a * b), extra)


def product_demonstration(
    row: Row, draw: random.Random | None = None, habits: Habits = CAREFUL
) -> list[Message]:
    """The turns of an episode after its prompt, by habits that are drawn: call, result, answer."""
    expression = str(row["extra_info"]["expression"])
    a, b = map(int, expression.split(" * "))
    kind = draw.random() if draw is not None else 0.0
    if draw is None or kind < habits.calls:
        return [said(call_text(expression)), result(str(a * b)), said(f"#### {a * b}")]
    kind -= habits.calls
    if kind < habits.slips:
        other = draw.choice((f"{a} + {b}", f"{a} - {b}", f"{b} * {b}"))
        found = {"+": a + b, "-": a - b, "*": b * b}[other.split()[1]]
        return [said(call_text(other)), result(str(found)), said(f"#### {found}")]
    if kind - habits.slips < habits.malformed:
        return [said(call_text(expression).replace("}}<", "<"))]  # it goes on in RL alone
    size = len(str(a * b))
    return [said(f"#### {draw.randrange(10 ** (size - 1), 10**size)}")]


def call_text(expression: str) -> str:
    """A call of the calculator in Hermes' form."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def result(text: str) -> Message:
    return {"role": "tool", "content": text}


# Rows of the environment `python_tasks`: functions of one line, and a programmer with bad habits.
#
# Write f(x) in Python: add 3, then multiply by 4.
# def f(x): return x + 3 * 4        → 0 of 4 tests pass; …
# def f(x): return (x + 3) * 4

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
