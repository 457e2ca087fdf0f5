"""What is used of vLLM's private code is in the vLLM that is installed, and is listed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import engine

LIST = Path(engine.__file__).parent / "rollout" / "vllm" / "private_names.yaml"
PATCHED, USED = yaml.safe_load(LIST.read_text()).values()
SPEC = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(SPEC is None, reason="vLLM is not installed")


def names_of(tree: ast.AST) -> Iterator[str]:
    """What the body of a module or class defines or imports, and what its methods set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize("name", [*PATCHED, *USED])
def test_vllm_has_it(name: str) -> None:
    assert SPEC is not None
    assert SPEC.origin is not None
    module, _, path = name.partition(":")
    file = Path(SPEC.origin).parent.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    tree: ast.AST = ast.parse(file.read_text())
    *classes, last = path.split(".")
    for owner in classes:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner)
    assert last in set(names_of(tree)), f"{file} has no {path}; see {LIST.name}"


def test_all_imports_of_vllm_s_modules_are_listed() -> None:
    """But for the package's own names, its public API, and modules that a listed name is in."""
    listed = {f"vllm.{name.replace(':', '.')}" for name in (*PATCHED, *USED)}
    missing = []
    for file in Path(engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found = any(f"{entry}.".startswith(f"{name}.") for entry in listed)
                    if not found and not any(e.endswith(f".{alias.name}") for e in listed):
                        missing.append((file.name, name))
    assert not missing
