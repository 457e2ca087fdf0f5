"""Arithmetic on numbers alone: no names but a few, and no result that costs time to compute."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from engine.agents.tools.registry import register_tool

_LONGEST = 500  # characters of an expression
_BITS = 4096  # of a whole number
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "floor": math.floor,
    "log": math.log, "log10": math.log10, "log2": math.log2, "max": max, "min": min,
    "round": round, "sin": math.sin, "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip
_UNARY: dict[type, Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@register_tool("calculator")
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, e.g. "12 * (3 + 4)".
    """
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an expression as text; raise ValueError with a sentence for the model.

    >>> evaluate("1234 * 5678"), evaluate("7 / 2"), evaluate("6 / 3"), evaluate("2^10")
    ('7006652', '3.5', '2', '1024')
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    text = expression.strip().translate(_SIGNS).replace("^", "**")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    try:
        return _shown(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        return _bounded(_binary(node.op, _value(node.left), _value(node.right)))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*map(_value, node.args)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; use numbers, + - * / // % ** and ( )")


def _binary(kind: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Sub):
        return left - right
    if isinstance(kind, ast.Mult):
        return left * right
    if isinstance(kind, ast.FloorDiv):
        return left // right
    if isinstance(kind, ast.Mod):
        return left % right
    if isinstance(kind, ast.Div):
        whole = isinstance(left, int) and isinstance(right, int) and right and left % right == 0
        return left // right if whole else left / right
    if isinstance(kind, ast.Pow):
        whole = isinstance(left, int) and isinstance(right, int) and abs(left) > 1
        if whole and abs(right) * int(left).bit_length() > _BITS:
            raise OverflowError
        return left**right
    raise ValueError(f"{type(kind).__name__} is no operation here; use + - * / // % **")


def _bounded(value: Any) -> int | float:
    """Refuse what is no number of a bearable size."""
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is no finite real number")
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise OverflowError
    return value


def _shown(value: int | float) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"
