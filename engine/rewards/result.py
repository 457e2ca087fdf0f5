"""Checks what a reward function returned: one finite float per completion.

Nothing is broadcast, cut or filled up. A result of the wrong form is wrong as a whole; a wrong
value in a well-formed result is wrong for its completion alone.
"""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from engine.errors import RewardError

Cause: TypeAlias = Literal["raised", "deadline", "malformed", "not_finite", "crashed"]
_LONGEST_TRACEBACK = 8000  # characters
_LARGEST = 3.4028234e38  # of float32, in which scores travel


class RewardTraceback(Exception):
    """Stands for an exception of another process; its text is that one's traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RewardFailure(RewardError):
    """Why a completion has no score; `__cause__` is the reward's own exception, if it raised."""

    def __init__(self, cause: Cause, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.cause: Cause = cause
        if traceback_text:
            self.__cause__ = RewardTraceback(traceback_text)

    def __reduce__(self) -> tuple[object, ...]:
        raised = self.__cause__
        text = "" if raised is None else "".join(traceback.format_exception(raised))
        return type(self), (self.cause, str(self), text[-_LONGEST_TRACEBACK:])


@dataclass(slots=True)
class Scores:
    """What B completions are worth, and why some of them could not be scored."""

    components: tuple[str, ...] | None
    """K names in the columns' order, e.g. ("answer", "format"); () for a plain list, whose one
    column has no name; None where no completion could be scored and nothing was known before."""
    rows: list[list[float]]
    """B rows of K floats (of one, for a plain list), all finite; 0 where there is no score."""
    failures: dict[int, RewardFailure]
    """Why there is none, by row."""

    @classmethod
    def of(
        cls,
        components: tuple[str, ...] | None,
        found: Mapping[int, list[float]],
        failures: dict[int, RewardFailure],
    ) -> Scores:
        """All rows from those that are `found`, and 0 for those that are not."""
        width = 1 if components == () else len(components or ())
        size = len(found.keys() | failures.keys())
        return cls(components, [found.get(i, [0.0] * width) for i in range(size)], failures)

    def raise_if_none(self) -> None:
        """Raise RewardError, with the first failure's message, where no completion has a score."""
        if self.rows and len(self.failures) == len(self.rows):
            first = self.failures[0]
            raise RewardError(
                f"{first}; none of the {len(self.rows)} completions could be scored"
            ) from first


def read(
    name: str, result: object, size: int, components: tuple[str, ...] | None, first_row: int = 0
) -> Scores:
    """Read what reward `name` returned for `size` completions, the first of them `first_row`.

    `components` are the names expected, () for a plain list, None for whatever there is. Raises
    RewardFailure ("malformed") for a result of another form; failures of single values are in
    what is returned, under rows that count from 0.
    """
    if isinstance(result, Mapping):
        names = tuple(result)
        columns = [
            _checked(f"reward {name!r}, component {key!r},", result[key], size) for key in names
        ]
    else:
        names, columns = (), [_checked(f"reward {name!r}", result, size)]
    _check_names(name, names, components, isinstance(result, Mapping))
    found: dict[int, list[float]] = {}
    failures: dict[int, RewardFailure] = {}
    for row, values in enumerate(zip(*columns, strict=True)):
        numbers = [_number(value) for value in values]
        wrong = next((i for i, number in enumerate(numbers) if math.isnan(number)), None)
        if wrong is None:
            found[row] = numbers
            continue
        part = f" as {names[wrong]!r}" if names else ""
        failures[row] = RewardFailure(
            "not_finite",
            f"reward {name!r} returned {_short(values[wrong])}{part} for completion "
            f"{first_row + row}; it must be a finite float",
        )
    return Scores.of(names, found, failures)


def _checked(who: str, values: Any, size: int) -> list[object]:
    """Return `values` as a list of `size` entries; raise RewardFailure where it is none."""
    try:
        if isinstance(values, str | bytes | Mapping | set | frozenset):
            raise TypeError
        count, entries = len(values), list(values)
    except TypeError:
        raise RewardFailure(
            "malformed",
            f"{who} returned {type(values).__name__}; it must return a list of floats",
        ) from None
    if count != size:
        raise RewardFailure(
            "malformed",
            f"{who} returned {count} values for {size} completions; return exactly one for each",
        )
    return entries


def _check_names(
    name: str, names: tuple[object, ...], expected: tuple[str, ...] | None, mapping: bool
) -> None:
    if mapping and not (names and all(isinstance(key, str) for key in names)):
        raise RewardFailure(
            "malformed",
            f"reward {name!r} returned a mapping with keys {list(names)}; "
            "it must have at least one component, each named by a string",
        )
    require_components(name, names, expected)


def require_components(
    name: str, names: tuple[object, ...] | None, expected: tuple[str, ...] | None
) -> None:
    """Raise RewardFailure where reward `name` returned other components than `expected`, if any."""
    if expected is not None and names != expected:
        had, wanted = (
            f"components {list(some)}" if some else "a plain list" for some in (names, expected)
        )
        raise RewardFailure(
            "malformed",
            f"reward {name!r} returned {had} where {wanted} was declared or returned before; "
            "return the same names in the same order at every call",
        )


def _number(value: Any) -> float:
    """Return a finite float within float32's range, or NaN."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # any object may be here, and fail in its own way
        return math.nan
    return number if abs(number) <= _LARGEST else math.nan


def _short(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # integers of thousands of digits have no text
        return f"{type(value).__name__}"
