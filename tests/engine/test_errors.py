"""Errors of ours keep class, message and attributes on every way that they go."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import EngineError

ROOT = Path(__file__).parents[2]


def subclasses(kind: type[EngineError]) -> Iterator[type[EngineError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


def all_errors() -> list[type[EngineError]]:
    """Every class of error, after the import of all modules that define a class of exceptions."""
    for folder in ("engine", "tasks", "workflows"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            words = [line for line in path.read_text().splitlines() if line.startswith("class ")]
            if any("Error" in line or "Exception" in line for line in words):
                module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
                importlib.import_module(module)
    ours = [kind for kind in subclasses(EngineError) if not kind.__module__.startswith("ray.")]
    return sorted({*ours}, key=lambda kind: kind.__qualname__)


def example(kind: type[EngineError]) -> EngineError:
    """An error of the class, with an attribute that its constructor doesn't know, and a note."""
    parameters = inspect.signature(kind).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    values = {name: 418 if name == "status" else f"the {name}" for name in named}
    error = kind(**values) if named else kind("the message")
    error.row = 3  # type: ignore[attr-defined]
    error.add_note("raised in actor rank 1")
    try:
        raise error from ValueError("no such row")
    except EngineError as raised:
        return raised


def by_ray(error: EngineError) -> EngineError:
    from ray import cloudpickle
    from ray.exceptions import RayTaskError

    wrapped = RayTaskError("call", "Traceback …", error).as_instanceof_cause()
    cause = pickle.loads(cloudpickle.dumps(wrapped)).cause
    assert isinstance(cause, EngineError)
    return cause


WAYS: dict[str, Callable[[EngineError], EngineError]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "ray": by_ray,
    "twice": lambda error: pickle.loads(pickle.dumps(by_ray(error))),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_error_of_ours_survives(way: str) -> None:
    errors = all_errors()
    assert {"RewardFailure", "EnvironmentFailure", "Refused", "RequestError", "WorkerDied"} <= {
        kind.__name__ for kind in errors
    }
    for kind in errors:
        error = example(kind)
        arrived = WAYS[way](error)
        assert type(arrived) is kind
        assert (str(arrived), arrived.args) == (str(error), error.args)
        assert vars(arrived) == vars(error), kind
        assert "no such row" in "".join(traceback.format_exception(arrived)), kind


def test_an_error_with_more_context_is_the_same_error() -> None:
    for kind in all_errors():
        error = example(kind)
        more = error.with_message(f"train.jsonl, row 7: {error} (token=hf_abcdefghijklmnopqrstuv)")
        assert type(more) is kind
        assert str(more).startswith(f"train.jsonl, row 7: {error} (token=")
        assert "hf_abcdefghijklmnopqrstuv" not in str(more)
        assert vars(more) == {k: v for k, v in vars(error).items() if k != "__notes__"}
        assert (more.__cause__, more.__traceback__) == (None, None)
        assert str(error) in str(more), "the first one stays as it was"


def test_a_traceback_that_travels_holds_no_credentials() -> None:
    error = EngineError("the store refused")
    error.__cause__ = ValueError("https://user:secret123@host/x?token=hf_abcdefghijklmnopqrstuv")
    arrived = pickle.loads(pickle.dumps(error))
    assert "ValueError" in str(arrived.__cause__)
    assert "hf_abcdefghijklmnopqrstuv" not in str(arrived.__cause__)
