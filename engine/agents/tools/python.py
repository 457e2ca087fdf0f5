"""Python in the sandbox of the code rewards: a process of its own, locked in, for each call."""

from __future__ import annotations

from engine.agents.tools.registry import register_tool
from engine.rewards.code import require_walls
from engine.rewards.sandbox.run import Limits, Sandbox

# Shows the value of a last expression, and errors in the program's own lines, on standard output.
_RUN = """
import ast, sys, traceback
sys.stderr = sys.stdout
place = {"__name__": "__main__"}
try:
    tree = ast.parse(source)
    last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), place)
    if last is not None:
        shown = eval(compile(ast.Expression(last), "program.py", "eval"), place)
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
    if ended.layers:
        require_walls(tuple(name for name, there in ended.layers.items() if there), weak)
    if ended.how == "late":
        return f"{ended.output}\nerror: the program took longer than {timeout_s:g} s"
    if ended.how == "lost":
        return "error: the program ended its sandbox"
    if not ended.well and "Error" not in ended.output:
        return f"{ended.output}\nerror: the program ended with status {ended.status}"
    return ended.output or "(nothing was printed)"
