"""Rewards by rules: right answers, form and length, and what an episode's environment gave.

GSM8K's answer line (`answer_match`, `answer_and_format`), MATH's boxed answer (`math`), the letter
of a multiple choice (`multiple_choice`), text (`exact_match`, `normalised_match`), patterns, tags,
JSON, and `environment`. What can take any time on a text is pooled.
"""

import json
import re
import string
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import cos, inf, nextafter, pi
from typing import Any, Literal, TypeAlias
from unicodedata import normalize

from engine.errors import RewardError
from engine.final_answers import (
    ALTERNATIVES,
    LONGEST,
    NUMBER_WORDS,
    DecimalMark,
    Method,
    after_thinking,
    as_ascii,
    boxed_answer,
    choice,
    extract_answer,
    has_box,
    has_format,
    last_boxed,
    last_letter,
    normalise_number,
    read_number,
    stated_answer,
)
from engine.rewards.reward_function import (
    declared_components,
    register_reward,
    register_row_reward,
    resolve_reward,
)

AnswerKind: TypeAlias = Literal["number", "letter", "latex", "text", "other"]
_LONGEST_TEXT = 200  # characters of an answer; what is longer is tests, a schema or a solution


def answer_text(truth: object) -> str:
    """The answer that a ground truth states: the first of a list, the box of a solution."""
    first = truth[0] if isinstance(truth, list | tuple) and truth else truth
    text = "" if first is None else str(first)
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip().strip("$").strip()


def _empty(truth: object) -> RewardError:
    return RewardError(f"ground_truth is {truth!r}, which is empty; correct or drop the row")


@lru_cache(maxsize=4096)
def answer_kind(answer: str) -> AnswerKind:
    """What an answer is, by its text."""
    if normalise_number(answer) is not None:
        return "number"
    if len(letter := answer.strip("(). ")) == 1 and "A" <= letter <= "Z":
        return "letter"
    if not answer or len(answer) > _LONGEST_TEXT or "\n" in answer or answer[0] in "{[":
        return "other"
    return "latex" if "\\" in answer else "text"


# The lenient readings, which take a part of the last line for the answer. No score comes of them.


def lenient_match(completion: str, truth: object) -> bool | None:
    """Whether the ground truth, or one of its list, stands in the last line of a completion.

    Of a letter, whether it is the last one that stands alone. None for a truth that is no answer.
    """
    truths = [
        answer_text(right) for right in (truth if isinstance(truth, list | tuple) else [truth])
    ]
    kinds = {answer_kind(right) for right in truths} - {"other"}
    if kinds <= {"letter"}:
        return lenient_choice(completion, truths[0]) if kinds else None
    line = _words(completion.strip().rpartition("\n")[2])
    return any(_words(right).strip() and _words(right) in line for right in truths)


def _words(text: str) -> str:
    words = re.findall(r"\d[\d,]*(?:\.\d+)?|[^\W\d]+", as_ascii(text[-LONGEST:]).lower())
    return f" {' '.join(word.replace(',', '') for word in words)} "


def lenient_choice(completion: str, truth: object) -> bool:
    """Whether the last letter that stands alone in a completion is the right one."""
    return last_letter(completion) == _right_letter(truth)


# GSM8K's rule: the number after the last `####`.

_BY_ROW = ("decimal_mark",)


@register_row_reward(
    "answer_match", answer=extract_answer, well_formed=has_format, row_options=_BY_ROW
)
def answer_match(
    completion: str, truth: object, *, method: Method = "strict", decimal_mark: DecimalMark = "."
) -> bool:
    """Whether `extract_answer` gives the ground truth; RewardError where that is no number.

    `decimal_mark` says how numbers are written: "1,234.5", or with "," "1.234,5". A row's column of
    that name says it for the row.
    """
    if decimal_mark not in (".", ","):
        raise RewardError(f"decimal_mark is {decimal_mark!r}; give '.' or ','")
    expected = normalise_number(truth, decimal_mark)
    if expected is None:
        raise RewardError(
            f"ground_truth is {truth!r}, not a number; answer_match compares numbers only, so "
            "correct the row or choose another reward.name"
        )
    return extract_answer(completion, method=method, decimal_mark=decimal_mark) == expected


@register_reward(
    "answer_and_format",
    components=("answer", "format"),
    answer=extract_answer,
    well_formed=has_format,
    row_options=_BY_ROW,
)
def answer_and_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    decimal_mark: DecimalMark = ".",
    **columns: Sequence[object],
) -> dict[str, list[float | None]]:
    """Give B completions 1.0 or 0.0 for `answer` (see `answer_match`) and for `format`.

    `format` is 1.0 where the text ends with its only `#### <number>` line, right or wrong. Raises
    RewardError where a ground truth is not a number.
    """
    marks = {"decimal_mark": decimal_mark}  # one for all rows, or a column
    return {
        "answer": answer_match(prompts, completions, ground_truth=ground_truth, **marks),
        "format": [float(has_format(text)) for text in completions],
    }


# The answer in LaTeX's `\boxed{…}`, as MATH's solutions and many models write it.


def _math_text(text: str, boxed_only: bool) -> str | None:
    text = after_thinking(text)
    return boxed_answer(text) if boxed_only or has_box(text) else stated_answer(text)


def math_answer(
    text: str, *, boxed_only: bool = False, decimal_mark: DecimalMark = "."
) -> str | None:
    """The answer that `math` compares; numbers are normalised."""
    answer = _math_text(text, boxed_only)
    return answer and (normalise_number(answer, decimal_mark) or answer)


@register_row_reward(
    "math",
    pooled=True,
    imports=("engine.rewards._latex_equality",),
    answer=math_answer,
    row_options=_BY_ROW,
)
def math(
    completion: str, truth: object, *, boxed_only: bool = False, decimal_mark: DecimalMark = "."
) -> bool:
    """Whether a completion's answer equals the ground truth as mathematics (MATH).

    The answer is in the last box; without one it is the one that is stated (see `stated_answer`),
    or with `boxed_only` none. A ground truth is LaTeX, e.g. "\\frac{1}{2}", or a solution that has
    it in a box; raises RewardError for an empty one. `math-verify` compares, which can take any
    time and memory: in a pool's process.
    """
    expected, answer = as_ascii(answer_text(truth)), _math_text(completion, boxed_only)
    if not expected:
        raise _empty(truth)
    expected = _with_point(expected, decimal_mark if isinstance(truth, str) else ".")
    if not answer or len(expected) > LONGEST or len(answer) > LONGEST:
        return bool(answer) and answer == expected
    return _same_mathematics(_with_point(as_ascii(answer), decimal_mark), expected)


def _with_point(latex: str, decimal_mark: DecimalMark) -> str:
    """LaTeX with decimal points, and "," between thousands."""
    latex = latex.replace("{,}", ",")
    if decimal_mark == ",":
        latex = re.sub(r"(?<=\d)\.(?=\d{3}(?!\d))", "", latex)
        latex = re.sub(r"(?<=\d),(?=\d)", ".", latex)
    return latex


# What math-verify passes over: it takes the end of a chain, the last of two lines, a number without
# its base or the word after it. An answer that has more of it than the ground truth is none.
_RELATION = re.compile(
    r"=|[<>≈≤≥≠→]|\\(?:leq?|geq?|neq?|lt|gt|approx|sim|simeq|equiv|cong|to|rightarrow|implies|iff"
    r"|Rightarrow)(?![A-Za-z])"
)
_LEFT_OVER = re.compile(
    r"\\\\|(?<=\d)_|\\[pb]?mod\b|\\[lc]?dots\b|\.\.|(?<=\d)(?<!_\d)\s+(?!\d{3}(?!\d))(?=\d)|[?;]|\\q?quad\b"
    r"|[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]"
)
_NAMED = re.compile(
    r"((?=.*[A-Za-z])(?:[^=<>≤≥≠≈\d,]|_\{\d+\}|_\d+|,(?=[^()]*\)))+?)(?:=|\\in\b|∈)(.+)", re.DOTALL
)
_INTEGER = re.compile(r"-?\d{1,15}", re.ASCII)  # whose comparison needs no parser
_OR = re.compile(
    r",?\s*\\(?:text|mathrm)\{\s*,?\s*(?:or|and)\s*,?\s*\}\s*|(?<=[^\s{,]),?\s+(?:or|and)\s+"
)
_COMMA = r",(?!(?<=\d,)\d{3}(?!\d))"  # one before three digits parts no list
_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_PLAIN_WORDS = NUMBER_WORDS - {"pi", "mod", "minus"} | ALTERNATIVES


def _same_mathematics(answer: str, expected: str) -> bool:
    number = read_number(expected)
    if _plain(answer) == _plain(expected) or (number and read_number(answer) == number):
        return True
    answer, truth = _OR.sub(", ", answer.strip()), _OR.sub(", ", expected)
    if not _RELATION.search(expected):  # "x = 5" names what is 5
        answer = ", ".join(map(_value, _parts(answer))).strip()
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(expected):
        return int(answer) == int(expected)
    if not _says_no_more(answer, truth):
        return False
    from engine.rewards._latex_equality import equal

    return equal(f"\\boxed{{{expected}}}", f"\\boxed{{{answer}}}")


def _value(part: str) -> str:
    """What follows the name of a value, e.g. "5" of "x_1 = 5"."""
    named = _NAMED.fullmatch(part.strip())
    return part if named is None or _words_of(named[1]) & _PLAIN_WORDS else named[2]


def _words_of(latex: str) -> set[str]:
    return set(re.findall("[a-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", latex.lower())))


def _says_no_more(answer: str, truth: str) -> bool:
    """Whether an answer is of the truth's size, and has nothing that math-verify passes over."""
    sizes = (_size(answer, comma) == _size(truth, comma) for comma in (_COMMA, ","))
    if not any(sizes) and "\\pm" not in answer + truth:
        return False
    relations, allowed = (len(_RELATION.findall(text)) for text in (answer, truth))
    variables = [set(_VARIABLE.findall(text)) for text in (answer, truth)]
    if relations > allowed or (relations and variables[0] != variables[1]):
        return False
    if Counter(_LEFT_OVER.findall(answer)) - Counter(_LEFT_OVER.findall(truth)):
        return False
    return not (_words_of(answer) - _words_of(truth)) & _PLAIN_WORDS


def _parts(latex: str, comma: str = _COMMA) -> list[str]:
    """The parts between commas that are outside of brackets."""
    return re.findall(rf"(?:[(\[{{][^()\[\]{{}}]*[)\]}}]|(?!{comma}).)+", latex, re.DOTALL)


def _size(latex: str, comma: str) -> int:
    """How many parts a list has, in brackets or not."""
    text = _plain(latex)
    enclosed = re.fullmatch(r"(?:\\\{|[(\[])(.*?)(?:\\\}|[)\]])", text, re.DOTALL)
    return len(_parts(enclosed[1] if enclosed else text, comma))


def _plain(latex: str) -> str:
    """LaTeX without what changes nothing: blanks, `\\left`, `\\dfrac`, a full stop."""
    for old, new in (("\\left", ""), ("\\right", ""), ("dfrac", "frac"), ("tfrac", "frac")):
        latex = latex.replace(old, new)
    two_numbers = re.sub(r"(?<=\d)\s+(?=\d)(?!\d{3}(?!\d))", ";", latex)  # 5 6 is not 56
    return "".join(two_numbers.split()).strip("$").rstrip(".")


# The letter of a multiple choice.


@register_row_reward("multiple_choice", answer=choice, lenient=lenient_choice)
def multiple_choice(completion: str, truth: object) -> bool:
    """Whether `choice` gives the truth, a letter or its number from 0; RewardError for neither."""
    return choice(completion) == _right_letter(truth)


def _right_letter(truth: object) -> str:
    letter = as_ascii(str(truth)).strip().strip("().").upper()
    if letter.isascii() and letter.isdigit() and int(letter[:3]) < 26:
        letter = chr(ord("A") + int(letter[:3]))
    if len(letter) != 1 or not "A" <= letter <= "Z":
        raise RewardError(
            f"ground_truth is {truth!r}; multiple_choice needs a letter from A to Z, or the "
            "number of the right choice, from 0"
        )
    return letter


# Text that equals the ground truth, or one of a list of right answers.

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# What is more than punctuation in a number stays: -5, 1.5, .5, 3/4, 18-20.
_IN_NUMBER = r"(?<=\d)(?:[^\w\s,]|,(?!\d{3}(?!\d)))(?=\d)|(?<!\w)-(?=[.$]?\d)|(?<!\w)\.(?=\d)"
_PUNCTUATION = re.compile(rf"(?!{_IN_NUMBER})[{re.escape(string.punctuation)}]")


def text_answer(text: str, *, after: str = "") -> str | None:
    """The text after thinking and the last `after`, stripped; None where `after` is not there.

    >>> text_answer("It rains. Answer: yes ", after="Answer:")
    'yes'
    """
    text = after_thinking(text)
    _, mark, rest = text.rpartition(after) if after else ("", "all", text)
    return rest.strip() if mark else None


def normalised(text: str) -> str:
    """Return text in lower case, without punctuation, articles and doubled blanks (as SQuAD does).

    Signs in numbers stay, and articles where there is nothing else.

    >>> normalised("The  Eiffel Tower!"), normalised("$-1,234.5."), normalised("A")
    ('eiffel tower', '-1234.5', 'a')
    """
    bare = _PUNCTUATION.sub("", as_ascii(text).lower())
    return " ".join(_ARTICLES.sub(" ", bare).split()) or bare.strip()


@register_row_reward("exact_match", answer=text_answer)
def exact_match(completion: str, truth: object, *, after: str = "") -> bool:
    """Whether a text equals the ground truth, or one of its list, but for blanks around.

    With `after`, what follows the last `after` counts, e.g. "Answer:".
    """
    return _matches(completion, truth, after, str.strip)


@register_row_reward("normalised_match", answer=text_answer)
def normalised_match(completion: str, truth: object, *, after: str = "") -> bool:
    """Whether a text equals the ground truth, or one of its list, both sides `normalised`."""
    return _matches(completion, truth, after, normalised)


def _matches(completion: str, truth: object, after: str, form: Callable[[str], str]) -> bool:
    truths = truth if isinstance(truth, list | tuple) else [truth]
    right = {"" if text is None else form(normalize("NFC", str(text))) for text in truths}
    if not right or "" in right:  # an empty completion would match
        raise _empty(truth)
    answer = text_answer(completion, after=after)
    return answer is not None and form(normalize("NFC", answer)) in right


# Form and length.


@register_row_reward(
    "regular_expression",
    pooled=True,
    form_only=lambda options: "(?P<answer>" not in str(options.get("pattern")),
)
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
    if truth is None or not str(truth).strip():
        raise _empty(truth)
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


@register_row_reward("think_format", well_formed=has_tags, form_only=lambda options: True)
def think_format(completion: str, truth: object, *, tags: tuple[str, ...] = _TAGS) -> bool:
    """Whether a completion keeps its form, right or wrong (DeepSeek-R1's format)."""
    return has_tags(completion, tags)


_FENCE = "```"


def json_text(text: str) -> str:
    """The text in the last fenced block, or all of it, after thinking."""
    text = after_thinking(text)
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-3]
    return block.removeprefix("json").strip()


@register_row_reward(
    "json_schema",
    pooled=True,
    imports=("jsonschema",),
    answer=json_text,
    form_only=lambda options: True,
)
def json_schema(completion: str, truth: object, *, schema: dict[str, object] | None = None) -> bool:
    """Whether a completion is JSON that keeps a JSON schema.

    Without `schema`, the row's ground truth is one, as JSON text. `$ref` reaches nothing outside
    of the schema. Raises RewardError for a schema that is none.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        rules = truth if schema is None else schema
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
) -> list[float | None]:
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

    def scored(text: str, mark: float | None) -> float | None:
        if mark is None:
            return None
        first, last = right if mark >= 1 else wrong
        share = min(len(text) / max_length, 1.0)
        return last + 0.5 * (first - last) * (1 + cos(share * pi))

    return list(map(scored, completions, marks))


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
