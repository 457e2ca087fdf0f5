"""A reward function from a file: verl's `custom_reward_function.path`, `.name`, `.reward_kwargs`.

`reward.name=engine.cli.reward_file:FILE::FUNCTION` names the function, so each worker process loads
the file by itself; `::{"argument": 1}` after it is what else the function is called with. A
function of verl's kind (one completion at a time) is called for each row.

The module's name is part of recorded settings, and reward processes load it: it stays, and light.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.errors import ConfigError
from engine.registry import load_function


def reward_name(path: str, function: str, keywords: Mapping[str, object] | None = None) -> str:
    """Return the `reward.name` of a function in the file at `path`, called with `keywords`, too."""
    name = f"{__name__}:{path}::{function}"
    return f"{name}::{json.dumps(keywords)}" if keywords else name


def __getattr__(name: str) -> Callable[..., object]:
    """Return the function that `FILE::FUNCTION` or `FILE::FUNCTION::KEYWORDS` names."""
    path, separator, rest = name.partition("::")
    if not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function, _, keywords = rest.partition("::")
    return _reward_function(path, function, json.loads(keywords or "{}"))


def _reward_function(path: str, name: str, keywords: Mapping[str, object]) -> Callable[..., object]:
    """Load `name` from the file at `path`, made callable as our reward functions are."""
    function = load_function(path, name, "reward file")
    parameters = inspect.signature(function).parameters
    if keywords:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_any and (unknown := sorted(keywords.keys() - parameters.keys())):
            raise ConfigError(
                f"custom_reward_function.reward_kwargs has {unknown[0]!r}, which {name} in {path} "
                "does not take; remove it, or add it to the function"
            )
        function = functools.update_wrapper(functools.partial(function, **keywords), function)
    takes_one_row = {"solution_str", "ground_truth"} <= parameters.keys()
    return each_row(function) if takes_one_row else function


def each_row(function: Callable[..., Any]) -> Callable[..., object]:
    """Call verl's `compute_score`, which returns a number or a dictionary with `score`, by rows."""

    def calls(completions: Sequence[str], truths: Any, columns: dict[str, Any]) -> Iterator[Any]:
        empty = [None] * len(completions)
        sources, extras = (columns.get(name, empty) for name in ("data_source", "extra_info"))
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        for row in zip(sources, completions, truths, extras, strict=True):
            yield function(**dict(zip(names, row, strict=True)))

    def score(result: object) -> Any:
        return result["score"] if isinstance(result, dict) else result

    def reward(prompts: Any, completions: Any, *, ground_truth: Any, **columns: Any) -> Any:
        return [score(result) for result in calls(completions, ground_truth, columns)]

    async def reward_async(
        prompts: Any, completions: Any, *, ground_truth: Any, **columns: Any
    ) -> Any:
        return [score(await result) for result in calls(completions, ground_truth, columns)]

    return reward_async if inspect.iscoroutinefunction(function) else reward
