"""Cases that `make test` runs, and more of their kind that `make test-slow` adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def and_slow(quick: Iterable[Any], more: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`: those of `quick`, and those of `more` marked slow.

    A tuple holds the values of several arguments.
    """
    marked = [case if isinstance(case, tuple) else (case,) for case in more]
    return [*quick, *(pytest.param(*case, marks=pytest.mark.slow) for case in marked)]
