"""Templates of the arithmetic word problems: data only, no random draws.

A story starts with a number, continues with clauses that add, subtract or multiply, and ends with
a question. Each template belongs to one corpus, whose mix of answer styles `arithmetic` defines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoryTemplate:
    """A kind of story; the generator fills in `{name}`, `{thing}`, `{n}` and `{m}`."""

    name: str  # the problem's kind, e.g. "shop"
    corpus: str  # the corpus that it belongs to, e.g. "workbook"
    things: tuple[str, ...]  # plural nouns, e.g. ("pens", "books")
    opening: str  # with {n}, e.g. "{name} has {n} {thing}."
    gains: tuple[str, ...] = ()  # clauses that add, e.g. ("buys {n}",)
    losses: tuple[str, ...] = ()  # clauses that take away, e.g. ("sells {n}",)
    product: str = ""  # an opening worth {n} × {m}; empty: none
    growth: tuple[tuple[str, int], ...] = ()  # clauses that multiply, e.g. (("doubles them", 2),)
    question: str = "How many {thing} now?"  # the last sentence
    subject: str = "{pronoun}"  # who acts in the clauses: the person, "It", ...


PEOPLE: tuple[tuple[str, str], ...] = (
    ("Tom", "He"),
    ("Ann", "She"),
    ("Sam", "He"),
    ("Mia", "She"),
    ("Ben", "He"),
    ("Eva", "She"),
    ("Max", "He"),
    ("Zoe", "She"),
    ("Leo", "He"),
    ("Amy", "She"),
)

STORY_TEMPLATES: tuple[StoryTemplate, ...] = (
    StoryTemplate(
        "pocket",
        "workbook",
        ("apples", "nuts", "plums"),
        "{name} has {n} {thing}.",
        gains=("buys {n}", "finds {n}"),
        losses=("eats {n}", "loses {n}"),
        product="{name} has {n} bags of {m} {thing}.",
    ),
    StoryTemplate(
        "shop",
        "workbook",
        ("pens", "books", "cups"),
        "A shop has {n} {thing}.",
        gains=("gets {n}", "buys {n}"),
        losses=("sells {n}", "loses {n}"),
        product="A shop has {n} boxes of {m} {thing}.",
        subject="It",
    ),
    StoryTemplate(
        "colours",
        "workbook",
        ("cars", "balls", "cups"),
        "{name} has {n} red {thing}.",
        gains=("gets {n} blue", "buys {n} old", "finds {n} new"),
        question="How many {thing} in all?",
    ),
    StoryTemplate(
        "pages",
        "workbook",
        ("pages",),
        "A book has {n} {thing}.",
        losses=("reads {n}", "skips {n}"),
        product="A book has {n} parts of {m} {thing}.",
        question="How many {thing} are left?",
        subject="{name}",
    ),
    StoryTemplate(
        "bus",
        "workbook",
        ("people", "kids"),
        "A bus has {n} {thing}.",
        gains=("picks up {n}", "takes {n}"),
        losses=("drops {n}", "leaves {n}"),
        product="A bus has {n} rows of {m} {thing}.",
        subject="It",
    ),
    StoryTemplate(
        "savings",
        "forum",
        ("dollars",),
        "{name} has {n} {thing}.",
        gains=("earns {n}", "saves {n}"),
        losses=("pays {n}", "loses {n}"),
        growth=(("doubles it", 2), ("triples it", 3)),
    ),
    StoryTemplate(
        "farm",
        "forum",
        ("cows", "hens", "pigs"),
        "A farm has {n} {thing}.",
        gains=("buys {n}", "gets {n}"),
        losses=("sells {n}", "loses {n}"),
        product="A farm has {n} pens of {m} {thing}.",
        subject="It",
    ),
    StoryTemplate(
        "game",
        "forum",
        ("points",),
        "{name} has {n} {thing}.",
        gains=("wins {n}", "gets {n}"),
        losses=("loses {n}", "pays {n}"),
        growth=(("doubles them", 2),),
    ),
    StoryTemplate(
        "goal",
        "forum",
        ("dollars", "points"),
        "{name} needs {n} {thing}.",
        losses=("earns {n}", "gets {n}", "finds {n}"),
        question="How many more?",
    ),
    StoryTemplate(
        "baker",
        "forum",
        ("cakes", "pies", "rolls"),
        "{name} makes {n} {thing}.",
        gains=("buys {n}", "adds {n}"),
        losses=("sells {n}", "eats {n}", "burns {n}"),
        product="{name} makes {n} trays of {m} {thing}.",
    ),
    StoryTemplate(
        "garden",
        "answer_key",
        ("roses", "trees", "beans"),
        "{name} plants {n} {thing}.",
        gains=("adds {n}", "finds {n}"),
        losses=("cuts {n}", "sells {n}"),
        product="{name} plants {n} rows of {m} {thing}.",
    ),
    StoryTemplate(
        "library",
        "answer_key",
        ("books", "maps"),
        "A library has {n} {thing}.",
        gains=("gets {n}", "buys {n}"),
        losses=("lends {n}", "loses {n}"),
        product="A library has {n} rows of {m} {thing}.",
        subject="It",
    ),
    StoryTemplate(
        "walk",
        "answer_key",
        ("miles",),
        "{name} walks {n} {thing}.",
        gains=("runs {n}", "rides {n}", "swims {n}"),
        question="How many {thing} in all?",
    ),
    StoryTemplate(
        "trip",
        "answer_key",
        ("miles",),
        "A trip is {n} {thing}.",
        losses=("walks {n}", "rides {n}", "runs {n}"),
        question="How many {thing} are left?",
        subject="{name}",
    ),
    StoryTemplate(
        "cards",
        "answer_key",
        ("cards", "stamps"),
        "{name} has {n} {thing}.",
        gains=("wins {n}", "finds {n}"),
        losses=("loses {n}", "sells {n}"),
        product="{name} has {n} packs of {m} {thing}.",
    ),
)
