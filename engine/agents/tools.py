"""Tools that a policy calls: Python functions with the JSON schema of their type hints.

What a tool is, tools by name, and their calls, which end by a deadline in a message for the
model. Shipped tools are in `builtin_tools`, those of MCP servers by `mcp_tools`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_type_hints

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from engine.agents.environment_protocol import Message, ToolCall
from engine.errors import ConfigError
from engine.registry import Options, Registry, origin
from engine.rewards.calls import text_of
from engine.worker_process import on_daemon_thread

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ListedTool

# A tool's schema has the form that chat templates read and `transformers.utils.get_json_schema`
# writes. Pydantic makes it here, as transformers loads torch for it, and checks calls' arguments.

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """What a policy can call."""

    name: str
    schema: Mapping[str, Any]  # {"type": "function", "function": {"name", …, "parameters"}}
    function: Callable[..., Any]  # of what `arguments` gives; a coroutine function or a plain one
    arguments: Callable[[Mapping[str, object]], dict[str, object]]
    """Checks and converts a call's arguments; raises ValueError with a sentence for the model."""


def function_tool(
    function: Callable[..., object], options: Mapping[str, object] | None = None
) -> Tool:
    """Make a tool of a function with type hints and a docstring that describes its arguments.

    Keyword-only parameters with defaults are options: `options` set them, and the model doesn't see
    them. Raises ConfigError for a function that lacks a docstring, a type hint or the description
    of an argument, for a type without a JSON schema, and for an option that it doesn't declare.
    """
    name = getattr(function, "__name__", type(function).__name__)
    owner = Options(f"tool {name!r}", function)
    bound_options = owner.parse(options or {}, f"tool {name!r}")
    description, described = _read_docstring(name, function)
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name!r}: its type hints can't be read ({error})") from error
    fields: dict[str, Any] = {}
    arguments = [p for p in parameters if p.name not in owner]
    names = [p.name for p in arguments]
    for index, parameter in enumerate(arguments):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r} takes *{parameter.name}; name each argument")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: argument {parameter.name!r} needs a type hint")
        if parameter.name not in described:
            raise ConfigError(
                f"tool {name!r}: its docstring doesn't describe argument {parameter.name!r}; add "
                f'"{parameter.name}: …" under "Args:"'
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        text = described[parameter.name]
        # An alias, as pydantic keeps some names to itself.
        field = Field(default, alias=parameter.name, description=text)
        fields[f"argument_{index}"] = (hints[parameter.name], field)
    try:
        model = create_model(name, __config__=_CONFIG, **fields)
        schema = _plain(model.model_json_schema(by_alias=True))
    except Exception as error:  # pydantic has many kinds of them
        raise ConfigError(
            f"tool {name!r} ({origin(function)}): a type hint has no JSON schema ({error})"
        ) from error
    schema.pop("additionalProperties", None)
    schema.pop("description", None)
    schema.setdefault("properties", {})
    described_function = {"name": name, "description": description, "parameters": schema}
    return Tool(
        name,
        {"type": "function", "function": described_function},
        partial(function, **bound_options) if bound_options else function,
        partial(_arguments, model, names),
    )


def _arguments(
    model: type[BaseModel], names: list[str], arguments: Mapping[str, object]
) -> dict[str, object]:
    try:
        made = model.model_validate(dict(arguments))
    except ValidationError as error:
        raise ValueError("; ".join(_sentence(entry, names) for entry in error.errors())) from None
    return {name: getattr(made, f"argument_{i}") for i, name in enumerate(names)}


def _sentence(error: ErrorDetails, names: list[str]) -> str:
    """One error of pydantic's, in a policy's words."""
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"there is no argument {where!r} (it takes {', '.join(names) or 'none'})"
    if error["type"] == "missing":
        return f"argument {where!r} is missing"
    return f"argument {where!r}: {error['msg']}"


def _plain(schema: object) -> Any:
    """A schema without titles and defaults, which only cost tokens."""
    if isinstance(schema, list):
        return [_plain(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            plain[key] = {name: _plain(entry) for name, entry in value.items()}
        elif key not in ("title", "default"):
            plain[key] = value if key in ("enum", "const", "required") else _plain(value)
    return plain


def _read_docstring(name: str, function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """The description, and that of each argument, of a docstring in Google's style."""
    text = inspect.getdoc(function if inspect.isroutine(function) else type(function))
    if not text or not text.strip():
        raise ConfigError(f"tool {name!r} has no docstring; the model reads there what it does")
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described: dict[str, str] = {}
    lines = (sections.get("Args") or sections.get("Arguments") or "").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    last = ""
    for line in lines:
        match = _ARGUMENT.match(line[margin:])
        if match and line.strip():
            last = match.group(1)
            described[last] = match.group(2).strip()
        elif last and line.strip():  # it goes on
            described[last] += " " + line.strip()
    return " ".join(parts[0].split()), described


# Tools by name. The options of one are its keyword-only parameters with defaults.
# `package.module:function` names one that isn't registered.

ToolSpec: TypeAlias = "str | Mapping[str, object] | Tool | Callable[..., object]"
"""A name, {"name": …, "options": {…}}, a tool, or the function that makes one."""

_registry: Registry[Callable[..., object]] = Registry(
    "tool",
    "rollout.agent.environment.options.tools",
    ("engine.agents.builtin_tools",),
    "@register_tool(name)",
)


register_tool = _registry.register
"""Decorator: make a function selectable as a tool; the model sees the function's own name."""


def resolve_tools(specs: Iterable[ToolSpec]) -> dict[str, Tool]:
    """The tools by the names that a model calls; ConfigError for one that isn't there, or twice."""
    by_name: dict[str, Tool] = {}
    for spec in specs:
        tool = spec if isinstance(spec, Tool) else _made(spec)
        if tool.name in by_name:
            raise ConfigError(
                f"rollout.agent.environment.options.tools has two tools {tool.name!r}; rename one"
            )
        by_name[tool.name] = tool
    return by_name


def _made(spec: str | Mapping[str, Any] | Callable[..., object]) -> Tool:
    if callable(spec):
        return function_tool(spec)
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec.get("name"), str) or spec.keys() - {"name", "options"}:
        raise ConfigError(
            f"rollout.agent.environment.options.tools has {dict(spec)!r}; give a name, "
            "or a mapping with `name` and `options`"
        )
    name = spec["name"]
    function: object = _registry.load(name) if ":" in name else _registry.get(name)
    if not callable(function):
        raise ConfigError(f"rollout.agent.environment.options.tools: {name!r} is no function")
    return function_tool(function, spec.get("options") or {})


# Calls of tools: each ends by its deadline in a message for the model, whatever the tool does.

T = TypeVar("T")


async def answer(
    tools: Mapping[str, Tool], call: ToolCall, timeout_s: float = 10.0, max_output: int = 4000
) -> Message:
    """The tool message that answers a call in time, in at most `max_output` characters.

    An unknown tool, wrong arguments, an exception, a late and an over-long result are told to the
    model in it. Coroutine functions run in this loop, plain ones on a thread of their own.
    """
    return tool_message(shorten(await _text(tools, call, timeout_s), max_output), call)


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


async def _text(tools: Mapping[str, Tool], call: ToolCall, timeout_s: float) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}; call one of {', '.join(tools) or 'none'}"
    try:
        arguments = tool.arguments(call.arguments)
    except (ValueError, TypeError) as error:
        return f"error: {text_of(error)}"
    function = getattr(tool.function, "func", tool.function)  # below a `partial`
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if inspect.iscoroutinefunction(inspect.unwrap(function)):
                result = await tool.function(**arguments)
            else:
                result = await on_thread(lambda: tool.function(**arguments))
        if isinstance(result, str):
            return result
        return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)
    except TimeoutError as error:
        if deadline.expired():
            return f"error: {call.name} took longer than {timeout_s:g} s"
        return f"error: TimeoutError: {text_of(error)}"
    except Exception as error:  # a user's tool may fail in any way
        return f"error: {type(error).__name__}: {text_of(error)}"


async def on_thread(function: Callable[[], T]) -> T:
    """Call a plain function on a daemon thread; one that is given up goes on there."""

    def call() -> T:
        try:
            return function()
        except Exception:
            raise
        except BaseException as error:  # SystemExit, say, must not end more than the call
            raise RuntimeError(f"{type(error).__name__}: {text_of(error)}") from error

    return await asyncio.wrap_future(on_daemon_thread(call))


# Tools of MCP servers (Model Context Protocol), over standard input and output or HTTP.

_START_S = 60.0
_CLOSE_S = 10.0


def mcp_tools(servers: Mapping[str, object]) -> list[Tool]:
    """The tools of servers; this process starts each once, and asks it for its list.

    Raises ConfigError for a wrong description, and for a server that doesn't answer.
    """
    for name, spec in servers.items():
        if not isinstance(spec, Mapping) or ("command" in spec) == ("url" in spec):
            raise ConfigError(
                f"rollout.agent.environment.options.mcp_servers.{name}: give either "
                "`command` (with `args`, `env`, `cwd`) or `url`"
            )
    return _listed_tools(json.dumps(servers, sort_keys=True))


@lru_cache(maxsize=16)
def _listed_tools(description: str) -> list[Tool]:
    servers = _McpServers(json.loads(description))
    # On a thread, in a loop of its own: the caller's may be running.
    listing = on_daemon_thread(asyncio.run, servers.list_tools())
    try:
        return listing.result((_START_S + _CLOSE_S) * len(servers.specs))
    except TimeoutError:
        raise ConfigError(
            f"rollout.agent.environment.options.mcp_servers: {', '.join(servers.specs)} "
            f"neither answered nor ended within {_START_S:g} s each; check their commands"
        ) from None


class _McpServers:
    """The servers of one configuration; connections are kept a loop."""

    def __init__(self, specs: Mapping[str, Mapping[str, object]]) -> None:
        self.specs = specs
        self._clients: dict[tuple[int, str], asyncio.Future[Client]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def list_tools(self) -> list[Tool]:
        tools: list[Tool] = []
        for name in self.specs:
            try:
                async with asyncio.timeout(_START_S), self._client(name) as client:
                    listed, cursor = [], None
                    while True:
                        page = await client.list_tools(cursor=cursor)
                        listed += page.tools
                        cursor = page.next_cursor
                        if not cursor:
                            break
            except ConfigError:
                raise
            except BaseException as error:  # also groups of them, which anyio raises
                raise ConfigError(
                    f"rollout.agent.environment.options.mcp_servers.{name} doesn't answer "
                    f"({type(error).__name__}: {text_of(error)}); check its command or url"
                ) from error
            tools += [self._tool(name, tool) for tool in listed]
        return tools

    def _tool(self, server: str, listed: ListedTool) -> Tool:
        parameters = dict(listed.input_schema)
        about = {"name": listed.name, "description": listed.description or ""}
        return Tool(
            listed.name,
            {"type": "function", "function": {**about, "parameters": parameters}},
            partial(self._call, server, listed.name),
            partial(_checked, parameters),
        )

    async def _call(self, server: str, tool: str, /, **arguments: object) -> str:
        client = await self._connected(server)
        result = await client.call_tool(tool, arguments)
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in result.content)
        return f"error: {text}" if result.is_error else text

    def _client(self, name: str) -> Client:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise ConfigError(
                "rollout.agent.environment.options.mcp_servers needs the package mcp; install "
                "hybridflyte[mcp]"
            ) from error
        spec = self.specs[name]
        server = spec["url"] if "url" in spec else StdioServerParameters(**spec)
        return Client(server)

    async def _connected(self, name: str) -> Client:
        """The client of a server in this loop; a task of its own holds it open to the end."""
        loop = asyncio.get_running_loop()
        key = (id(loop), name)
        ready = self._clients.get(key)
        if ready is None or (ready.done() and ready.exception() is not None):
            ready = self._clients[key] = loop.create_future()
            task = loop.create_task(self._hold(name, ready, key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(ready)

    async def _hold(self, name: str, ready: asyncio.Future[Client], key: tuple[int, str]) -> None:
        try:
            async with self._client(name) as client:
                ready.set_result(client)
                await asyncio.get_running_loop().create_future()  # until the loop ends
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self._clients.pop(key, None)


def _checked(schema: Mapping[str, object], arguments: Mapping[str, object]) -> dict[str, object]:
    try:
        jsonschema.validate(dict(arguments), schema)
    except jsonschema.ValidationError as error:
        raise ValueError(error.message) from None
    except jsonschema.SchemaError:  # the server's own check has to do
        return dict(arguments)
    return dict(arguments)
