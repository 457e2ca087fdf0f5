"""Whether a completion has its parts in tags, e.g. `<think>…</think><answer>…</answer>`."""

from __future__ import annotations

from collections.abc import Sequence

from engine.rewards.registry import register_reward

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
