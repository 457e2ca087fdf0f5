"""What an environment is: an episode's other side, which answers the policy turn by turn.

    observation = await environment.reset(row)        # first messages, or none: the row's prompt
    while not observation.done:
        action = …                                    # what the policy wrote in its turn
        observation = await environment.step(action)  # what it reads next, and the turn's reward
    await environment.close()

One instance plays one episode at a time and may be reset for the next. Text becomes tokens
elsewhere: environments read and write messages. `environment_pool` runs them in processes of their
own. Imports neither torch nor pydantic.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from engine.errors import ConfigError, EpisodeError
from engine.registry import Options, Registry
from engine.rewards.calls import text_of
from engine.rewards.reward_function import float32_or_nan

Message: TypeAlias = Mapping[str, Any]
"""As chat templates read it: {"role": "user", "content": "What is 2+3?"}; an assistant's may have
`tool_calls`, a tool's has `name` and `tool_call_id`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote, e.g. ToolCall("calculator", {"expression": "2*3"}, "c0")."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # repeated by the answer as `tool_call_id`


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

    async def reset(self, row: Mapping[str, object]) -> Observation:
        """Begin the episode of a row of the data set (`prompt`, `extra_info` and so on).

        The messages are the prompt's; empty where the row's own `prompt` stands.
        """

    async def step(self, action: Action) -> Observation:
        """Answer a turn of the policy."""

    async def close(self) -> None:
        """Give back what the environment holds; called once, after its last episode."""


@runtime_checkable
class ResumableEnvironment(Protocol):
    """An environment whose episode can be saved between turns and continued by another instance.

    Without both methods an interrupted episode restarts from its row.
    """

    def get_state(self) -> object:
        """The episode's state, picklable."""

    def set_state(self, state: object) -> None:
        """Continue the episode whose `get_state` this was, in place of `reset`."""


def tool_schemas(environment: object) -> list[dict[str, object]]:
    """The JSON schemas of an environment's tools; empty for one without any."""
    tools = getattr(environment, "tools", None)
    schemas: Sequence[Mapping[str, object]] = () if tools is None else tools()
    return [dict(schema) for schema in schemas]


# Why an environment gave no observation, and what an observation must be.

FailureCause: TypeAlias = Literal[
    "raised", "deadline", "malformed", "not_finite", "crashed", "lost"
]
"""`crashed`: its process ended in the call. `lost`: its process ended for another's sake."""


class EnvironmentFailure(EpisodeError):
    """An episode that can't go on; its environment has been replaced."""

    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause: FailureCause = cause

    @classmethod
    def of(cls, who: str, error: BaseException) -> Self:
        """The failure of an environment's call that raised."""
        return cls("raised", f"{who} raised {type(error).__name__}: {text_of(error)}")


def checked_observation(who: str, value: object) -> Observation:
    """An observation of plain data; raise EnvironmentFailure for what is none."""
    if not isinstance(value, Observation):
        raise EnvironmentFailure(
            "malformed",
            f"{who} returned {type(value).__name__}; return an Observation of "
            "engine.agents.environment_protocol",
        )
    reward = float32_or_nan(value.reward)
    if math.isnan(reward):
        raise EnvironmentFailure(
            "not_finite", f"{who} returned reward {value.reward!r:.100}; it must be a finite float"
        )
    try:
        messages = tuple(_message(entry) for entry in value.messages)
        info = {str(key): _plain_or_text(entry) for key, entry in dict(value.info).items()}
        done = bool(value.done)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(
            "malformed", f"{who} returned an observation that can't be read ({error})"
        ) from None
    return Observation(messages, reward, done, info)


def _message(message: object) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('a message is a mapping with "role" and "content"')
    if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
        raise ValueError(f"the content of a {message['role']!r} message is no text")
    return _plain(dict(message))


def _plain(value: object) -> Any:
    """The value as JSON has it, arrays as lists; raise TypeError or ValueError for others."""

    def listed(value: Any) -> object:
        return dict(value) if isinstance(value, Mapping) else value.tolist()

    try:
        return json.loads(json.dumps(value, default=listed))
    except (AttributeError, RecursionError) as error:
        raise ValueError(f"it is no plain value: {error}") from None


def _plain_or_text(value: object) -> object:
    """An entry of `info`: plain, or else its text, as nothing depends on it."""
    try:
        return _plain(value)
    except (TypeError, ValueError):
        return repr(value)[:200]


# Environments by name. The options of one are the keyword-only parameters with defaults of its
# `__init__`. `package.module:Class` names one that is registered in its module.

_C = TypeVar("_C", bound=Callable[..., Any])

_registry: Registry[Callable[..., Environment]] = Registry(
    "environment",
    "rollout.agent.environment.name",
    ("engine.agents.environments",),
    "@register_environment(name)",
)


def register_environment(name: str) -> Callable[[_C], _C]:
    """Make an environment's class selectable by name; a name can be taken once.

    Raises ConfigError for a name that is taken, and for a class without the protocol's coroutines.
    """

    def add(made: _C) -> _C:
        _check(name, made)
        _registry.add(name, made)
        return made

    return add


def environment_class(name: str) -> Callable[..., Environment]:
    """What makes environments of this name, or stands at `package.module:Class`.

    Raises ConfigError where there is none, or it has not the protocol's coroutines.
    """
    made = _registry.load(name) if ":" in name else _registry.get(name)
    if not callable(made):
        raise ConfigError(
            f"rollout.agent.environment.name={name!r} is {made!r}, which makes no environments"
        )
    _check(name, made)
    return made


def make_environment(name: str, options: Mapping[str, object] | None = None) -> Environment:
    """Make the environment registered as `name`, or the one of the class at `package.module:Class`.

    Raises ConfigError where there is none, and for an option that it doesn't declare.
    """
    made = environment_class(name)
    declared = Options(f"environment {name!r}", made)
    return made(**declared.parse(options or {}, "rollout.agent.environment.options"))


environment_module = _registry.module


def _check(name: str, made: Callable[..., object]) -> None:
    """Refuse a class that can't play; of a function nothing is known before it is called."""
    methods = ("reset", "step", "close")
    missing = [m for m in methods if not inspect.iscoroutinefunction(getattr(made, m, None))]
    if inspect.isclass(made) and missing:
        raise ConfigError(
            f"environment {name!r}: {made.__qualname__} has no `async def {missing[0]}`; write it "
            "as engine.agents.environment_protocol.Environment has it"
        )
