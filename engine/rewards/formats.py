"""Rewards for form and length, and `environment`, the reward that an episode's environment gave.

A regular expression or a schema's patterns can take any time on a text, so these are pooled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import RewardError
from engine.rewards.reward_function import declared_components, register_reward, resolve_reward


@register_reward("regular_expression", pooled=True)
def regular_expression(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    pattern: str = "",
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 where `pattern` is found, else 0.0.

    Where `pattern` has a group `(?P<answer>…)`, what its last match reads must equal the ground
    truth, but for blanks around. Raises RewardError for a pattern that is none.
    """
    if not pattern:
        raise RewardError("regular_expression looks for nothing; set reward.options.pattern")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"reward.options.pattern={pattern!r} is no pattern: {error}") from None
    pairs = zip(completions, ground_truth, strict=True)
    return [float(_matches(compiled, text, truth)) for text, truth in pairs]


def _matches(pattern: re.Pattern[str], text: str, truth: object) -> bool:
    if "answer" not in pattern.groupindex:
        return pattern.search(text) is not None
    last = None
    for last in pattern.finditer(text):  # noqa: B007 (the last one counts)
        pass
    read = last["answer"] if last else None
    return read is not None and read.strip() == str(truth).strip()


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


@register_reward("think_format", well_formed=has_tags)
def think_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    tags: tuple[str, ...] = _TAGS,
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 or 0.0 for their form, right or wrong (DeepSeek-R1's format)."""
    return [float(has_tags(text, tags)) for text in completions]


_FENCE = "```"


def json_text(text: str) -> str:
    """The text in the last fenced block, or all of it."""
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-3]
    return block.removeprefix("json").strip()


@register_reward("json_schema", pooled=True, imports=("jsonschema",), answer=json_text)
def json_schema(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    schema: dict[str, object] | None = None,
    **columns: Sequence[object],
) -> list[float]:
    """Score B completions 1.0 where they are JSON that keeps a JSON schema, else 0.0.

    Without `schema`, each row's ground truth is one, as JSON text. `$ref` reaches nothing outside
    of the schema. Raises RewardError for a schema that is none.
    """
    pairs = zip(completions, ground_truth, strict=True)
    return [
        float(_keeps_schema(text, truth if schema is None else schema)) for text, truth in pairs
    ]


def _keeps_schema(text: str, schema: object) -> bool:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        rules = json.loads(schema) if isinstance(schema, str) else schema
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
        value = json.loads(json_text(text), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(validator(rules, registry=Registry()).is_valid(value))
    except RecursionError:  # deeper than any answer needs to be
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def least_of_right(
    right: tuple[float, float] = (1.0, 0.5), wrong: tuple[float, float] = (-1.0, -0.5)
) -> float:
    """The least score of a right answer; more than any of a wrong one, where they differ at all."""
    return max(min(right), math.nextafter(max(wrong), math.inf))


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
    (DAPO's penalty near the limit of tokens is `reward.overlong_buffer`.)
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
        scores.append(last + 0.5 * (first - last) * (1 + math.cos(share * math.pi)))
    return scores


NAME = "environment"


@register_reward(NAME)
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
