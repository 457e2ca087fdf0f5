"""The public table: the page shows the stored figures, and rows read what their commands write."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("table")
    for name in ("table", "vs_trl", "vs_trl_cases", "case_folder", "trl_environment", "turns"):
        sys.modules.pop(name, None)


def test_the_page_shows_the_stored_figures(table: Any) -> None:
    page, stored = table.PAGE.read_text(), json.loads(table.STORED.read_text())
    assert table.render(page, stored) == page
    assert "**4.3** (0.355 s, TRL 1.52 s)" in page
    assert any("curves" in figures.get("accuracy", {}) for figures in stored.values())


def test_a_page_without_marks_is_refused(table: Any) -> None:
    with pytest.raises(SystemExit, match="put them back"):
        table.render("# Benchmarks\n", {})


def test_a_row_has_the_faster_one_of_trl(table: Any) -> None:
    turns = {"ours": [2.0, 4.0, 3.0], "trl fp32": [30.0, 8.0, 9.0], "trl bf16": [12.0] * 3}
    figures = {name: [{"seconds": s} for s in each] for name, each in turns.items()}
    content = {"results": [{"case": {"steps": 2}, "figures": figures}]}
    assert table.of_steps(content) == {"ours": 1.5, "theirs": {"TRL": 4.5}}


def test_curves_give_the_seconds_to_the_goal(table: Any) -> None:
    curves = {"ours": [[0.0, 0.4], [1.5, 0.92]], "trl fp32": [[0.0, 0.4], [9.0, 0.8], [12.0, 0.9]]}
    figures = table.of_curves({"goal": 0.9, "curves": {"0": curves}})
    assert (figures["ours"], figures["theirs"]) == ([1.5], {"TRL": [12.0]})
    assert table.cell(figures) == "**8.0** (1.5 s)"
