from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.registry import Options, Registry, load_function

Shape = Callable[..., float]
MODULE = """
from shapes_of_test import shapes

@shapes.register("{name}", "{name}_alias")
def {name}(*, side: float = 1.0, label: str = "x"):
    return side
"""


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[Shape]:
    """A registry of a package with the modules `square` and `circle`."""
    package = tmp_path / "shapes_of_test"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from engine.registry import Registry\n"
        "modules = 'shapes_of_test.circle', 'shapes_of_test.square'\n"
        "shapes = Registry('shape', 'plot.shape', modules, '@shapes.register(name)')\n"
    )
    for name in ("square", "circle"):
        (package / f"{name}.py").write_text(MODULE.format(name=name))
    (tmp_path / "outside_of_test.py").write_text(
        MODULE.format(name="star") + "def plain():\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("shapes_of_test", "outside_of_test")
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    registry = importlib.import_module("shapes_of_test").shapes
    assert isinstance(registry, Registry)
    return registry


def test_a_name_imports_its_own_module_and_no_other(shapes: Registry[Shape]) -> None:
    assert shapes.get("square")(side=2.0) == 2.0
    assert "shapes_of_test.circle" not in sys.modules
    assert shapes.names() == ("circle", "square")
    assert shapes.get("circle_alias") is shapes.get("circle")
    assert [shape() for shape in shapes.values()] == [1.0, 1.0]


def test_a_path_names_an_entry_from_outside(shapes: Registry[Shape]) -> None:
    star = shapes.get("outside_of_test:star")
    assert shapes.get("star") is star
    assert shapes.registered(star) is star
    assert shapes.registered(print) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "squar",
            r"plot.shape='squar' is unknown \(did you mean 'square'\?\); choose one of circle, "
            "square, or give",
        ),
        ("outside_of_test:plain", "is not registered as a shape; put @shapes.register"),
        ("outside_of_test:nothing", "module 'outside_of_test' has no 'nothing'"),
        ("nowhere_at_all:f", r"module 'nowhere_at_all' can't be imported \(ModuleNotFoundError"),
        (":f", "can't be imported"),
    ],
)
def test_wrong_names_say_which_setting_and_what_there_is(
    shapes: Registry[Shape], name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shapes.get(name)


def test_a_name_is_taken_once() -> None:
    numbers: Registry[int] = Registry("number", "plot.number")
    numbers.add("one", 1, aliases=("uno",))
    numbers.add("one", 1)
    for name in ("one", "uno"):
        with pytest.raises(ConfigError, match=f"number '{name}' is already registered by"):
            numbers.add(name, 2)
    with pytest.raises(ConfigError, match="a name has no ':'"):
        numbers.add("a:b", 3)


class Engine:
    def __init__(
        self, model: str, *, rows: int = 8, limits: tuple[int, ...] | None = None, raw: Later = 0
    ) -> None: ...


if False:  # a name that only a type checker sees
    Later = int


def step(*, scale: float = 1.0, names: tuple[str, ...] = (), on: bool = False) -> None: ...


def test_options_are_keyword_parameters_in_their_types(shapes: Registry[Shape]) -> None:
    assert dict(shapes.options("square")) == {"side": 1.0, "label": "x"}
    assert shapes.options("square").parse({"side": 3}, "plot.options") == {"side": 3.0}
    options = Options("step", step)
    given = {"scale": "0.5", "names": ["a", "b"], "on": True}
    assert options.parse(given, "") == {"scale": 0.5, "names": ("a", "b"), "on": True}
    assert dict(Options("engine", Engine)) == {"rows": 8, "limits": None, "raw": 0}
    assert Options("engine", Engine).parse({"raw": "as given"}, "") == {"raw": "as given"}
    assert dict(Options("both", step, Engine)) == dict(Options("", step)) | dict(
        Options("", Engine)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scal": 1.0},
            r"o.scal: the step doesn't read 'scal' \(did you mean 'scale'\?\); .*names",
        ),
        ({"scale": "large"}, "o.scale='large': Input should be a valid number"),
        ({"scale": True}, "o.scale=True: give a number, not true or false"),
        ({"names": 3}, "o.names=3: Input should be a valid tuple"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options("the step", step).parse(given, "o")


def test_a_file_is_imported_by_its_path_and_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "json.py"  # another module has the name
    file.write_text("import nothing_of_this_name\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the.setting: .*json.py can't be imported \(Module"):
            load_function(str(file), "f", "the.setting")
    file.write_text("def f() -> int:\n    return 1\n")
    assert load_function(str(file), "f", "the.setting")() == 1
