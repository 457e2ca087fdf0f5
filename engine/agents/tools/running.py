"""Calls of tools: each ends by its deadline in a message for the model, whatever the tool does."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.agents.protocol import Message, ToolCall
from engine.agents.tools.tool import Tool
from engine.rewards.threads import text_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What a call may take."""

    timeout_s: float = 10.0  # seconds
    max_output: int = 4000  # characters of a result that the model reads


async def answer(tools: Mapping[str, Tool], call: ToolCall, limits: ToolLimits) -> Message:
    """The tool message that answers a call.

    An unknown tool, wrong arguments, an exception, a late and an over-long result are told to the
    model in it. Coroutine functions run in this loop, plain ones on a thread of their own.
    """
    return tool_message(shorten(await _text(tools, call, limits), limits.max_output), call)


def tool_message(text: str, call: ToolCall | None = None) -> Message:
    """What a tool, or nobody's call, is answered with."""
    whose = {} if call is None else {"name": call.name, "tool_call_id": call.id}
    return {"role": "tool", "content": text, **whose}


def shorten(text: str, most: int) -> str:
    """The text, its end cut away with a note where it has more than `most` characters.

    >>> shorten("1234567890", 4)
    '1234\\n[cut: 6 of 10 characters left out]'
    """
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {len(text) - most} of {len(text)} characters left out]"


async def _text(tools: Mapping[str, Tool], call: ToolCall, limits: ToolLimits) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}; call one of {', '.join(tools) or 'none'}"
    try:
        arguments = tool.arguments(call.arguments)
    except (ValueError, TypeError) as error:
        return f"error: {text_of(error)}"
    deadline = asyncio.timeout(limits.timeout_s)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(inspect.unwrap(_function(tool.function))):
                result = await tool.function(**arguments)
            else:
                result = await on_thread(lambda: tool.function(**arguments))
        return _readable(result)
    except TimeoutError as error:
        if deadline.expired():
            return f"error: {call.name} took longer than {limits.timeout_s:g} s"
        return f"error: TimeoutError: {text_of(error)}"
    except Exception as error:  # a user's tool may fail in any way
        return f"error: {type(error).__name__}: {text_of(error)}"


def _function(called: Callable[..., object]) -> Callable[..., object]:
    """The function below a `partial`."""
    while hasattr(called, "func"):
        called = called.func
    return called


def _readable(result: object) -> str:
    """Text as it is; anything else as JSON, and what has no JSON by its own text."""
    if isinstance(result, str):
        return result
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


async def on_thread(function: Callable[[], T]) -> T:
    """Call a plain function on a daemon thread; one whose caller gives up is made to end.

    It ends when it next executes Python code. One that hangs inside C code stays on its thread,
    for which nobody waits.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    lock = threading.Lock()
    running = True

    def finish(result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        nonlocal running
        result, failed = None, None
        try:
            result = function()
        except Exception as error:
            failed = error
        except BaseException as error:  # SystemExit, say, must not end more than the call
            failed = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
        finally:
            with lock:
                running = False
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, result, failed)

    thread = threading.Thread(target=work, name="tool", daemon=True)
    thread.start()
    try:
        return await future
    finally:
        with lock:  # while we hold it, the thread lives and its ident is its own
            if running and thread.ident is not None:
                ident = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
