"""The environments that are shipped.

One that answers calls of tools until the policy answers without one, and those of other
libraries: Gymnasium, OpenEnv and verifiers. Demonstration tasks are in the package `examples`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from engine.agents.environment_protocol import Action, Message, Observation, register_environment
from engine.agents.tools import ToolSpec, answer, mcp_tools, resolve_tools, shorten, tool_message
from engine.errors import ConfigError, EpisodeError

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
        self._env: Any = _made(id, dict(arguments or {}))
        self._actions = [word.lower() for word in actions]
        self._show: Callable[[object], object] = _function(show) if show else str
        self._read = _function(read) if read else self._action_of
        self._max_turns, self._invalid_reward = max_turns, invalid_reward
        self._turns = 0

    async def reset(self, row: Mapping[str, Any]) -> Observation:
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
    module, _, attribute = path.partition(":")
    try:
        target = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollout.agent.environment.options: {path!r} can't be imported ({error})"
        ) from error
    if not callable(target):
        raise ConfigError(
            f"rollout.agent.environment.options: {path!r} is {target!r}, which can't be called"
        )
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

    async def reset(self, row: Mapping[str, Any]) -> Observation:
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


_TAKEN = (signal.SIGINT, signal.SIGTERM)  # signals that it handles itself, with an exit


@register_environment("verifiers")
class VerifiersEnvironment:
    """An environment of the package `verifiers`, unchanged: of its `load_environment` (0.1.14).

    It drives the model itself, through a client. Ours hands each request over as an observation and
    answers it with the policy's next turn, so that the transcript stays one of the very ids. The
    row's `extra_info` names an example of its data set (`verifiers_rows` makes such rows). The
    rubric's reward comes with the last turn, and its metrics are the episode's `info`.
    """

    def __init__(self, *, id: str = "", arguments: Mapping[str, object] | None = None) -> None:
        """`id` is `load_environment`'s, e.g. "wordle"; `arguments` are given to it."""
        if not id:
            raise ConfigError("environment 'verifiers' needs options.id, e.g. wordle; set it")
        self._id, self._arguments = id, json.dumps(dict(arguments or {}), sort_keys=True)
        self._env = _loaded(self._id, self._arguments)
        if self._env.requires_group_rollouts:
            raise ConfigError(
                f"rollout.agent.environment.options.id={id!r}: its rubric scores the rollouts of a "
                "group together, and episodes are scored alone; give it reward functions of one"
            )
        self._turns = _Turns()
        self._rollout: asyncio.Task[Any] | None = None

    def tools(self) -> list[dict[str, object]]:
        """The schemas for the chat template."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in self._env.tool_defs or ()
        ]

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        await self.close()
        self._turns = _Turns()
        example, client = self._example(row), _client_class()(self._turns)
        self._rollout = asyncio.create_task(self._env.run_rollout(example, client, "policy", {}))
        return await self._next_observation()

    async def step(self, action: Action) -> Observation:
        if self._turns.answer is None:
            raise EpisodeError("the rollout is over, and waits for no turn")
        self._turns.answer.set_result(action)
        return await self._next_observation()

    async def close(self) -> None:
        """End the rollout, if one is under way; the process keeps the environment itself."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})
            self._rollout = None

    def _example(self, row: Mapping[str, Any]) -> dict[str, object]:
        about = row.get("extra_info") or {}
        if "index" not in about:
            raise ConfigError(
                "environment 'verifiers' reads extra_info.index, which a row lacks; make the rows "
                "with engine.agents.environments.verifiers_rows"
            )
        examples = _examples(self._id, self._arguments, str(about.get("split", "train")))
        return examples[int(about["index"])]

    async def _next_observation(self) -> Observation:
        """What the rollout asks next, or how it ended."""
        assert self._rollout is not None, "reset comes first"
        request = asyncio.create_task(self._turns.requests.get())
        try:
            await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return Observation(tuple(map(_plain_message, request.result())))
        finally:
            request.cancel()
        ended = self._rollout.result()
        if ended["error"] is not None:
            raise EpisodeError(f"environment {self._id!r} ended with {str(ended['error'])[:500]}")
        info = {**(ended["metrics"] or {}), "stop_condition": str(ended["stop_condition"])}
        return Observation(reward=float(ended["reward"]), done=True, info=info)


class _Turns:
    """Requests of one rollout, each with the turn that answers it."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[list[object]] = asyncio.Queue()  # messages that were added
        self.answer: asyncio.Future[Action] | None = None
        self._known: list[object] = []  # messages that the policy has read or written

    async def request(self, messages: Sequence[Any]) -> Action:
        """The policy's turn after `messages`, the whole conversation.

        Raises EpisodeError where that is not the one before, with the policy's turn and more.
        """
        if self.answer is not None:
            raise EpisodeError("the environment asks for two turns at a time, and one is sampled")
        known, before = self._known, list(messages[: len(self._known)])
        turn = messages[len(known)].role if known and len(messages) > len(known) else "assistant"
        if before != known or turn != "assistant":
            raise EpisodeError(
                "the environment asks with a conversation that doesn't go on from its last turn: "
                "only what is appended can be trained on"
            )
        self._known = list(messages)
        self.requests.put_nowait(list(messages[len(known) + 1 if known else 0 :]))
        self.answer = asyncio.get_running_loop().create_future()
        try:
            return await self.answer
        finally:
            self.answer = None


def verifiers_module(id: str) -> str:
    """The module that `load_environment` imports for an id, e.g. "my_env" for "owner/my-env"."""
    return id.replace("-", "_").rpartition("/")[2]


def verifiers_rows(
    id: str,
    arguments: Mapping[str, object] | None = None,
    *,
    split: Literal["train", "eval"] = "train",
    count: int = -1,
) -> list[dict[str, object]]:
    """Rows of RL data for the first `count` examples (-1: all) of an environment's data set."""
    examples = _examples(id, json.dumps(dict(arguments or {}), sort_keys=True), split)
    return [
        {
            "data_source": id,
            "prompt": [_plain_message(message) for message in examples[index]["prompt"]],
            "ability": "verifiers",
            "reward_model": {"style": "rule", "ground_truth": str(examples[index].get("answer"))},
            "extra_info": {"split": split, "index": index},
        }
        for index in range(len(examples) if count < 0 else min(count, len(examples)))
    ]


@functools.cache
def _loaded(id: str, arguments: str) -> Any:
    """The environment; one a process, which many rollouts share."""
    try:
        import verifiers

        load = verifiers.load_environment
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            "environment 'verifiers' needs the package verifiers, whose load_environment of 0.1.14 "
            f"works here ({error}); docs/agents.md says how to install it"
        ) from error
    handlers = {kind: signal.getsignal(kind) or signal.SIG_DFL for kind in _TAKEN}
    try:
        return load(id, **json.loads(arguments))
    except Exception as error:  # a package of others
        raise ConfigError(
            f"rollout.agent.environment.options.id={id!r} can't be loaded ({error})"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for kind, handler in handlers.items():
                signal.signal(kind, handler)


@functools.cache
def _examples(id: str, arguments: str, split: str) -> Any:
    environment = _loaded(id, arguments)
    return environment.get_eval_dataset() if split == "eval" else environment.get_dataset()


@functools.cache
def _client_class() -> Callable[[_Turns], object]:
    """The package's client whose model is the policy."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage
    from verifiers.types import ToolCall as TheirCall

    class PolicyClient(Client):
        """Over `_Turns`; native messages and tools are the package's own."""

        def setup_client(self, config: object) -> object:
            return config

        async def to_native_tool(self, tool: object) -> object:
            return tool

        async def to_native_prompt(self, messages: object) -> tuple[object, dict[str, object]]:
            return messages, {}

        async def get_native_response(
            self, prompt: object, model: str, sampling_args: object, tools: object = None, **_: Any
        ) -> object:
            action = await self.client.request(prompt)
            calls = [
                TheirCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments)))
                for call in action.tool_calls
            ]
            message = ResponseMessage(
                content=action.text if action.content is None else action.content,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="policy", created=0, model=model, usage=None, message=message)

        async def raise_from_native_response(self, response: object) -> None:
            """The policy's turns are all valid."""

        async def from_native_response(self, response: object) -> object:
            return response

        async def close(self) -> None:
            """Nothing is held."""

    return PolicyClient


def _plain_message(message: Any) -> Message:
    """A message of theirs as chat templates read it; EpisodeError for one that is not text."""
    plain = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    fields = {key: value for key, value in plain.items() if value is not None}
    content = fields.get("content", "")
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeError("the environment shows more than text, which can't be sampled from")
        content = "\n".join(part["text"] for part in content)
    calls = []
    for call in fields.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = called["arguments"]  # as a mapping
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        function = {"name": called["name"], "arguments": arguments}
        calls.append({"type": "function", "id": call.get("id", ""), "function": function})
    return {**fields, "content": content} | ({"tool_calls": calls} if calls else {})
