"""Grade-school word problems drawn from a seed, and divided over splits without repetition.

What lives here: a problem's numbers, steps and text. The templates are in `story_templates`, the
written answers in `arithmetic`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.data.rows import normalise
from engine.data.story_templates import PEOPLE, STORY_TEMPLATES, StoryTemplate
from engine.errors import DataError


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


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a solution: `left operator right`."""

    left: int
    operator: str  # "+", "-" or "*"
    right: int

    @property
    def result(self) -> int:
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right


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
    template = rng.choice(STORY_TEMPLATES)
    name, pronoun = rng.choice(PEOPLE)
    thing = rng.choice(template.things)
    may_multiply = rng.random() < level.product_share
    steps: list[Step] = []
    if template.product and may_multiply:
        n, m = rng.randint(2, 9), rng.randint(2, 9)
        steps.append(Step(n, "*", m))
        opening, value = template.product.format(name=name, thing=thing, n=n, m=m), n * m
        if value > level.largest:
            return None
    else:
        value = rng.randint(2, level.largest)
        opening = template.opening.format(name=name, thing=thing, n=value)
    clauses: list[str] = []
    while len(steps) < level.steps:
        drawn = _draw_clause(rng, template, level, value, may_multiply, clauses)
        if drawn is None:
            return None
        step, clause = drawn
        steps.append(step)
        clauses.append(clause)
        value = step.result
    subject = template.subject.format(name=name, pronoun=pronoun)
    question = template.question.format(thing=thing)
    middle = f" {subject} {_join(clauses)}." if clauses else ""
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
    choices: list[tuple[str, str]] = []
    if value + 2 <= level.largest:
        choices += [("+", clause) for clause in template.gains]
    if value > 2:
        choices += [("-", clause) for clause in template.losses]
    if may_multiply:
        choices += [("*", c) for c, factor in template.growth if value * factor <= level.largest]
    verbs = {clause.split()[0] for clause in used}
    choices = [(op, c) for op, c in choices if c.split()[0] not in verbs] or choices
    if not choices:
        return None
    operator, clause = rng.choice(choices)
    if operator == "*":
        return Step(value, "*", dict(template.growth)[clause]), clause
    most = level.largest - value if operator == "+" else value - 1
    number = rng.randint(2, most)
    return Step(value, operator, number), clause.format(n=number)


def _join(clauses: list[str]) -> str:
    """Join clauses as a sentence does: "a", "a and b", "a, b and c"."""
    *head, last = clauses
    return f"{', '.join(head)} and {last}" if head else last


def deal_problems(
    sizes: Mapping[str, int], difficulty: int, seed: int, largest: int = 0
) -> dict[str, list[Problem]]:
    """Draw distinct problems and deal them to splits, in the order of `sizes`.

    No two problems share a text (but for case and spacing) or a key (kind, operators, numbers),
    within a split or across. A split depends on the seed and on the sizes before its own only.
    `largest` is the largest number in them; 0: as the difficulty says. Raises DataError when the
    difficulty doesn't hold that many distinct problems.
    """
    level = LEVELS[difficulty]
    level = replace(level, largest=largest or level.largest)
    rng = random.Random(f"arithmetic/{difficulty}/{seed}")
    seen_keys: set[object] = set()
    seen_texts: set[str] = set()
    dealt: dict[str, list[Problem]] = {}
    for split, size in sizes.items():
        rows: list[Problem] = []
        misses = 0
        while len(rows) < size:
            problem = draw_problem(rng, level)
            text = normalise(problem.question) if problem else ""
            if problem is None or problem.key in seen_keys or text in seen_texts:
                misses += 1
                if misses > 2000:
                    raise DataError(_exhausted(sizes, difficulty, len(seen_keys)))
                continue
            misses = 0
            seen_keys.add(problem.key)
            seen_texts.add(text)
            rows.append(problem)
        dealt[split] = rows
    return dealt


def _exhausted(sizes: Mapping[str, int], difficulty: int, found: int) -> str:
    return (
        f"data.difficulty={difficulty} has only about {found} distinct problems and the splits "
        f"ask for {sum(sizes.values())} ({', '.join(f'{k} {v}' for k, v in sizes.items())}); "
        "lower the sizes in data, or raise data.difficulty"
    )
