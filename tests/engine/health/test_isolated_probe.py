"""engine/cli/health_checks.py. What its callers find out by it: test_health_check.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.cli.health_checks import run_isolated


def look(*arguments: str) -> Iterator[dict[str, Any]]:
    print("a library's own words")
    yield {"arguments": arguments}
    yield {"last": True}


def test_what_a_probe_yields_is_returned_and_what_it_prints_is_not(capfd: Any) -> None:
    assert run_isolated(look, "a b", "c", deadline_s=60.0) == (
        [{"arguments": ("a b", "c")}, {"last": True}],
        "",
    )
    assert capfd.readouterr().out == ""
