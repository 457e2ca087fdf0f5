"""What each stage takes and gives, of which fronts make their engine's tasks.

It is read from the stage's source: importing that loads torch, for which no command line waits
before a stage runs.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from engine import stages
from engine.stages import settings


@functools.cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def signature_of(
    body: str, types: Mapping[str, object], gives: object = None, **inputs: object
) -> inspect.Signature:
    """Return the signature of a stage's function as a front's task has it.

    body: `module.function` of `engine.stages`. types: the front's own by the engine's names, such
    as a type of folders for `Artifact`. gives, inputs: types of the output and of single inputs in
    the place of the function's. Raises NameError for any other type.
    """
    module, name = body.split(".")
    node = _functions(module)[name]
    known = {"datetime": datetime, "settings": settings, **vars(settings), **types}

    def type_of(annotation: ast.expr | None) -> Any:
        return eval(ast.unparse(annotation), known) if annotation else inspect.Parameter.empty

    names, values = [name.arg for name in node.args.args], node.args.defaults
    kinds = {
        name: inputs.get(name) or type_of(argument.annotation)
        for name, argument in zip(names, node.args.args, strict=True)
    }
    defaults = zip(reversed(names), map(ast.literal_eval, reversed(values)), strict=False)
    return signature(kinds, gives or type_of(node.returns), **dict(defaults))


def signature(inputs: Mapping[str, object], gives: object, **defaults: object) -> inspect.Signature:
    """Return the signature of a function with inputs of these types, by name."""
    kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(name, kind, annotation=type, default=defaults.get(name, required))
        for name, type in inputs.items()
    ]
    return inspect.Signature(parameters, return_annotation=gives)


def function_of(
    body: str, call: Callable[..., Any], front: str, signature: inspect.Signature
) -> Callable[..., Any]:
    """Return the function, in the front's module, of a stage's task; see `signature_of`.

    `call(function, **inputs)` calls the stage's function, whose module is loaded then, and makes
    outputs of its result.
    """
    module, name = body.split(".")

    @functools.wraps(call)  # flytekit takes no function that is local to another one
    def run_stage(**inputs: object) -> Any:
        return call(getattr(getattr(stages, module), name), **inputs)

    about = ast.get_docstring(_functions(module)[name]) or ""
    return declare(run_stage, name, front, signature, about)


def declare(
    function: Callable[..., Any], name: str, module: str, signature: inspect.Signature, about: str
) -> Callable[..., Any]:
    """Give a function of inputs by name what a workflow engine reads of it; return it."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = module, about
    types = {key: input.annotation for key, input in signature.parameters.items()}
    function.__annotations__ = types | {"return": signature.return_annotation}
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
