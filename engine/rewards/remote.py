"""A scorer behind HTTP: yours, in any language, on any machine.

POST url  {"prompts": […], "completions": […], "columns": {"ground_truth": […], …}}
answer    {"scores": [0.5, …]}, one finite number a completion
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from engine.errors import RewardError
from engine.rewards.http_calls import Caller, each
from engine.rewards.registry import register_reward


def passing(pass_from: float = 1.0) -> float:
    """The least score of a right completion."""
    return pass_from


@register_reward("remote", right_from=passing)
async def remote(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    ground_truth: Sequence[object],
    url: str = "",
    batch_size: int = 32,
    concurrency: int = 8,
    retries: int = 3,
    request_timeout_s: float = 10.0,
    api_key_env: str = "",
    pass_from: float = 1.0,
    **columns: Sequence[object],
) -> Sequence[float]:
    """Score B completions in requests of `batch_size`, with a deadline and retries each.

    A request that fails costs its completions. Raises RewardError without a `url`.
    """
    if not url or batch_size < 1:
        raise RewardError(
            "reward 'remote' needs reward.options.url, and a batch_size of at least 1"
        )
    table = {"ground_truth": ground_truth, **columns}
    starts = range(0, len(completions), batch_size)
    found: dict[int, list[float]] = {}
    caller = Caller(
        "remote",
        concurrency=concurrency,
        retries=retries,
        timeout_s=request_timeout_s,
        api_key_env=api_key_env,
    )
    async with caller:

        async def ask(number: int) -> float:
            part = slice(starts[number], starts[number] + batch_size)
            request = {
                "prompts": list(prompts[part]),
                "completions": list(completions[part]),
                "columns": {name: plain(values[part]) for name, values in table.items()},
            }
            found[number] = _scores(await caller.post(url, request), len(completions[part]))
            return 0.0

        await each("remote", len(starts), ask)
    nothing = float("nan")
    return [
        score
        for number, start in enumerate(starts)
        for score in found.get(number, [nothing] * len(completions[start : start + batch_size]))
    ]


def plain(values: Iterable[object]) -> object:
    """Values as JSON has them; arrays as lists, and what it has no form for as text."""
    return json.loads(json.dumps(list(values), default=_listed))


def _listed(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _scores(answer: object, count: int) -> list[float]:
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(
            f"reward 'remote' was answered {str(answer)[:200]!r} for {count} completions; answer "
            '{"scores": […]} with one number each'
        )
    return [one if isinstance(one, int | float) else float("nan") for one in scores]
