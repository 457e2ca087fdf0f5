"""What an agent's requests and the policy's answers make of an episode: one of token ids.

A request's messages are held against those of the turns so far. Where they begin with a turn's
conversation, its ids go on: what was sampled stays as it was, and only what is new is encoded.
Where the client says something else of the past, or goes on from an earlier turn, another training
sequence begins, and the episode has branches. No thread or server here: `endpoint` has those.
"""

import hashlib
import json
from array import array
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.agents.environment_protocol import Action, Message
from engine.agents.episode import (
    End,
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    EpisodeTree,
    TrainingSequence,
    Transcript,
    save_episode,
)
from engine.data.messages import canonical_message, canonical_tools
from engine.errors import DataError, EpisodeError
from engine.rollout.stream import PartialCompletion, PartialRequest


class LimitReached(EpisodeError):
    """A turn that the episode may not have."""

    def __init__(self, end: End, message: str) -> None:
        super().__init__(message)
        self.end: End = end


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """A turn of the policy, and where its sequence has it."""

    sequence: TrainingSequence
    length: int  # tokens of the sequence, prompt included, up to the turn's last
    key: Hashable  # of its request in the stream
    action: Action
    messages: tuple[Message, ...]  # that came before it since the policy spoke last, and its own
    text: str | None = None  # prompt and answer, of a completion without messages

    @property
    def ids(self) -> list[int]:
        """What the policy read, and what it then wrote."""
        return self.sequence.ids[: self.length]

    @property
    def is_last(self) -> bool:
        """Whether nothing was appended to it yet."""
        return self.length == len(self.sequence.prompt_ids) + len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """What the policy is to read."""

    ids: list[int]
    parent: RecordedTurn | None = None  # the turn that it goes on from
    messages: tuple[Message, ...] = ()  # all of them; none of a text
    digest: bytes = b""  # of tools and messages
    text: str | None = None
    tools: Sequence[Mapping[str, object]] = ()

    @property
    def extends(self) -> bool:
        """Whether it goes on with its parent's sequence, where something is between the two."""
        parent = self.parent
        return parent is not None and parent.is_last and len(self.ids) > parent.length


class EpisodeRecorder:
    """Records one episode; not safe for use by two threads."""

    def __init__(self, tokenizer: EpisodeTokenizer, limits: EpisodeLimits) -> None:
        self.turns: list[RecordedTurn] = []  # in the order of their ends
        self._tokenizer, self._limits = tokenizer, limits
        self._by_conversation: dict[bytes, RecordedTurn] = {}
        self._first_prompt: list[int] = []

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> RecordedPrompt:
        """The prompt of a conversation; DataError for one that can't be rendered."""
        plain = tuple(plain_message(message, i) for i, message in enumerate(messages))
        tools = canonical_tools(tools, "tools")
        if not plain or plain[-1]["role"] == "assistant":
            raise DataError("messages must end with one that the policy answers, not its own")
        digests = list(accumulate(plain, _chained, initial=_digest(b"", tools)))
        known = next(
            (i for i in range(len(plain) - 1, 0, -1) if digests[i] in self._by_conversation), 0
        )
        parent = self._by_conversation.get(digests[known])
        ids: list[int] | None = None
        if parent is not None:
            last = parent.sequence.token_ids[parent.length - len(parent.sequence.prompt_ids) - 1]
            ids = parent.ids + self._tokenizer.observation(plain[known:], last, tools)
        if ids is None or self._tokenizer.history == "branches":
            again = self._tokenizer.prompt(plain, tools)
            if ids is None or self._tokenizer.rewritten(ids, again):
                parent, ids = None, again
        return RecordedPrompt(ids, parent, plain, digests[-1], tools=tools)

    def completion(self, prompt: str | Sequence[int]) -> RecordedPrompt:
        """The prompt of a text, or of token ids, which may begin with a turn and its prompt."""
        if not isinstance(prompt, str):
            ids = list(prompt)
            longest_first = sorted(self.turns, key=lambda turn: turn.length, reverse=True)
            parents = (turn for turn in longest_first if ids[: turn.length] == turn.ids)
            return RecordedPrompt(ids, next(parents, None))
        before = [turn for turn in self.turns if turn.text and prompt.startswith(turn.text)]
        if not before:
            return RecordedPrompt(self._tokenizer.of_text(prompt), text=prompt)
        parent = max(before, key=lambda turn: len(turn.text or ""))
        rest, end = prompt[len(parent.text or "") :], self._tokenizer.end_of(parent.ids)
        if end and not rest.startswith(end):  # the text goes on where the policy had ended
            ids = parent.ids[:-1] + self._tokenizer.of_text(rest, continues=True)
            return RecordedPrompt(ids, text=prompt)
        more = self._tokenizer.of_text(rest[len(end) :], continues=True)
        return RecordedPrompt(parent.ids + more, parent, text=prompt)

    def room(self, prompt: RecordedPrompt, count: int = 1) -> int:
        """Tokens that a turn after this prompt may have; LimitReached for none.

        `count` turns are asked for, those that are sampled meanwhile included.
        """
        limits, length, observed = self._limits, len(prompt.ids), 0
        self._first_prompt = self._first_prompt or prompt.ids
        if prompt.parent is not None and prompt.extends:
            observed = length - len(prompt.parent.sequence.prompt_ids)
        left = limits.turn_length(len(self.turns) + count, length, observed)
        if left == "turns":
            message = f"the episode has its {limits.max_turns} turns "
            raise LimitReached(left, message + "(rollout.multi_turn.max_assistant_turns)")
        if left == "tokens":
            raise LimitReached(
                left,
                f"the prompt's {length} tokens leave no room: an episode has "
                f"{limits.max_response_length} after its first prompt (data.max_response_length) "
                f"and {limits.max_model_len} with it",
            )
        return left

    def add(
        self,
        prompt: RecordedPrompt,
        part: PartialCompletion,
        action: Action,
        answer: Message | None = None,
        key: Hashable = None,
    ) -> RecordedTurn:
        """Record a turn as it was sampled; `answer` is the message that the client was given."""
        if prompt.parent is not None and prompt.extends:
            sequence = prompt.parent.sequence
            sequence.add_observation(prompt.ids[prompt.parent.length :])
        else:
            sequence = TrainingSequence(prompt.ids)
        sequence.add_turn(part.token_ids, part.log_probs, part.token_versions)
        text = None
        if prompt.text is not None:
            text = prompt.text + self._tokenizer.text(part.token_ids)
        new = _since_the_policy(prompt.messages) if self.turns else prompt.messages
        if not prompt.messages:
            content = prompt.text or self._tokenizer.text(prompt.ids)
            new = ({"role": "user", "content": content},)
        messages = (*new, {"role": "assistant", "content": action.text})
        turn = RecordedTurn(sequence, len(sequence.ids), key, action, messages, text)
        if answer is not None:
            message = plain_message(answer, len(prompt.messages))
            self._by_conversation[_chained(prompt.digest, message)] = turn
        self.turns.append(turn)
        return turn

    def write_to(self, episode: Episode) -> None:
        """Make what was recorded the episode's transcript, messages and actions."""
        latest = {id(turn.sequence): i for i, turn in enumerate(self.turns)}
        by_sequence: dict[int, list[RecordedTurn]] = defaultdict(list)
        for turn in self.turns:
            by_sequence[id(turn.sequence)].append(turn)
        # The last turn is in the last sequence, where the reward lies.
        order = [by_sequence[number] for number in sorted(by_sequence, key=latest.__getitem__)]
        in_order = [turn for turns in order for turn in turns]
        episode.transcript = Transcript(self._first_prompt or episode.fallback_prompt)
        if order:
            episode.transcript.sequences = [turns[0].sequence for turns in order]
        for turns in order:
            turns[0].sequence.first_turn = in_order.index(turns[0])
        episode.actions = [turn.action for turn in in_order]
        episode.messages = [message for turn in in_order for message in turn.messages]

    def saved(self, episode: Episode, under_way: PartialRequest | None) -> EpisodeTree | None:
        """The episode as it is now, for `Replays`, with a turn under way; None before any token."""
        self.write_to(episode)
        assert episode.transcript is not None
        if under_way is not None:
            prompt = TrainingSequence(under_way.prompt_ids, episode.transcript.turns)
            episode.transcript.sequences = [*episode.transcript.sequences, prompt]
        elif not self.turns:
            return None
        return save_episode(episode, turn=under_way.completions[0] if under_way else None)


class Replays:
    """Turns of an interrupted episode, for an agent that begins again and asks the same."""

    def __init__(
        self, transcript: Transcript | None = None, partial: PartialCompletion | None = None
    ) -> None:
        """Take the turns of `transcript`, and `partial`, whose prompt is its last sequence."""
        self._turns: dict[bytes, deque[tuple[PartialCompletion, bool]]] = defaultdict(deque)
        for sequence in transcript.sequences if transcript is not None else ():
            for start, stop in sequence.turns:
                part = PartialCompletion(
                    0,
                    sequence.token_ids[start:stop],
                    sequence.log_probs[start:stop],
                    sequence.versions[start:stop],
                )
                prompt = sequence.prompt_ids + sequence.token_ids[:start]
                self._turns[digest_of_ids(prompt)].append((part, True))
        if transcript is not None and partial is not None:
            prompt = transcript.sequences[-1].prompt_ids
            self._turns[digest_of_ids(prompt)].append((partial, False))

    def take(self, prompt_ids: Sequence[int]) -> tuple[PartialCompletion | None, bool]:
        """The next turn after these ids, and whether it is whole; None if none of it is there."""
        turns = self._turns.get(digest_of_ids(prompt_ids)) if self._turns else None
        return turns.popleft() if turns else (None, False)


def digest_of_ids(ids: Sequence[int]) -> bytes:
    """A short digest of token ids, the same in every process."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=12).digest()


def plain_message(message: Mapping[str, object], index: int) -> dict[str, object]:
    """A message of OpenAI's API in canonical form; DataError for what no template reads.

    Of the fields that clients send empty only `content` remains.
    """
    filled = {name: value for name, value in message.items() if value not in (None, [], {}, "")}
    plain = canonical_message({"content": "", **filled}, f"messages.{index}")
    plain.pop("weight", None)  # what the client says is not learned from
    return plain


def _since_the_policy(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages after the last one of the policy."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[turns[-1] + 1 :] if turns else messages


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _chained(before: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message, whatever ids its calls have."""
    functions = (call["function"] for call in message.get("tool_calls", ()))
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return _digest(before, {**message, "tool_calls": calls})
