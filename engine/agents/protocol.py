"""What an environment is: an episode's other side, which answers the policy turn by turn.

    observation = await environment.reset(row)        # first messages, or none: the row's prompt
    while not observation.done:
        action = …                                    # what the policy wrote in its turn
        observation = await environment.step(action)  # what it reads next, and the turn's reward
    await environment.close()

One instance plays one episode at a time and may be reset for the next. Text becomes tokens
elsewhere: environments read and write messages. `registry` has environments by name, `pool` runs
them in processes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

Message: TypeAlias = Mapping[str, Any]
"""As chat templates read it: {"role": "user", "content": "What is 2+3?"}; an assistant's may have
`tool_calls`, a tool's has `name` and `tool_call_id`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote, e.g. ToolCall("calculator", {"expression": "2*3"}, "c0")."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # repeated by the answer as `tool_call_id`

    def message(self) -> Message:
        """The call as an entry of an assistant message's `tool_calls`."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did in one turn."""

    text: str  # all that it wrote, special tokens removed, calls included
    token_ids: tuple[int, ...] = ()  # the very ids that were sampled
    tool_calls: tuple[ToolCall, ...] = ()  # in the order of the text; none without a call parser
    malformed: tuple[str, ...] = ()
    """A sentence for each piece of text that begins a call and is none, e.g. "no JSON: …"."""
    content: str | None = None  # the text outside of calls; None without a call parser


@dataclass(frozen=True, slots=True)
class Observation:
    """What follows a turn: what the policy reads before its next one, and what the turn earned."""

    messages: tuple[Message, ...] = ()  # new ones alone, e.g. ({"role": "tool", "content": "6"},)
    reward: float = 0.0  # of this turn; finite
    done: bool = False  # the episode is over; its messages are read by nobody
    info: Mapping[str, object] = field(default_factory=dict)
    """Beside the episode, e.g. {"solved": True}: numbers and booleans are averaged as metrics."""


class Environment(Protocol):
    """One episode at a time. Plain classes will do; nothing is inherited.

    An environment with tools also has `tools() -> list` of JSON schemas in the chat template's form
    ({"type": "function", "function": {"name", "description", "parameters"}}), the same for every
    episode. One whose episodes can be saved between turns is a `ResumableEnvironment`.
    """

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row of the data set (`prompt`, `extra_info` and so on).

        The messages are the prompt's; empty where the row's own `prompt` stands.
        """
        ...

    async def step(self, action: Action) -> Observation:
        """Answer a turn of the policy."""
        ...

    async def close(self) -> None:
        """Give back what the environment holds; called once, after its last episode."""
        ...


@runtime_checkable
class ResumableEnvironment(Protocol):
    """An environment whose episode can be saved between turns and continued by another instance.

    Without both methods an interrupted episode is begun again from its row.
    """

    def get_state(self) -> object:
        """The episode's state, picklable."""
        ...

    def set_state(self, state: object) -> None:
        """Continue the episode whose `get_state` this was, in place of `reset`."""
        ...


def is_resumable(environment: object) -> bool:
    """Whether an environment's episodes can be saved between turns."""
    return isinstance(environment, ResumableEnvironment)


def tool_schemas(environment: object) -> list[dict[str, object]]:
    """The JSON schemas of an environment's tools; empty for one without any."""
    tools = getattr(environment, "tools", None)
    found: Sequence[Mapping[str, object]] = () if tools is None else tools()
    return [dict(schema) for schema in found]
