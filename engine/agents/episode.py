"""One episode: its messages and ids, what it may still do, and how it ended.

Pure state: `rollout` samples its turns and asks its environment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.agents.protocol import Action, Message, Observation
from engine.agents.transcript import Transcript
from engine.data.continuation import encode_continuation
from engine.data.templates import decode_response, encode_prompt
from engine.rollout.protocol import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

End = Literal["done", "turns", "tokens", "seconds", "turn_seconds", "failed"]
"""done: the environment said so; failed: it gave no answer; else the limit that was reached, of
the episode or (turn_seconds) of its last turn."""
History = Literal["append", "branches"]
"""append: what was sampled stays as it is. branches: where the chat template writes earlier turns
otherwise (thoughts left out), the episode goes on from what it writes, as a sequence of its own."""
ReadAction = Callable[[str, tuple[int, ...]], Action]  # of a turn's text and ids


def plain_action(text: str, token_ids: tuple[int, ...]) -> Action:
    """A turn whose text is all there is to it: calls of tools are not looked for."""
    return Action(text, token_ids)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use."""

    max_response_length: int  # tokens after the prompt, observations included, e.g. 512
    max_model_len: int  # tokens of a sequence, prompt included, e.g. 1024
    max_turn_length: int | None = None  # tokens of one turn; None: what is left of the response
    max_turns: int | None = None  # turns of the policy; None: no limit
    seconds: float = 600.0  # from the first call of the environment on
    turn_seconds: float | None = None  # that sampling a turn may take; None: no limit
    drop: bool = False  # an episode that a limit ends is not learned from


class EpisodeTokenizer:
    """Makes an episode's messages tokens, and its turns text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        read_action: ReadAction,
        history: History = "append",
    ) -> None:
        self._tokenizer, self.stop_ids = tokenizer, tuple(stop_ids)
        self._read_action, self.history = read_action, history

    def action(self, ids: Sequence[int]) -> Action:
        """What a turn says."""
        return self._read_action(decode_response(self._tokenizer, ids), tuple(ids))

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> list[int]:
        """The prompt of messages, up to where the policy speaks."""
        return encode_prompt(self._tokenizer, messages, tools)

    def observation(
        self,
        messages: Sequence[Message],
        last_sampled: int,
        tools: Sequence[Mapping[str, object]],
    ) -> list[int]:
        """What `messages` add after a turn that ended with the token `last_sampled`."""
        ended_by = last_sampled if last_sampled in self.stop_ids else None
        return encode_continuation(self._tokenizer, messages, ended_by, self.stop_ids, tools)

    def rewritten(self, ids: Sequence[int], again: Sequence[int]) -> bool:
        """Whether `again`, the conversation rendered again, has another text than `ids`."""
        return ids != again and self._text(ids) != self._text(again)

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The next turn to sample."""

    key: Hashable  # (key of the prompt, index of the episode, turn)
    prompt_ids: list[int]
    max_new_tokens: int
    after: Hashable | None  # the turn before, where the prompt begins with it


@dataclass(slots=True)
class Episode:
    """An episode of the row `row` of a batch."""

    key: int  # of its prompt among those of a step, e.g. its group id
    row: int
    index: int  # among the episodes of the row
    tokenizer: EpisodeTokenizer
    limits: EpisodeLimits
    fallback_prompt: list[int]  # of the row; for an episode that fails before it has one
    tools: Sequence[Mapping[str, object]] = ()
    messages: list[Message] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)  # one a turn that could be read
    transcript: Transcript | None = None
    end: End | None = None
    error: str = ""  # why it failed
    info: dict[str, object] = field(default_factory=dict)  # the environment's, the latest wins
    turn_rewards: list[float] = field(default_factory=list)
    started: float = 0.0  # of time.monotonic
    environment_seconds: float = 0.0  # waited for
    truncated: bool = False  # its last turn was cut, or a limit ended it
    dropped: bool = False  # it failed, or a limit ended it, and is not learned from
    cut: bool = False  # its turn has taken too long

    @property
    def latest_turn(self) -> Hashable | None:
        """Key of the latest turn that was sampled."""
        if self.transcript is None or not self.transcript.turns:
            return None
        return (self.key, self.index, self.transcript.turns - 1)

    def begin(self, row_prompt: Sequence[Message], first: Observation) -> None:
        """Start with the environment's first messages, or the row's own prompt."""
        self.messages = list(first.messages or row_prompt)
        self.info |= first.info
        self.transcript = Transcript(self.tokenizer.prompt(self.messages, self.tools))
        if first.done:
            self.end = "done"

    def begin_again(self) -> None:
        """Forget all of it: it is begun from its row."""
        self.transcript, self.messages, self.info, self.turn_rewards = None, [], {}, []
        self.actions, self.truncated, self.cut = [], False, False

    def next_turn(self, now: float) -> TurnRequest | None:
        """The turn to sample at `now`, of time.monotonic; None, with `end` set, if none may be."""
        if self.end is not None:
            return None
        assert self.transcript is not None
        limits, ids = self.limits, self.transcript.ids
        left = min(
            limits.max_response_length - self.transcript.response_length,
            limits.max_model_len - len(ids),
        )
        if limits.max_turns is not None and self.transcript.turns >= limits.max_turns:
            self.end = "turns"
        elif left < 1:
            self.end = "tokens"
        elif now - self.started > limits.seconds:
            self.end = "seconds"
        elif self.cut:
            self.end = "turn_seconds"
        if self.end is not None:
            self.truncated, self.dropped = True, limits.drop
            return None
        if limits.max_turn_length is not None:
            left = min(left, limits.max_turn_length)
        turn, begun = self.transcript.turns, self.transcript.response_length > 0
        after = self.latest_turn if begun else None
        return TurnRequest((self.key, self.index, turn), ids, left, after)

    def add_turn(self, completion: Completion) -> Action:
        """Append a sampled turn; return what it says to the environment."""
        assert self.transcript is not None
        ids = completion.token_ids
        versions = completion.token_versions or [completion.policy_version] * len(ids)
        self.transcript.add_turn(ids, completion.log_probs, versions)
        self.truncated = completion.finish_reason == "length"
        self.cut = self.cut and self.truncated
        action = self.tokenizer.action(ids)
        self.actions.append(action)
        self.messages.append({"role": "assistant", "content": action.text})
        return action

    def observe(self, observation: Observation) -> None:
        """Take the environment's answer to the latest turn."""
        assert self.transcript is not None
        self.transcript.add_reward(observation.reward)
        self.turn_rewards.append(observation.reward)
        self.info |= observation.info
        if observation.done:
            self.end = "done"
            return
        self.messages += observation.messages
        last = self.transcript.ids[-1]
        more = self.tokenizer.observation(observation.messages, last, self.tools)
        self.transcript.add_observation(more)
        if self.tokenizer.history == "branches":
            again = self.tokenizer.prompt(self.messages, self.tools)
            if self.tokenizer.rewritten(self.transcript.ids, again):
                self.transcript.branch(again)

    def fail(self, error: str, reward: float | None) -> None:
        """The environment failed; `reward` is what the episode gets for it, None to drop it."""
        self.end, self.error = "failed", error
        self.transcript = self.transcript or Transcript(self.fallback_prompt)
        self.dropped = reward is None or not self.transcript.turns
        if reward is not None and not self.dropped:
            self.transcript.add_reward(reward)
            self.turn_rewards.append(reward)
