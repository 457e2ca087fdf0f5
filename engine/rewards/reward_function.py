"""What a reward function is, rewards by name, and what one may return.

A reward function takes prompts and their completions, the rows' `ground_truth`, and every other
column of the data by keyword, and returns one float a completion:

    def reward(prompts, completions, *, ground_truth, **columns) -> list[float]: ...

or, where the score has parts, one such list for each named component:

    ... -> dict[str, list[float]]:   # e.g. {"answer": [1.0, 0.0], "format": [1.0, 1.0]}

None in the place of a float says that it doesn't apply to the completion: the other components
count, and a completion without any has no score. A reward may be a coroutine function (`async def`)
of the same signature. The names and their order must be the same at every call;
`register_reward(..., components=...)` says them before the first one.

A prompt is the text of its last message, e.g. "What is 2+3?"; a completion is the assistant's text,
special tokens removed. Each completion is scored by itself: where a call on many fails, it is
repeated on single ones, from several threads at once. Calling one is `calls`.
"""

import functools
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypeVar

from engine.errors import ConfigError, RewardError
from engine.registry import Options, Registry, import_plugins, keyword_defaults

RewardResult: TypeAlias = Sequence[float | None] | Mapping[str, Sequence[float | None]]
RewardFunction: TypeAlias = Callable[..., RewardResult | Awaitable[RewardResult]]


# What a reward function returned: one finite float per completion. Nothing is broadcast, cut or
# filled up. A result of the wrong form is wrong as a whole; a wrong value in a well-formed result
# is wrong for its completion alone.

Cause: TypeAlias = Literal[
    "raised", "deadline", "malformed", "not_finite", "not_applicable", "crashed"
]
NOT_APPLICABLE = math.nan  # the value of a component that doesn't apply to a row
_LARGEST = 3.4028234e38  # of float32, in which scores travel


class RewardFailure(RewardError):
    """Why a completion has no score; `__cause__` is the reward's own exception, if it raised."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


@dataclass(slots=True)
class Scores:
    """What B completions are worth, and why some of them could not be scored.

    `components` are K names in the columns' order, e.g. ("answer", "format"); () for a plain list,
    whose one column has no name; None where nothing could be scored and nothing was known before.
    """

    components: tuple[str, ...] | None
    rows: list[list[float]]
    """B of K floats (1, for a plain list): NaN where a component doesn't apply, else finite; all 0
    without a score."""
    failures: dict[int, RewardFailure]  # why there is none, by row

    @classmethod
    def of(
        cls,
        components: tuple[str, ...] | None,
        values: Mapping[int, list[float]],
        failures: dict[int, RewardFailure],
    ) -> Self:
        """Scores of all rows from the `values` of those that have some; 0 for the others."""
        width = 1 if components == () else len(components or ())
        size = len(values.keys() | failures.keys())
        return cls(components, [values.get(i, [0.0] * width) for i in range(size)], failures)

    def raise_if_none(self) -> None:
        """Raise RewardError, with the first failure's message, where no completion has a score."""
        if self.rows and len(self.failures) == len(self.rows):
            first = self.failures[0]
            raise RewardError(
                f"{first}; none of the {len(self.rows)} completions could be scored"
            ) from first


def read_result(
    name: str, result: object, size: int, numbers: Sequence[int] | None = None
) -> Scores:
    """Read what reward `name` returned for `size` completions; messages name them by `numbers`.

    Raises RewardFailure ("malformed") for a result of the wrong form; failures of single values are
    in what is returned, under rows that count from 0.
    """
    who, numbers = f"reward {name!r}", range(size) if numbers is None else numbers
    names: tuple[str, ...] = ()
    if isinstance(result, Mapping):
        names = tuple(result)
        if not (names and all(isinstance(key, str) for key in names)):
            raise RewardFailure(
                "malformed",
                f"{who} returned a mapping with keys {list(names)}; "
                "it must have at least one component, each named by a string",
            )
        columns = [_column(f"{who}, component {key!r},", result[key], size) for key in names]
    else:
        columns = [_column(who, result, size)]
    scores: dict[int, list[float]] = {}
    failures: dict[int, RewardFailure] = {}
    for row, values in enumerate(zip(*columns, strict=True)):
        row_scores = [float32_or_nan(value) for value in values]
        unread = [i for i, score in enumerate(row_scores) if math.isnan(score)]
        wrong = next((i for i in unread if values[i] is not None), None)
        if wrong is not None:
            part = f" as {names[wrong]!r}" if names else ""
            shown = type(values[wrong]).__name__
            with suppress(ValueError):  # integers of thousands of digits have no text
                shown = reprlib.repr(values[wrong])
            failures[row] = RewardFailure(
                "not_finite",
                f"{who} returned {shown}{part} for completion {numbers[row]}; "
                "it must be a finite float, or None where it doesn't apply",
            )
        elif len(unread) == len(values):
            failures[row] = RewardFailure(
                "not_applicable",
                f"{who} returned None for completion {numbers[row]}, and nothing else scores it",
            )
        else:
            scores[row] = row_scores
    return Scores.of(names, scores, failures)


def _column(who: str, values: Any, size: int) -> list[object]:
    """Return `values` as a list of `size` entries; raise RewardFailure where it is none."""
    try:
        if isinstance(values, str | bytes | Mapping | set | frozenset):
            raise TypeError
        count, entries = len(values), list(values)
    except TypeError:
        problem = f"returned {type(values).__name__}; it must return a list of floats"
    else:
        if count == size:
            return entries
        problem = f"returned {count} values for {size} completions; return exactly one for each"
    raise RewardFailure("malformed", f"{who} {problem}")


def require_components(
    name: str, names: tuple[object, ...] | None, expected: tuple[str, ...] | None
) -> None:
    """Raise RewardFailure where reward `name` returned other components than `expected`, if any."""
    if expected is not None and names != expected:
        returned, declared = (
            f"components {list(some)}" if some else "a plain list" for some in (names, expected)
        )
        raise RewardFailure(
            "malformed",
            f"reward {name!r} returned {returned} where {declared} was declared or returned "
            "before; return the same names in the same order at every call",
        )


def float32_or_nan(value: Any) -> float:
    """Return a finite float within float32's range, or NaN."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # any object may be here, and fail in its own way
        return math.nan
    return number if abs(number) <= _LARGEST else math.nan


# Reward functions by name. The options of one are its keyword-only parameters with defaults;
# `reward.options` sets them.

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RegisteredReward:
    """A registered reward. Options that are keywords of a function here are given to it."""

    function: RewardFunction
    components: tuple[str, ...]  # that it returns, in order; () for a plain list
    pooled: bool = False  # it runs in a `RewardPool`: its time depends on what a model writes
    imports: tuple[str, ...] = ()  # modules that the pool's processes load once
    answer: Callable[..., str | None] | None = None
    """`answer(completion)` reads the answer that evaluation shows and votes on."""
    well_formed: Callable[..., bool] | None = None
    """`well_formed(completion)` says whether it keeps the format."""
    lenient: Callable[..., bool | None] | None = None
    """`lenient(completion, truth)` reads a part as the answer; by the truth's kind if None."""
    row_options: tuple[str, ...] = ()  # options, of `answer` too, that a column of that name sets
    right_from: str | Callable[..., float] | None = None
    """The least score of a right completion (1 if None): the option that has it, or a function."""
    form_only: Callable[[Mapping[str, object]], bool] = lambda options: False
    """Whether the score with these options says nothing about the answer, as of tags."""


_registry: Registry[RegisteredReward] = Registry(
    "reward",
    "reward.name",
    [f"engine.rewards.{module}" for module in ("answers", "code", "http_rewards", "model_based")],
    "@register_reward(name)",
)


def register_reward(
    name: str, components: tuple[str, ...] = (), **details: Any
) -> Callable[[_F], _F]:
    """Make a reward function selectable as `reward.name=<name>`; a name can be taken once.

    `components` are the names that it returns, in order, e.g. ("answer", "format"); none for a
    reward that returns a plain list. `details` are the further fields of `RegisteredReward`. What
    makes a completion right is the component `correct` (else `answer`), or the score of a reward
    that has neither. Raises ConfigError for a name that is taken and for a component that is named
    twice.
    """
    if isinstance(components, str) or len(set(components)) < len(components):
        raise ConfigError(
            f"reward {name!r} declares components={components!r}; give a tuple of different names"
        )

    def add(function: _F) -> _F:
        _registry.add(name, RegisteredReward(function, tuple(components), **details), function)
        return function

    return add


def register_row_reward(
    name: str, *, row_options: tuple[str, ...] = (), **details: Any
) -> Callable[[Callable[..., float | None]], Callable[..., list[float | None]]]:
    """Make a function that scores one completion a reward function, and register that.

    It is called as `function(completion, ground_truth, **options)`; `details` are those of
    `register_reward`. A RewardError that it raises is raised with the row's number.
    """

    def add(function: Callable[..., float | None]) -> Callable[..., list[float | None]]:
        names = keyword_defaults(function)

        @functools.wraps(function)
        def reward(
            prompts: Sequence[str],
            completions: Sequence[str],
            *,
            ground_truth: Sequence[object] | None = None,
            **columns: Any,
        ) -> list[float | None]:
            options = {name: value for name, value in columns.items() if name in names}
            by_row = {
                name: options.pop(name)
                for name in row_options
                if not isinstance(options.get(name, ""), str)  # a column
            }
            truths = [None] * len(completions) if ground_truth is None else ground_truth
            scores: list[float | None] = []
            for row, (completion, truth) in enumerate(zip(completions, truths, strict=True)):
                of_row = row_values(by_row, row)
                try:
                    value = function(completion, truth, **options, **of_row)
                    scores.append(None if value is None else float(value))
                except RewardError as error:
                    raise error.with_message(f"row {row}: {error}") from None
            return scores

        return register_reward(name, row_options=row_options, **details)(reward)

    return add


def row_values(columns: Mapping[str, Sequence[object]], row: int) -> dict[str, Any]:
    """The entries of a row that are not empty."""
    return {name: values[row] for name, values in columns.items() if values[row]}


def resolve_reward(name: str, options: Mapping[str, object] | None = None) -> RewardFunction:
    """Return the reward registered as `name`, or the function at `package.module:function`.

    `options` are those of `reward.options`; one that has a column's name stands in its place. The
    function gets the fields of `extra_info` as columns, too, where no column has their name: a
    workflow puts a file's own columns there. Options of our rewards don't come from fields.
    Raises ConfigError where there is no such reward, where it can't be called as a reward function,
    and for an option that it doesn't declare.
    """
    function = _registry.load(name) if ":" in name else _registry.get(name).function
    if not callable(function):
        raise ConfigError(f"reward.name={name!r} is {function!r}, which is not a function")
    with suppress(ValueError):  # some builtins have no signature
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind([], [], ground_truth=[], any_other_column=[])
        except TypeError as error:  # which could only show after a whole rollout
            raise ConfigError(
                f"reward.name={name!r} can't be called as a reward function ({error}); write it as "
                "def reward(prompts, completions, *, ground_truth, **columns) -> list[float]"
            ) from None
    parsed = Options(f"reward {name!r}", function).parse(options or {}, "reward.options")
    by_row = () if (entry := registered_reward(name)) is None else entry.row_options
    ours = function.__module__.startswith("engine.")
    kept = {*keyword_defaults(function)} - {*by_row} if ours else set()

    @functools.wraps(function)
    def configured(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Any:
        fields = _extra_fields(columns.get("extra_info", ()))
        fields = {key: values for key, values in fields.items() if key not in kept}
        return function(prompts, completions, **{**fields, **columns, **parsed})

    return configured


def _extra_fields(infos: Sequence[object]) -> dict[str, list[object]]:
    """The fields of `extra_info` as columns, None where a row has none of that name."""
    rows = [info if isinstance(info, Mapping) else {} for info in infos]
    names = {str(name) for row in rows for name in row} - {"prompts", "completions"}
    return {name: [row.get(name) for row in rows] for name in sorted(names)}


def registered_reward(name: str) -> RegisteredReward | None:
    """The entry of a name or path; None for a function at a path that was not registered.

    Raises ConfigError for a name that can't be resolved.
    """
    return _registry.registered(_registry.load(name)) if ":" in name else _registry.get(name)


def declared_components(name: str) -> tuple[str, ...] | None:
    """Return the component names that a reward was registered with, () for a plain list.

    None, of a function at `package.module:function` that was not registered, says that nothing is
    known before its first call. Raises ConfigError for a name that can't be resolved.
    """
    entry = registered_reward(name)
    return None if entry is None else entry.components


reward_module = _registry.module


def import_reward(name: str, modules: Iterable[str]) -> None:
    """Import modules in turn until one of them has registered `name`."""
    for module in modules:
        import_plugins([module])
        if name in _registry.names():
            return
