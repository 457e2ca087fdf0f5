"""An episode that is over, as evaluation and pages read it: its text, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.agents.call_parsers import CallParser, parse_turn
from engine.agents.episode import Episode
from engine.agents.protocol import Message

SUCCESS = ("success", "solved", "correct")  # what environments call it in their `info`


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """What the policy and its environment said, and what came of it."""

    text: str  # a line "role> …" a message after the prompt, e.g. "assistant> 50\nuser> higher"
    answer: str  # the policy's last turn
    turns: int  # of the policy
    calls: int  # of tools, those that can't be read not among them
    malformed: int  # calls that can't be read
    reward: float  # of all turns, by the environment
    success: bool | None  # by `info`; None: it doesn't say
    end: str  # see `episode.End`
    tokens: int  # sampled
    truncated: bool  # the last turn was cut, or a limit ended it
    failed: bool  # the environment gave no answer


def played(episode: Episode, parser: CallParser | None) -> PlayedEpisode:
    """An episode that has ended. `parser` reads its calls; None: there are no tools."""
    transcript = episode.transcript
    assert transcript is not None
    assert episode.end is not None, "the episode was played"
    said = after_prompt(episode.messages, transcript.turns)
    own = [str(message["content"]) for message in said if message["role"] == "assistant"]
    parsed = [parse_turn(parser, text) for text in own] if parser is not None else []
    return PlayedEpisode(
        text="\n".join(f"{message['role']}> {message['content']}" for message in said),
        answer=own[-1] if own else "",
        turns=transcript.turns,
        calls=sum(len(turn.tool_calls) for turn in parsed),
        malformed=sum(len(turn.malformed) for turn in parsed),
        reward=sum(episode.turn_rewards),
        success=success_of(episode.info),
        end=episode.end,
        tokens=transcript.sampled_tokens,
        truncated=episode.truncated,
        failed=episode.end == "failed",
    )


def after_prompt(messages: Sequence[Message], turns: int) -> Sequence[Message]:
    """The messages from the policy's first turn on, of which there are `turns`."""
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[own[-turns] :] if 0 < turns <= len(own) else ()


def success_of(info: Mapping[str, object]) -> bool | None:
    """Whether an episode succeeded, by the first name of `SUCCESS` that its `info` has."""
    return next((bool(info[name]) for name in SUCCESS if name in info), None)
