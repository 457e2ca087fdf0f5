"""docs/flyte.md names all of flytekit's internals that the sources use, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "flyte.md"
FILES = sorted([*(ROOT / "tasks").glob("*.py"), *(ROOT / "workflows").glob("*.py")])
# What flytekit documents for use; the rest of it is its own business.
PUBLIC = (
    "flytekit",
    "flytekit.configuration",
    "flytekit.deck",
    "flytekit.exceptions.base",
    "flytekit.exceptions.user",
    "flytekit.extend",
    "flytekit.remote",
    "flytekitplugins.ray",
)
CALLBACKS = {"trainer.on_step"}  # of the engine's, given a function of a task's


def written(heading: str) -> set[tuple[str, str]]:
    """The first two cells of each row of the table below a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE))


def patches(tree: ast.Module) -> Iterator[str]:
    """Attributes of others that are given a function or class of this file."""
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and _names(node.value, own):
            own.add(ast.unparse(node.target))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _names(node.value, own):
            to = [one for one in node.targets if isinstance(one, ast.Attribute)]
            yield from (name for name in map(ast.unparse, to) if name not in CALLBACKS)


def _names(value: ast.expr | None, own: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in own


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore of objects that are not this file's own."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match(r"_[^_]", node.attr):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield ast.unparse(node)


def internal_imports(tree: ast.Module) -> Iterator[str]:
    """Modules of flytekit that are not for use, or of which a name with an underscore is taken."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("flytekit."))
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("flytekit"):
            continue
        module = str(node.module)
        public = module in PUBLIC or module.startswith("flytekit.types.")
        for one in node.names:
            if not public or one.name.startswith("_"):
                yield module


def used(find: object) -> set[tuple[str, str]]:
    assert callable(find)
    return {
        (path.relative_to(ROOT).as_posix(), name)
        for path in FILES
        for name in find(ast.parse(path.read_text()))
    }


def test_the_page_has_every_patch_and_private_attribute() -> None:
    assert written("Patched and private names") == used(patches) | used(private_attributes)


def test_the_page_has_every_import_of_an_internal_module() -> None:
    assert written("Internal modules") == used(internal_imports)


def test_what_is_looked_for() -> None:
    tree = ast.parse(
        "from flytekit.core.base import A, _b\n"
        "from flytekit.types.file import FlyteFile\n"
        "import flytekit.tools.x\n"
        "def own(): ...\n"
        "alias: Any = own\n"
        "A.run = alias\n"
        "A.other = 3\n"
        "class C:\n"
        "    def f(self): return self._mine + A._theirs\n"
    )
    assert list(patches(tree)) == ["A.run"]
    assert list(private_attributes(tree)) == ["A._theirs"]
    found = {"flytekit.core.base", "flytekit.tools.x"}
    assert set(internal_imports(tree)) == found
