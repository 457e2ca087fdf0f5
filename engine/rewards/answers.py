"""Rewards by rules: right answers, form and length, and what an episode's environment gave.

GSM8K's answer line (`answer_match`, `answer_and_format`), MATH's boxed answer (`math`), the letter
of a multiple choice (`multiple_choice`), text (`exact_match`, `normalised_match`), patterns, tags,
JSON, and `environment`. What can take any time on a text is pooled.
"""

from __future__ import annotations

import json
import re
import string
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import cos, inf, nextafter, pi
from typing import Any, Literal

from engine.errors import RewardError
from engine.rewards.reward_function import (
    declared_components,
    register_reward,
    register_row_reward,
    resolve_reward,
)

# GSM8K's rule: the number after the last `####`.

_NUMBER = r"[-+]?\$?[-+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
# What follows must not continue the number: "1e5", "1/2" and "1.2.3" are not answers we can read.
_AFTER_MARK = re.compile(rf"[ \t]*({_NUMBER})(?![./:]?[0-9A-Za-z])")
_ANYWHERE = re.compile(rf"(?<![0-9A-Za-z.,]){_NUMBER}|(?<=[A-Za-z=(]){_NUMBER}")
_LAST_LINE = re.compile(rf"####[ \t]*{_NUMBER}[ \t]*")
_LONGEST = 64  # characters; no answer needs more, and a longer one must not cost time
_NUMBER_TAIL = 1000  # characters at the end in which `flexible` looks for the last number


def extract_answer(text: str, *, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the number right after the last `####`, normalised, or None where there is none.

    `flexible`: the last number of the text, with its currency, unit or per cent left out.

    >>> extract_answer("<<600+634=1234>>1234\\n#### $1,234.")
    '1234'
    >>> extract_answer("So she pays $1,234.50 (or 5% less).", method="flexible")
    '5'
    """
    if method == "flexible":
        numbers = [match.group() for match in _ANYWHERE.finditer(text[-_NUMBER_TAIL:])]
        return normalise_number(numbers[-1]) if numbers else None
    _, mark, rest = text.rpartition("####")
    match = _AFTER_MARK.match(rest) if mark else None
    return normalise_number(match.group(1)) if match else None


def has_format(text: str) -> bool:
    """Whether the text ends with a line `#### <number>`, and has no other `####`."""
    last = text.rstrip().rpartition("\n")[2]
    return text.count("####") == 1 and _LAST_LINE.fullmatch(last) is not None


def normalise_number(text: str) -> str | None:
    """Drop dollar signs, commas, trailing dots and zeros; None where `text` is not a number."""
    text = text.strip()
    if len(text) > _LONGEST or not re.fullmatch(_NUMBER, text):
        return None
    digits = re.sub(r"[$,]", "", text)
    sign = "-" if digits.count("-") % 2 else ""
    plain = format(Decimal(digits.lstrip("+-")), "f")
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    plain = plain.lstrip("0") or "0"
    plain = "0" + plain if plain.startswith(".") else plain
    return plain if plain == "0" else sign + plain


@register_row_reward("answer_match", answer=extract_answer, well_formed=has_format)
def answer_match(
    completion: str, truth: object, *, method: Literal["strict", "flexible"] = "strict"
) -> bool:
    """Whether `extract_answer` gives the ground truth; RewardError where that is no number."""
    expected = normalise_number(str(truth))
    if expected is None:
        raise RewardError(
            f"ground_truth is {truth!r}, not a number; answer_match compares numbers only, so "
            "correct the row or choose another reward.name"
        )
    return extract_answer(completion, method=method) == expected


@register_reward(
    "answer_and_format",
    components=("answer", "format"),
    answer=extract_answer,
    well_formed=has_format,
)
def answer_and_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    **columns: Sequence[object],
) -> dict[str, list[float]]:
    """Give B completions 1.0 or 0.0 for `answer` (see `answer_match`) and for `format`.

    `format` is 1.0 where the text ends with its only `#### <number>` line, right or wrong. Raises
    RewardError where a ground truth is not a number.
    """
    return {
        "answer": answer_match(prompts, completions, ground_truth=ground_truth),
        "format": [float(has_format(text)) for text in completions],
    }


# The answer in LaTeX's `\boxed{…}`, as MATH's solutions and many models write it.

LONGEST = 1000  # characters of an answer in LaTeX
_MARKS = ("\\boxed{", "\\fbox{")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` or `\\fbox{…}`; None where there is none, or no end.

    >>> last_boxed(r"so \\boxed{1} or \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start, mark = max((text.rfind(mark), mark) for mark in _MARKS)
    if start < 0:
        return None
    first = start + len(mark)
    depth = 1
    for i in range(first, min(len(text), first + LONGEST)):
        letter = text[i]
        if letter in "{}" and text[i - 1] != "\\":
            depth += 1 if letter == "{" else -1
            if not depth:
                return text[first:i].strip()
    return None


_MATH_TAIL = 2000  # characters at the end that are searched for an answer without a box


@register_row_reward(
    "math", pooled=True, imports=("engine.rewards._latex_equality",), answer=last_boxed
)
def math(completion: str, truth: object, *, boxed_only: bool = False) -> bool:
    """Whether a completion's answer equals the ground truth as mathematics (MATH).

    The answer is in the last box; without one it is the last expression of the text, or with
    `boxed_only` none. A ground truth is LaTeX, e.g. "\\frac{1}{2}", or a solution that has it in a
    box. `math-verify` compares, which can take any time and memory: in a pool's process.
    """
    expected = (last_boxed(str(truth)) or str(truth)).strip().strip("$").strip()
    boxed = last_boxed(completion)
    if boxed is None and (boxed_only or "\\boxed" in completion):  # a box without an end
        return False
    if boxed is not None and _plain(boxed) == _plain(expected):
        return True
    if len(expected) > LONGEST:
        return False
    from engine.rewards._latex_equality import equal

    answer = completion[-_MATH_TAIL:] if boxed is None else f"\\boxed{{{boxed}}}"
    return equal(f"\\boxed{{{expected}}}", answer)


def _plain(latex: str) -> str:
    """LaTeX without what changes nothing: blanks, `\\left`, `\\dfrac`, a full stop."""
    for old, new in (("\\left", ""), ("\\right", ""), ("dfrac", "frac"), ("tfrac", "frac")):
        latex = latex.replace(old, new)
    return "".join(latex.split()).rstrip(".")


# The letter of a multiple choice.

_CHOICE_TAIL = 2000  # characters at the end that are searched
_STATED = re.compile(
    r"(?i:answer|choice|option)\b[\s:*]{0,8}(?:(?i:is)\b[\s:*]{0,8})?[(\[]?([A-Z])\b"
)
_LETTER = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")


def choice(text: str) -> str | None:
    """The letter that a text settles on: boxed, after "answer", or the last that stands alone.

    >>> choice("Not A, since … so the answer is (C)."), choice("B"), choice("Choice: **D**")
    ('C', 'B', 'D')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        text = re.sub(r"\\[a-z]+", " ", boxed)
    tail = text[-_CHOICE_TAIL:]
    letters = _STATED.findall(tail) or _LETTER.findall(tail)
    return letters[-1] if letters else None


@register_row_reward("multiple_choice", answer=choice)
def multiple_choice(completion: str, truth: object) -> bool:
    """Whether `choice` gives the ground truth: a letter, or the number of the right one from 0.

    Raises RewardError where it is neither.
    """
    letter = str(truth).strip().strip("().").upper()
    if letter.isascii() and letter.isdigit() and int(letter[:3]) < 26:
        letter = chr(ord("A") + int(letter[:3]))
    if len(letter) != 1 or not "A" <= letter <= "Z":
        raise RewardError(
            f"ground_truth is {truth!r}; multiple_choice needs a letter from A to Z, or the "
            "number of the right choice, from 0"
        )
    return choice(completion) == letter


# Text that equals the ground truth, or one of a list of right answers.

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def text_answer(text: str, *, after: str = "") -> str | None:
    """The text after the last `after`, stripped; None where `after` is not there.

    >>> text_answer("It rains. Answer: yes ", after="Answer:")
    'yes'
    """
    _, mark, rest = text.rpartition(after) if after else ("", "all", text)
    return rest.strip() if mark else None


def normalised(text: str) -> str:
    """Return text in lower case, without punctuation, articles and doubled blanks (as SQuAD does).

    >>> normalised("The  Eiffel Tower!")
    'eiffel tower'
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


@register_row_reward("exact_match", answer=text_answer)
def exact_match(completion: str, truth: object, *, after: str = "") -> bool:
    """Whether a text equals the ground truth, or one of its list, but for blanks around.

    With `after`, what follows the last `after` counts, e.g. "Answer:".
    """
    return _matches(completion, truth, after, str.strip)


@register_row_reward("normalised_match", answer=text_answer)
def normalised_match(completion: str, truth: object, *, after: str = "") -> bool:
    """As `exact_match`, both sides `normalised`."""
    return _matches(completion, truth, after, normalised)


def _matches(completion: str, truth: object, after: str, form: Callable[[str], str]) -> bool:
    answer = text_answer(completion, after=after)
    truths = truth if isinstance(truth, list | tuple) else [truth]
    return answer is not None and form(answer) in {form(str(right)) for right in truths}


# Form and length.


@register_row_reward("regular_expression", pooled=True)
def regular_expression(completion: str, truth: object, *, pattern: str = "") -> bool:
    """Whether `pattern` is found; raise RewardError for a pattern that is none.

    Where `pattern` has a group `(?P<answer>…)`, what its last match reads must equal the ground
    truth, but for blanks around.
    """
    if not pattern:
        raise RewardError("regular_expression looks for nothing; set reward.options.pattern")
    compiled = compiled_pattern(pattern)
    if "answer" not in compiled.groupindex:
        return compiled.search(completion) is not None
    last = deque(compiled.finditer(completion), maxlen=1)
    answer = last[0]["answer"] if last else None
    return answer is not None and answer.strip() == str(truth).strip()


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression `reward.options.pattern`; raise RewardError where it is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RewardError(f"reward.options.pattern={pattern!r} is no pattern: {error}") from None


_TAGS = ("think", "answer")


def has_tags(text: str, tags: Sequence[str] = _TAGS) -> bool:
    """Whether each tag stands once, in order, closed, with nothing but blanks outside of them.

    >>> has_tags("<think>2+2</think> <answer>4</answer>", ("think", "answer"))
    True
    """
    rest = text.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if text.count(start) != 1 or text.count(end) != 1 or not rest.startswith(start):
            return False
        _, closed, rest = rest.partition(end)
        if not closed:
            return False
        rest = rest.lstrip()
    return not rest


@register_row_reward("think_format", well_formed=has_tags)
def think_format(completion: str, truth: object, *, tags: tuple[str, ...] = _TAGS) -> bool:
    """Whether a completion keeps its form, right or wrong (DeepSeek-R1's format)."""
    return has_tags(completion, tags)


_FENCE = "```"


def json_text(text: str) -> str:
    """The text in the last fenced block, or all of it."""
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-3]
    return block.removeprefix("json").strip()


@register_row_reward("json_schema", pooled=True, imports=("jsonschema",), answer=json_text)
def json_schema(completion: str, truth: object, *, schema: dict[str, object] | None = None) -> bool:
    """Whether a completion is JSON that keeps a JSON schema.

    Without `schema`, the row's ground truth is one, as JSON text. `$ref` reaches nothing outside
    of the schema. Raises RewardError for a schema that is none.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        rules: Any = truth if schema is None else schema
        rules = json.loads(rules) if isinstance(rules, str) else rules
        if not isinstance(rules, Mapping | bool):
            raise ValueError(f"it is of type {type(rules).__name__}")
        validator = validator_for(rules)
        validator.check_schema(rules)
    except (ValueError, SchemaError) as error:
        reason = getattr(error, "message", str(error))
        raise RewardError(
            f"the JSON schema is none ({reason}); correct reward.options.schema or the ground truth"
        ) from None
    try:
        value = json.loads(json_text(completion), parse_constant=_no_constant)
        return bool(validator(rules, registry=Registry()).is_valid(value))
    except (ValueError, RecursionError):  # no JSON, or deeper than any answer needs to be
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def least_of_right(
    right: tuple[float, float] = (1.0, 0.5), wrong: tuple[float, float] = (-1.0, -0.5)
) -> float:
    """The least score of a right answer; more than any of a wrong one, where they differ at all."""
    return max(min(right), nextafter(max(wrong), inf))


@register_reward("cosine_length", pooled=True, right_from=least_of_right)
def cosine_length(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    answer: str = "answer_match",
    max_length: int = 4000,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions by the cosine of their length: a short right one is worth more.

    Yeo et al. 2025 (arXiv:2502.03373), with the values of open-r1; a short wrong one is worth less.
    `answer` is the reward that says which are right; `right` and `wrong` are the scores of an
    empty completion and of one of `max_length` characters or more. Raises RewardError for an
    `answer` that has components.
    """
    if ":" in answer or declared_components(answer) != ():
        raise RewardError(
            f"reward.options.answer={answer!r} is not one of the engine's rewards with one score"
        )
    if max_length < 1:
        raise RewardError(f"reward.options.max_length={max_length} must be at least 1")
    judge: Callable[..., Any] = resolve_reward(answer)
    marks = judge(prompts, completions, ground_truth=ground_truth, **columns)
    scores = []
    for text, mark in zip(completions, marks, strict=True):
        first, last = right if mark >= 1 else wrong
        share = min(len(text) / max_length, 1.0)
        scores.append(last + 0.5 * (first - last) * (1 + cos(share * pi)))
    return scores


ENVIRONMENT = "environment"


@register_reward(ENVIRONMENT)
def environment(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    episode_reward: Sequence[float] | None = None,
    **columns: Sequence[object],
) -> list[float]:
    """Give each episode the sum of its environment's rewards (docs/agents.md).

    The reward role leaves each turn's part on that turn. Raises RewardError without episodes.
    """
    if episode_reward is None:
        raise RewardError(
            "reward.name=environment reads what an environment gave, and these completions are no "
            "episodes; set rollout.multi_turn.enable, or name another reward"
        )
    return [float(reward) for reward in episode_reward]
