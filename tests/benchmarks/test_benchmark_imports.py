"""Benchmarks are not type-checked: what they import from the engine must be there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_what_a_benchmark_imports_is_there(name: str) -> None:
    for node in ast.walk(ast.parse((BENCHMARKS / name).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "engine":
            module = importlib.import_module(str(node.module))
            for imported in (alias.name for alias in node.names):
                is_module = f"{node.module}.{imported}"
                assert hasattr(module, imported) or importlib.util.find_spec(is_module), is_module
