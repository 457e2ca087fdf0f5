"""Rewards for form and length, and `environment`, the reward that an episode's environment gave.

A regular expression or a schema's patterns can take any time on a text, so these are pooled.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import RewardError
from engine.rewards.reward_function import (
    declared_components,
    register_reward,
    register_row_reward,
    resolve_reward,
)


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
