"""The environments that are shipped.

One that answers calls of tools until the policy answers without one, and those of other
libraries: Gymnasium and OpenEnv. Demonstration tasks are in the package `examples`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.agents.environment_protocol import Action, Message, Observation, register_environment
from engine.agents.tools import ToolSpec, answer, mcp_tools, resolve_tools, shorten, tool_message
from engine.errors import ConfigError, EpisodeError
from engine.registry import Registry

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


@register_environment("tools")
class ToolEnvironment:
    """The row's prompt stands; a turn without a call is the answer and ends the episode.

    A subclass says in `answered` what the answer is worth.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Any] = (),
        mcp_servers: Mapping[str, object] | None = None,
        timeout_s: float = 10.0,
        max_output: int = 4000,
        max_calls: int = 8,
    ) -> None:
        """`tools` are names, `package.module:function`, or mappings with `name` and `options`.

        `mcp_servers` are MCP servers by name, as {"command": …, "args": […]} or {"url": …}.
        `timeout_s` is a call's deadline in seconds, `max_output` the characters of a result that
        the model reads, and `max_calls` how many calls of a turn are run.
        """
        if max_calls < 1 or max_output < 1 or timeout_s <= 0:
            raise ConfigError(
                "rollout.agent.environment.options: max_calls and max_output are at least 1, "
                f"timeout_s above 0 (they are {max_calls}, {max_output} and {timeout_s})"
            )
        specs: list[ToolSpec] = list(tools)
        if mcp_servers:
            specs += mcp_tools(mcp_servers)
        self._tools = resolve_tools(specs)
        self._timeout_s, self._max_output, self._max_calls = timeout_s, max_output, max_calls
        self.row: Mapping[str, Any] = {}
        self.calls = 0  # that the episode has made so far, malformed ones included

    def tools(self) -> list[dict[str, Any]]:
        """The schemas for the chat template."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.row, self.calls = row, 0
        return Observation()

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls and not action.malformed:
            return await self.answered(action)
        self.calls += len(action.tool_calls) + len(action.malformed)
        return Observation(await self.results(action), info={"calls": self.calls})

    async def answered(self, action: Action) -> Observation:
        """The episode's end: what the policy wrote calls no tool."""
        return Observation(done=True, info={"calls": self.calls})

    async def results(self, action: Action) -> tuple[Message, ...]:
        """Run a turn's calls side by side; return the tool messages that answer them, in order."""
        run, left = action.tool_calls[: self._max_calls], action.tool_calls[self._max_calls :]
        answers = await asyncio.gather(
            *(answer(self._tools, call, self._timeout_s, self._max_output) for call in run)
        )
        malformed = [shorten(m, self._max_output) for m in action.malformed[: self._max_calls]]
        refused = f"error: at most {self._max_calls} calls a turn are run"
        return (
            *answers,
            *(tool_message(refused, call) for call in left),
            *(tool_message(f"error: {text}") for text in malformed),
        )

    async def close(self) -> None:
        """Nothing is held: MCP servers are shared by the process, and end with it."""

    def get_state(self) -> object:
        return {"row": dict(self.row), "calls": self.calls}

    def set_state(self, state: Any) -> None:
        self.row, self.calls = state["row"], state["calls"]


def _seed_of(row: Mapping[str, Any]) -> int | None:
    about = row.get("extra_info") or {}
    seed = about.get("seed", about.get("index"))
    return None if seed is None else int(seed)


def _prompt_of(row: Mapping[str, Any]) -> list[Message]:
    return [dict(message) for message in row.get("prompt") or ()]


_functions: Registry[object] = Registry("function", "rollout.agent.environment.options")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@register_environment("gymnasium")
class GymnasiumEnvironment:
    """An environment with Gymnasium's interface, in text.

    What it shows is a user's message; the policy's text becomes one of its actions. The row's
    prompt comes first, where it has one, then the first observation. The seed is the row's
    `extra_info.seed`, or its `index`, so that a group plays one episode.
    """

    def __init__(
        self,
        *,
        id: str = "",
        arguments: Mapping[str, object] | None = None,
        actions: Sequence[str] = (),
        show: str = "",
        read: str = "",
        max_turns: int = 50,
        invalid_reward: float = 0.0,
    ) -> None:
        """`id` is one of Gymnasium's, or `package.module:Class`; `arguments` are given to it.

        `actions` are words for the actions 0, 1, …: the last one that a turn names counts. Without
        them it is the turn's last number, or the text where the action space is one of text.
        `show` and `read` replace this, as `package.module:function`: an observation to text, and a
        text to an action (ValueError for none). A turn without an action is told so, and earns
        `invalid_reward`.
        """
        if not id or max_turns < 1:
            raise ConfigError(
                "environment 'gymnasium' needs options.id, and max_turns of at least 1"
            )
        self._env = _made(id, dict(arguments or {}))
        self._actions = [word.lower() for word in actions]
        self._show: Callable[[object], object] = _function(show) if show else str
        self._read = _function(read) if read else self._action_of
        self._max_turns, self._invalid_reward = max_turns, invalid_reward
        self._turns = 0

    async def reset(self, row: Mapping[str, object]) -> Observation:
        seen, info = self._env.reset(seed=_seed_of(row))
        self._turns = 0
        return Observation((*_prompt_of(row), self._message(seen)), info=dict(info))

    async def step(self, action: Action) -> Observation:
        self._turns += 1
        cut = self._turns >= self._max_turns
        try:
            chosen = self._read(action.text)
        except ValueError as error:
            message = {"role": "user", "content": f"That is no action: {error}"}
            return Observation((message,), self._invalid_reward, cut, {"invalid": True})
        seen, reward, terminated, truncated, info = self._env.step(chosen)
        done = bool(terminated or truncated) or cut
        about = {**info, "terminated": bool(terminated), "turns": self._turns}
        return Observation((self._message(seen),), float(reward), done, about)

    async def close(self) -> None:
        self._env.close()

    def _message(self, seen: object) -> Message:
        return {"role": "user", "content": str(self._show(seen))}

    def _action_of(self, text: str) -> str | int | float:
        if self._actions:
            positions = {text.lower().rfind(word): i for i, word in enumerate(self._actions)}
            last = max(positions)
            if last < 0:
                raise ValueError(f"name one of {', '.join(self._actions)}")
            return positions[last]
        space: Any = getattr(self._env, "action_space", None)
        if type(space).__name__ == "Text":
            return text
        numbers = _NUMBER.findall(text)
        if not numbers:
            raise ValueError("give a number")
        if type(space).__name__ != "Discrete":
            return float(numbers[-1]) if "." in numbers[-1] else int(numbers[-1])
        value = int(float(numbers[-1]))
        if not space.contains(value):
            raise ValueError(f"{value} is not in {space}")
        return value


def _made(name: str, arguments: Mapping[str, Any]) -> Any:
    if ":" in name:
        return _function(name)(**arguments)
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"rollout.agent.environment.options.id={name!r} needs the package gymnasium; install "
            "hybridflyte[gymnasium], or name a class as package.module:Class"
        ) from error
    try:
        return gymnasium.make(name, **arguments)
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(
            f"rollout.agent.environment.options.id={name!r} can't be made ({error})"
        ) from error


def _function(path: str) -> Callable[..., object]:
    """What stands at `package.module:attribute`."""
    target = _functions.load(path)
    if not callable(target):
        raise ConfigError(f"{_functions.setting}: {path!r} is {target!r}, which can't be called")
    return target


# The messages of an OpenEnv server (`openenv-core`):
#
#     {"type": "reset", "data": {"seed": 7}}            → {"type": "observation", "data": {…}}
#     {"type": "step", "data": {"message": "hello"}}    → {"type": "observation", "data": {…}}
#
# with data {"observation": {…}, "reward": …, "done": …}. Plain HTTP has no sessions there.

_LARGEST = 16 << 20  # bytes of a message


@register_environment("openenv")
class OpenEnvEnvironment:
    """An environment behind an OpenEnv server, in a session of its WebSocket.

    What the server shows is a user's message; the policy's text is a field of its action.
    The row's prompt comes first, then the first observation. The seed is the row's
    `extra_info.seed`, or its `index`.
    """

    def __init__(
        self,
        *,
        url: str = "",
        action_field: str = "message",
        action_extra: Mapping[str, object] | None = None,
        observation_fields: Sequence[str] = (),
        connect_timeout_s: float = 10.0,
    ) -> None:
        """`url` is the server's, e.g. "http://127.0.0.1:8000".

        `action_field` takes the policy's text, beside the fields of `action_extra`.
        `observation_fields` are shown, one below the other; without any, an observation's only
        text, or all of it as JSON.
        """
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"environment 'openenv' needs options.url; {url!r} is none, give e.g. "
                "http://127.0.0.1:8000"
            )
        self._url = re.sub("^http", "ws", url).rstrip("/") + "/ws"
        self._action_field, self._action_extra = action_field, dict(action_extra or {})
        self._fields = tuple(observation_fields)
        self._connect_timeout_s = connect_timeout_s
        self._socket: ClientConnection | None = None

    async def reset(self, row: Mapping[str, object]) -> Observation:
        seed = _seed_of(row)
        first = await self._request("reset", {} if seed is None else {"seed": seed})
        return replace(first, messages=(*_prompt_of(row), *first.messages))

    async def step(self, action: Action) -> Observation:
        return await self._request("step", {**self._action_extra, self._action_field: action.text})

    async def close(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            await socket.send(json.dumps({"type": "close"}))
            await socket.close()

    async def _request(self, kind: str, data: Mapping[str, object]) -> Observation:
        """Send a message and wait for its answer; the pool has the deadline."""
        if self._socket is None:
            self._socket = await self._connect()
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise EpisodeError(f"the OpenEnv server answered {str(answer)[:200]!r}")
        if answer.get("type") != "observation":
            refusal = answer["data"]
            words = f"{refusal.get('code', '')} {refusal.get('message', refusal)}".strip()
            raise EpisodeError(f"the OpenEnv server refused {kind}: {words[:300]}")
        result = answer["data"]
        done = any(bool(result.get(key)) for key in ("done", "terminated", "truncated"))
        seen = result.get("observation", {})
        if isinstance(seen, dict) and not seen.get("metadata", True):
            del seen["metadata"]  # a field of every observation; nothing is in it
        message = {"role": "user", "content": self._shown(seen)}
        reward = float(result.get("reward") or 0.0)
        return Observation((message,), reward, done, {"observation": seen})

    async def _connect(self) -> ClientConnection:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ConfigError(
                "environment 'openenv' needs the package websockets; install hybridflyte[openenv]"
            ) from error
        try:
            return await connect(
                self._url, open_timeout=self._connect_timeout_s, max_size=_LARGEST, proxy=None
            )
        except (OSError, TimeoutError) as error:
            raise EpisodeError(f"no OpenEnv server at {self._url} ({error})") from error

    def _shown(self, seen: object) -> str:
        if not isinstance(seen, Mapping):
            return str(seen)
        if missing := [name for name in self._fields if name not in seen]:
            raise EpisodeError(
                f"the OpenEnv server's observation has no {missing[0]!r}; it has "
                f"{', '.join(seen)}, so correct options.observation_fields"
            )
        if self._fields:
            return "\n".join(str(seen[name]) for name in self._fields)
        texts = [value for value in seen.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)
