"""Environments of the package `verifiers`, unchanged: those of its `load_environment` (0.1.14).

Those drive the model themselves, through a client. Ours hands each request over as an observation
and answers it with the policy's next turn, so that the transcript stays one of the very ids.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from engine.agents.protocol import Action, Message, Observation
from engine.agents.registry import register_environment
from engine.errors import ConfigError, EpisodeError

_TAKEN = (signal.SIGINT, signal.SIGTERM)  # signals that it handles itself, with an exit
_INSTALL = "docs/agents.md says how to install it"


@register_environment("verifiers")
class VerifiersEnvironment:
    """The row's `extra_info` names an example of the environment's own data set (`split`, `index`).

    `verifiers_rows` makes such rows. The rubric's reward comes with the last turn, and its metrics
    are the episode's `info`.
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
        return [_schema(tool) for tool in self._env.tool_defs or ()]

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        await self.close()
        self._turns = _Turns()
        example, client = self._example(row), _client_class()(self._turns)
        self._rollout = asyncio.create_task(self._env.run_rollout(example, client, "policy", {}))
        return await self._observed()

    async def step(self, action: Action) -> Observation:
        self._turns.answer(action)
        return await self._observed()

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
                "with engine.agents.environments.verifiers.verifiers_rows"
            )
        return _examples(self._id, self._arguments, str(about.get("split", "train")))[
            int(about["index"])
        ]

    async def _observed(self) -> Observation:
        """What the rollout asks next, or how it ended."""
        assert self._rollout is not None, "reset comes first"
        asked = asyncio.create_task(self._turns.asked())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return Observation(tuple(map(_plain_message, asked.result())))
        finally:
            asked.cancel()
        ended = self._rollout.result()
        if ended["error"] is not None:
            raise EpisodeError(f"environment {self._id!r} ended with {str(ended['error'])[:500]}")
        info = {**(ended["metrics"] or {}), "stop_condition": str(ended["stop_condition"])}
        return Observation(reward=float(ended["reward"]), done=True, info=info)


class _Turns:
    """Requests of one rollout, each with the turn that answers it."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[list[object]] = asyncio.Queue()
        self._answer: asyncio.Future[Action] | None = None
        self._known: list[object] = []  # messages that the policy has read or written

    async def request(self, messages: Sequence[Any]) -> Action:
        """The policy's turn after `messages`, the whole conversation.

        Raises EpisodeError where that is not the one before, with the policy's turn and more.
        """
        if self._answer is not None:
            raise EpisodeError("the environment asks for two turns at a time, and one is sampled")
        known, before = self._known, list(messages[: len(self._known)])
        turn = messages[len(known)].role if known and len(messages) > len(known) else "assistant"
        if before != known or turn != "assistant":
            raise EpisodeError(
                "the environment asks with a conversation that doesn't go on from its last turn: "
                "only what is appended can be trained on"
            )
        self._known = list(messages)
        self._asked.put_nowait(list(messages[len(known) + 1 if known else 0 :]))
        self._answer = asyncio.get_running_loop().create_future()
        try:
            return await self._answer
        finally:
            self._answer = None

    async def asked(self) -> list[object]:
        """The messages that the rollout has added."""
        return await self._asked.get()

    def answer(self, action: Action) -> None:
        """Let the rollout go on with the policy's turn."""
        if self._answer is None:
            raise EpisodeError("the rollout is over, and waits for no turn")
        self._answer.set_result(action)


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
            "prompt": [_plain_message(one) for one in examples[place]["prompt"]],
            "ability": "verifiers",
            "reward_model": {"style": "rule", "ground_truth": str(examples[place].get("answer"))},
            "extra_info": {"split": split, "index": place},
        }
        for place in range(len(examples) if count < 0 else min(count, len(examples)))
    ]


@functools.cache
def _loaded(id: str, arguments: str) -> Any:
    """The environment; one a process, which many rollouts share."""
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            f"environment 'verifiers' needs the package verifiers; {_INSTALL}"
        ) from error
    try:
        load = verifiers.load_environment
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"verifiers {verifiers.__version__} has no load_environment that works here ({error}); "
            f"0.1.14 has: {_INSTALL}"
        ) from error
    kept = {kind: signal.getsignal(kind) or signal.SIG_DFL for kind in _TAKEN}
    try:
        return load(id, **json.loads(arguments))
    except Exception as error:  # a package of others
        raise ConfigError(
            f"rollout.agent.environment.options.id={id!r} can't be loaded ({error})"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for kind, handler in kept.items():
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


def _schema(tool: Any) -> dict[str, object]:
    described = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": described}


def _plain_message(message: Any) -> Message:
    """A message of theirs as chat templates read it; EpisodeError for one that is not text."""
    plain = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    found = {key: value for key, value in plain.items() if value is not None}
    content = found.get("content", "")
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeError("the environment shows more than text, which can't be sampled from")
        content = "\n".join(part["text"] for part in content)
    calls = [_template_call(call) for call in found.get("tool_calls") or ()]
    return {**found, "content": content} | ({"tool_calls": calls} if calls else {})


def _template_call(call: Mapping[str, Any]) -> dict[str, object]:
    """A call with its arguments as a mapping."""
    given = call.get("function", call)
    arguments = given["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    function = {"name": given["name"], "arguments": arguments}
    return {"type": "function", "id": call.get("id", ""), "function": function}
