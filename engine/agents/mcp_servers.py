"""Tools of MCP servers (Model Context Protocol), over standard input and output or HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import jsonschema

from engine.agents.tools import Tool
from engine.errors import ConfigError
from engine.rewards.calls import on_daemon_thread, text_of

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ListedTool

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
        about = {
            "name": listed.name,
            "description": listed.description or "",
            "parameters": parameters,
        }
        return Tool(
            listed.name,
            {"type": "function", "function": about},
            partial(self._call, server, listed.name),
            partial(_checked, parameters),
        )

    async def _call(self, server: str, tool: str, /, **arguments: object) -> str:
        client = await self._connected(server)
        result = await client.call_tool(tool, arguments)
        texts = [getattr(part, "text", f"({part.type})") for part in result.content]
        text = "\n".join(texts)
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
