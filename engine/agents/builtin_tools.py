"""The tools that are shipped: a calculator, Python in the sandbox, and search in a local corpus."""

import ast
import heapq
import json
import math
import operator
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.agents.tools import register_tool
from engine.data.rows import words_of
from engine.errors import ConfigError
from engine.rewards.code import require_containment
from engine.rewards.sandbox import Limits, Sandbox

# Arithmetic on numbers alone: no names but a few, and no result that costs time to compute.

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
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return _bounded(function(*map(_value, node.args)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; use numbers, + - * / // % ** and ( )")


def _divide(left: int | float, right: int | float) -> int | float:
    is_whole = isinstance(left, int) and isinstance(right, int) and right and left % right == 0
    return left // right if is_whole else left / right


def _power(left: int | float, right: int | float) -> int | float:
    is_whole = isinstance(left, int) and isinstance(right, int) and abs(left) > 1
    if is_whole and abs(right) * int(left).bit_length() > _BITS:
        raise OverflowError
    return left**right


_BINARY: dict[type, Callable[[Any, Any], int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip


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


# Python in the sandbox of the code rewards: a process of its own, locked in, for each call.

# Shows the value of a last expression, and errors in the program's own lines, on standard output.
_RUN = """
import ast, sys, traceback
sys.stderr = sys.stdout
scope = {"__name__": "__main__"}
try:
    tree = ast.parse(source)
    last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), scope)
    if last is not None:
        shown = eval(compile(ast.Expression(last), "program.py", "eval"), scope)
        if shown is not None:
            print(repr(shown))
except SyntaxError as error:
    print("".join(traceback.format_exception_only(error)), end="")
    sys.exit(1)
except Exception as error:
    shown = error.__traceback__.tb_next or error.__traceback__
    print("".join(traceback.format_exception(type(error), error, shown)), end="")
    sys.exit(1)
"""


@register_tool("python")
def python(code: str, *, timeout_s: float = 5.0, memory_mb: int = 512, weak: bool = False) -> str:
    """Run a Python program and return what it prints. Nothing is kept between calls.

    Args:
        code: The program, e.g. "print(sum(range(10)))".
    """
    with Sandbox(Limits(memory_mb=memory_mb, output_bytes=1 << 16)) as sandbox:
        ended = sandbox.run(f"source = {code!r}{_RUN}", timeout_s)
    require_containment(ended.layers, weak)
    if ended.how == "late":
        return f"{ended.output}\nerror: the program took longer than {timeout_s:g} s"
    if ended.how == "lost":
        return "error: the program ended its sandbox"
    if not ended.well and "Error" not in ended.output:
        return f"{ended.output}\nerror: the program ended with status {ended.status}"
    return ended.output or "(nothing was printed)"


# Retrieval over a local corpus by BM25 (Robertson and Zaragoza 2009).

_K1, _B = 1.5, 0.75


@register_tool("search")
def search(query: str, *, corpus: str = "", top_k: int = 3) -> str:
    """Find the passages of a collection that fit a query best.

    Args:
        query: A few words of what is looked for.
    """
    passages = open_corpus(corpus).best(query, top_k)
    return "\n\n".join(f"[{index}] {text}" for index, text in passages) or "(nothing was found)"


class Bm25:
    """An index of N texts; scores fall with how common a word is and how long a text."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        words_of_texts = list(map(words_of, texts))
        mean = sum(map(len, words_of_texts)) / max(1, len(texts)) or 1.0
        for index, words in enumerate(words_of_texts):
            length = 1 - _B + _B * len(words) / mean
            for word, count in Counter(words).items():
                self._postings[word].append((index, count * (_K1 + 1) / (count + _K1 * length)))

    def best(self, query: str, count: int) -> list[tuple[int, str]]:
        """The `count` texts that fit best, with their numbers; fewer where fewer share a word."""
        scores: Counter[int] = Counter()
        for word in set(words_of(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.texts) - len(postings) + 0.5) / (len(postings) + 0.5))
            for index, weight in postings:
                scores[index] += rarity * weight  # type: ignore[assignment]
        best = heapq.nsmallest(count, scores.items(), key=lambda score: (-score[1], score[0]))
        return [(index, self.texts[index]) for index, _ in best]


def open_corpus(path: str) -> Bm25:
    """The index of a corpus: JSON lines with `text` (and `title`), or passages of plain text.

    Raises ConfigError for a file that can't be read. It is indexed once a process.
    """
    if not path:
        raise ConfigError("tool 'search' needs options.corpus, a .jsonl or .txt file")
    try:
        return _indexed(path, os.stat(path).st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"tool 'search': corpus {path!r} can't be read ({type(error).__name__}: {error}); give "
            'JSON lines with "text", or text with empty lines between passages'
        ) from error


@lru_cache(maxsize=4)
def _indexed(path: str, changed: int) -> Bm25:
    text = Path(path).read_text(encoding="utf-8")
    if not path.endswith((".jsonl", ".json")):
        return Bm25([one.strip() for one in re.split(r"\n\s*\n", text) if one.strip()])
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return Bm25(
        [f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"]) for row in rows]
    )
