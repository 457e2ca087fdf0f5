"""The default source: grade-school word problems in GSM8K's answer format, made from a seed.

A story starts with a number, goes on with clauses that add, subtract or multiply, and ends with a
question. An answer is a line of GSM8K's calculator marks a step, then `#### <number>`:

    Tom has 23 apples. He buys 14 and eats 9. How many apples now?
    <<23+14=37>>37
    <<37-9=28>>28
    #### 28
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, mul, sub
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import DataConfig
from engine.data.rows import normalise, rl_row, sft_row
from engine.data.sources import Splits, register_source
from engine.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class StoryTemplate:
    """A kind of story; the generator fills in `{name}`, `{thing}`, `{n}` and `{m}`."""

    name: str  # the problem's kind, e.g. "shop"
    corpus: str  # the corpus that it belongs to, e.g. "workbook"
    things: tuple[str, ...]  # plural nouns, e.g. ("pens", "books")
    opening: str  # with {n}, e.g. "{name} has {n} {thing}."
    gains: tuple[str, ...] = ()  # clauses that add, e.g. ("buys {n}",)
    losses: tuple[str, ...] = ()  # clauses that take away, e.g. ("sells {n}",)
    packs: str = ""  # what holds {m} things in an opening worth {n} × {m}; empty: nothing
    growth: tuple[tuple[str, int], ...] = ()  # clauses that multiply, e.g. (("doubles them", 2),)
    question: str = "How many {thing} now?"  # the last sentence
    subject: str = "{pronoun}"  # who acts in the clauses: the person, "It", ...


WOMEN = ("Ann", "Mia", "Eva", "Zoe", "Amy")
PEOPLE = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Max", "Zoe", "Leo", "Amy")

# fmt: off
STORY_TEMPLATES = (
    StoryTemplate(
        "pocket", "workbook", ("apples", "nuts", "plums"), "{name} has {n} {thing}.",
        gains=("buys {n}", "finds {n}"), losses=("eats {n}", "loses {n}"), packs="bags"),
    StoryTemplate(
        "shop", "workbook", ("pens", "books", "cups"), "A shop has {n} {thing}.",
        gains=("gets {n}", "buys {n}"), losses=("sells {n}", "loses {n}"),
        packs="boxes", subject="It"),
    StoryTemplate(
        "colours", "workbook", ("cars", "balls", "cups"), "{name} has {n} red {thing}.",
        gains=("gets {n} blue", "buys {n} old", "finds {n} new"),
        question="How many {thing} in all?"),
    StoryTemplate(
        "pages", "workbook", ("pages",), "A book has {n} {thing}.",
        losses=("reads {n}", "skips {n}"), packs="parts", question="How many {thing} are left?",
        subject="{name}"),
    StoryTemplate(
        "bus", "workbook", ("people", "kids"), "A bus has {n} {thing}.",
        gains=("picks up {n}", "takes {n}"), losses=("drops {n}", "leaves {n}"),
        packs="rows", subject="It"),
    StoryTemplate(
        "savings", "forum", ("dollars",), "{name} has {n} {thing}.",
        gains=("earns {n}", "saves {n}"), losses=("pays {n}", "loses {n}"),
        growth=(("doubles it", 2), ("triples it", 3))),
    StoryTemplate(
        "farm", "forum", ("cows", "hens", "pigs"), "A farm has {n} {thing}.",
        gains=("buys {n}", "gets {n}"), losses=("sells {n}", "loses {n}"),
        packs="pens", subject="It"),
    StoryTemplate(
        "game", "forum", ("points",), "{name} has {n} {thing}.",
        gains=("wins {n}", "gets {n}"), losses=("loses {n}", "pays {n}"),
        growth=(("doubles them", 2),)),
    StoryTemplate(
        "goal", "forum", ("dollars", "points"), "{name} needs {n} {thing}.",
        losses=("earns {n}", "gets {n}", "finds {n}"), question="How many more?"),
    StoryTemplate(
        "baker", "forum", ("cakes", "pies", "rolls"), "{name} makes {n} {thing}.",
        gains=("buys {n}", "adds {n}"), losses=("sells {n}", "eats {n}", "burns {n}"),
        packs="trays"),
    StoryTemplate(
        "garden", "answer_key", ("roses", "trees", "beans"), "{name} plants {n} {thing}.",
        gains=("adds {n}", "finds {n}"), losses=("cuts {n}", "sells {n}"), packs="rows"),
    StoryTemplate(
        "library", "answer_key", ("books", "maps"), "A library has {n} {thing}.",
        gains=("gets {n}", "buys {n}"), losses=("lends {n}", "loses {n}"),
        packs="rows", subject="It"),
    StoryTemplate(
        "walk", "answer_key", ("miles",), "{name} walks {n} {thing}.",
        gains=("runs {n}", "rides {n}", "swims {n}"), question="How many {thing} in all?"),
    StoryTemplate(
        "trip", "answer_key", ("miles",), "A trip is {n} {thing}.",
        losses=("walks {n}", "rides {n}", "runs {n}"), question="How many {thing} are left?",
        subject="{name}"),
    StoryTemplate(
        "cards", "answer_key", ("cards", "stamps"), "{name} has {n} {thing}.",
        gains=("wins {n}", "finds {n}"), losses=("loses {n}", "sells {n}"), packs="packs"),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Level:
    """What a difficulty means."""

    steps: int  # operations in a problem, e.g. 2
    largest: int  # no number in a problem or its solution is above it, e.g. 99
    product_share: float  # share of problems that may multiply, e.g. 0.15


LEVELS: dict[int, Level] = {
    1: Level(steps=1, largest=50, product_share=0.1),
    2: Level(steps=2, largest=40, product_share=0.15),
    3: Level(steps=3, largest=99, product_share=0.25),
    4: Level(steps=4, largest=199, product_share=0.35),
    5: Level(steps=5, largest=999, product_share=0.45),
}
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a solution: `left operator right`."""

    left: int
    operator: str  # "+", "-" or "*"
    right: int
    error: int = 0  # by which its result is wrong

    @property
    def result(self) -> int:
        return _OPERATIONS[self.operator](self.left, self.right) + self.error


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the one chain of steps that solves it."""

    template: StoryTemplate
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """Kind, operators and numbers: problems that differ in words alone have the same key."""
        operators = "".join(step.operator for step in self.steps)
        numbers = (self.steps[0].left, *(step.right for step in self.steps))
        return self.template.name, operators, numbers


def draw_problem(rng: random.Random, level: Level) -> Problem | None:
    """Draw one problem, or None where the numbers drawn leave no next step within the level."""
    template, name = rng.choice(STORY_TEMPLATES), rng.choice(PEOPLE)
    thing = rng.choice(template.things)
    may_multiply = rng.random() < level.product_share
    steps: list[Step] = []
    if template.packs and may_multiply:
        n, m = rng.randint(2, 9), rng.randint(2, 9)
        steps.append(Step(n, "*", m))
        value, number = n * m, f"{n} {template.packs} of {m}"
        if value > level.largest:
            return None
    else:
        value = rng.randint(2, level.largest)
        number = str(value)
    opening = template.opening.format(name=name, thing=thing, n=number)
    clauses: list[str] = []
    while len(steps) < level.steps:
        drawn = _draw_clause(rng, template, level, value, may_multiply, clauses)
        if drawn is None:
            return None
        step, clause = drawn
        steps.append(step)
        clauses.append(clause)
        value = step.result
    middle = ""
    if clauses:
        pronoun = "She" if name in WOMEN else "He"
        *head, last = clauses
        told = f"{', '.join(head)} and {last}" if head else last  # "a", "a and b", "a, b and c"
        middle = f" {template.subject.format(name=name, pronoun=pronoun)} {told}."
    question = template.question.format(thing=thing)
    return Problem(template, f"{opening}{middle} {question}", tuple(steps))


def _draw_clause(
    rng: random.Random,
    template: StoryTemplate,
    level: Level,
    value: int,
    may_multiply: bool,
    used: list[str],
) -> tuple[Step, str] | None:
    """Draw a step from `value` that stays within 1..largest, and the clause that tells it."""
    choices = [("+", clause) for clause in template.gains if value + 2 <= level.largest]
    choices += [("-", clause) for clause in template.losses if value > 2]
    if may_multiply:
        choices += [("*", c) for c, factor in template.growth if value * factor <= level.largest]
    verbs = {clause.split()[0] for clause in used}
    choices = [(op, c) for op, c in choices if c.split()[0] not in verbs] or choices
    if not choices:
        return None
    sign, clause = rng.choice(choices)
    if sign == "*":
        return Step(value, "*", dict(template.growth)[clause]), clause
    number = rng.randint(2, level.largest - value if sign == "+" else value - 1)
    return Step(value, sign, number), clause.format(n=number)


def deal_problems(
    sizes: Mapping[str, int], difficulty: int, seed: int, largest: int = 0
) -> dict[str, list[Problem]]:
    """Draw problems without a text or key in common and deal them to splits, in order of `sizes`.

    A split depends on the seed and on the sizes before its own only. `largest` is the largest
    number in them; 0: as the difficulty says. Raises DataError when the difficulty doesn't hold
    that many distinct problems.
    """
    level = LEVELS[difficulty]
    level = replace(level, largest=largest or level.largest)
    rng = random.Random(f"arithmetic/{difficulty}/{seed}")
    seen: set[object] = set()  # keys and texts
    dealt: dict[str, list[Problem]] = {split: [] for split in sizes}
    for split, size in sizes.items():
        misses = 0
        while len(dealt[split]) < size:
            misses += 1
            problem = draw_problem(rng, level)
            marks = {problem.key, normalise(problem.question)} if problem else set()
            if problem is not None and seen.isdisjoint(marks):
                seen |= marks
                dealt[split].append(problem)
                misses = 0
            if misses > 2000:
                counts = ", ".join(f"{name} {count}" for name, count in sizes.items())
                raise DataError(
                    f"data.difficulty={difficulty} has only about {len(seen) // 2} distinct "
                    f"problems and the splits ask for {sum(sizes.values())} ({counts}); "
                    "lower the sizes in data, or raise data.difficulty"
                )
    return dealt


# Shares of the answer styles: worked (every step, then the answer), bare (the answer alone) and
# slip (worked, with one wrong result carried through); in total 41 %, 52 % and 8 %: working a
# problem out pays, and the warm start often doesn't.
CORPORA = {
    "workbook": {"worked": 0.75, "bare": 0.15, "slip": 0.10},
    "forum": {"worked": 0.32, "bare": 0.60, "slip": 0.08},
    "answer_key": {"worked": 0.15, "bare": 0.80, "slip": 0.05},
}
SMALLEST = 10  # of data.options.largest


def worked_answer(problem: Problem) -> str:
    """Every step with its calculator mark, then the answer."""
    marks = [f"<<{s.left}{s.operator}{s.right}={s.result}>>{s.result}" for s in problem.steps]
    return "\n".join([*marks, bare_answer(problem)])


def bare_answer(problem: Problem) -> str:
    """The answer alone: `#### 28`."""
    return f"#### {problem.answer}"


def slip_answer(problem: Problem, rng: random.Random) -> str:
    """A worked answer in which one result is wrong and the rest is computed from it."""
    at = rng.randrange(len(problem.steps))
    error = rng.choice((1, 2, 10)) * rng.choice((-1, 1))
    steps = _with_error(problem.steps, at, error)
    if min(step.result for step in steps) < 0:
        steps = _with_error(problem.steps, at, abs(error))
    return worked_answer(replace(problem, steps=steps))


def _with_error(steps: Sequence[Step], at: int, error: int) -> tuple[Step, ...]:
    wrong = [*steps[:at], replace(steps[at], error=error)]
    for step in steps[at + 1 :]:
        wrong.append(replace(step, left=wrong[-1].result))
    return tuple(wrong)


def styled_answer(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Return (style, answer), the style drawn from the mix of the problem's corpus."""
    mix, draw = CORPORA[problem.template.corpus], rng.random()
    if draw < mix["worked"]:
        return "worked", worked_answer(problem)
    if draw < mix["worked"] + mix["bare"]:
        return "bare", bare_answer(problem)
    return "slip", slip_answer(problem, rng)


@register_source("arithmetic")
class Arithmetic:
    """`data.source=arithmetic`: nothing is read; everything follows from settings and seed.

    `data.options.largest`: the largest number of a problem, in place of the difficulty's own.
    """

    disjoint_splits = True

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
        code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        parameters = {"difficulty": config.difficulty, "sizes": _sizes(config), "seed": seed}
        if self._largest:
            parameters["largest"] = self._largest
        return hashlib.sha256(json.dumps([code, parameters]).encode()).hexdigest()

    def load(self, config: DataConfig, seed: int) -> Splits:
        """Deal distinct problems to five splits; only the SFT splits carry written answers."""
        frames: dict[str, Any] = {}
        problems = deal_problems(_sizes(config), config.difficulty, seed, self._largest)
        for split, split_problems in problems.items():
            rng = random.Random(f"styles/{split}/{seed}")
            rows = []
            for i, problem in enumerate(split_problems):
                extra = {"kind": problem.template.name, "index": i, "split": split}
                if split.startswith("sft"):
                    style, answer = styled_answer(problem, rng)
                    rows.append(sft_row(problem.question, answer, {"style": style, **extra}))
                else:
                    truth = str(problem.answer)
                    rows.append(rl_row("arithmetic", problem.question, truth, extra))
            frames[split] = pd.DataFrame(rows)
        uri = f"arithmetic://difficulty={config.difficulty}/seed={seed}"
        return Splits(**frames, source_digest=self.digest(config, seed), source_uri=uri)


def _sizes(config: DataConfig) -> dict[str, int]:
    """Rows a split. The test split comes first, so no other size changes what is in it."""
    sizes = {"test": config.test_size}
    sizes |= dict.fromkeys(("validation", "sft_validation"), config.validation_size)
    return sizes | {"train": config.train_size, "sft_train": config.sft_size}
