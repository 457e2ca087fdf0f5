"""One episode: its messages and token ids, its limits, and how it ended.

`Transcript` are its ids, `Episode` is one in progress, `EpisodeSummary` a finished one as
evaluation reads it, `EpisodeTree` one as a checkpoint holds it, and `collate_episodes` makes rows
of a batch: what was sampled is learned from, all of it is attended to. All are values: `agent_loop`
samples turns and asks environments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from engine.agents.environment_protocol import Action, Message, Observation
from engine.batch import Batch
from engine.data import cells, templates
from engine.data.collate import collate_completions, pad
from engine.data.control_tokens import control_tokens
from engine.data.rows import answered_messages
from engine.errors import RolloutError
from engine.rollout.protocol import Completion
from engine.rollout.stream import PartialCompletion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class TrainingSequence:
    """A prompt and what follows it; all lists but `prompt_ids` have one entry a response token."""

    prompt_ids: list[int]
    first_turn: int = 0  # number of its first sampled turn within the episode
    token_ids: list[int] = field(default_factory=list)  # sampled and observed, in order
    sampled: list[bool] = field(default_factory=list)  # false: observed, or the template's
    log_probs: list[float] = field(default_factory=list)  # 0 where not sampled
    versions: list[int] = field(default_factory=list)  # of the policy; the turn's before, else
    rewards: list[float] = field(default_factory=list)  # on the last sampled token of each turn
    turns: list[tuple[int, int]] = field(default_factory=list)  # its first and last token + 1, each

    @property
    def ids(self) -> list[int]:
        """Prompt and response: what the policy reads next."""
        return self.prompt_ids + self.token_ids

    def add(
        self, token_ids: Sequence[int], log_probs: Sequence[float] | None, versions: Sequence[int]
    ) -> None:
        """Append tokens that were sampled, or (`log_probs` None) that were not."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.sampled += [log_probs is not None] * count
        self.log_probs += [0.0] * count if log_probs is None else log_probs
        self.versions += versions
        self.rewards += [0.0] * count

    def add_turn(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Append a turn as it was sampled."""
        start = len(self.token_ids)
        self.add(token_ids, log_probs, versions)
        self.turns.append((start, len(self.token_ids)))

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append what the policy reads before its next turn."""
        latest = self.versions[-1] if self.versions else 0
        self.add(token_ids, None, [latest] * len(token_ids))

    def drop_tail(self) -> None:
        """Leave out what comes after the last sampled token: no turn has read it."""
        length = self.last_sampled + 1
        for column in (self.token_ids, self.sampled, self.log_probs, self.versions, self.rewards):
            del column[length:]

    @property
    def last_sampled(self) -> int:
        """Place of the last sampled token; −1 without any."""
        return max((i for i, sampled in enumerate(self.sampled) if sampled), default=-1)


class Transcript:
    """The ids of one episode: what was sampled, with log-probs and versions, and what lies between.

    It is one training sequence, or several where a chat template rewrites earlier turns and the
    episode goes on as a branch.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.sequences = [TrainingSequence(list(prompt_ids))]

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return sum(len(sequence.turns) for sequence in self.sequences)

    @property
    def ids(self) -> list[int]:
        """What the policy reads next."""
        return self.sequences[-1].ids

    @property
    def response_length(self) -> int:
        """Tokens after the prompt in the sequence that goes on."""
        return len(self.sequences[-1].token_ids)

    def add_turn(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Append a turn as it was sampled; raise RolloutError for lists that don't match."""
        sizes = len(token_ids), len(log_probs), len(versions)
        if len(set(sizes)) > 1 or not token_ids:
            raise RolloutError(
                f"turn {self.turns} has {sizes[0]} tokens, {sizes[1]} log-probs and {sizes[2]} "
                "versions; give one of each a token, and at least one"
            )
        self.sequences[-1].add_turn(token_ids, log_probs, versions)

    def branch(self, prompt_ids: Sequence[int]) -> None:
        """Go on from other ids than those so far: another training sequence begins."""
        self.sequences[-1].drop_tail()
        self.sequences.append(TrainingSequence(list(prompt_ids), first_turn=self.turns))

    def add_reward(self, reward: float) -> None:
        """Add to the latest turn's reward, on its last sampled token; RolloutError before any."""
        for sequence in reversed(self.sequences):
            if (last := sequence.last_sampled) >= 0:
                sequence.rewards[last] += reward
                return
        raise RolloutError("a reward came before the first turn; give it with a turn's observation")

    def finished(self) -> list[TrainingSequence]:
        """The sequences, each to its last sampled token; without any turn the first prompt."""
        for sequence in self.sequences:
            sequence.drop_tail()
        return [sequence for sequence in self.sequences if sequence.token_ids] or self.sequences[:1]


End = Literal["done", "turns", "tokens", "seconds", "turn_seconds", "failed"]
"""done: the environment said so; failed: it gave no answer; else the limit that was reached, of
the episode or (turn_seconds) of its last turn."""
History = Literal["append", "branches"]
"""append: what was sampled stays as it is. branches: where the chat template writes earlier turns
otherwise (thoughts left out), the episode goes on from what it writes, as a sequence of its own."""
ReadAction = Callable[[str, tuple[int, ...], str], Action]
"""Reads a turn: its text, its ids, and the text with the control tokens before its end."""


def plain_action(text: str, token_ids: tuple[int, ...], marked: str = "") -> Action:
    """Read a turn without looking for calls of tools."""
    return Action(text, token_ids)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use, and `turn_length` of it a turn."""

    max_response_length: int  # tokens after the prompt, observations included, e.g. 512
    max_model_len: int  # tokens of a sequence, prompt included, e.g. 1024
    max_turn_length: int | None = None  # tokens of one turn; None: what is left of the response
    max_turns: int | None = None  # turns of the policy; None: no limit
    seconds: float = 600.0  # from the first call of the environment on
    turn_seconds: float | None = None  # that sampling a turn may take; None: no limit
    drop: bool = False  # an episode that a limit ends is not learned from

    def turn_length(
        self, turns: int, length: int, response_length: int
    ) -> int | Literal["turns", "tokens"]:
        """Tokens that the last of `turns` turns may have, or the limit that leaves none.

        It comes after `length` tokens, `response_length` of them after the episode's first prompt.
        """
        if self.max_turns is not None and turns > self.max_turns:
            return "turns"
        left = min(self.max_response_length - response_length, self.max_model_len - length)
        if left < 1:
            return "tokens"
        return left if self.max_turn_length is None else min(left, self.max_turn_length)


class EpisodeTokenizer:
    """Encodes an episode's messages, and decodes its turns."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        read_action: ReadAction,
        history: History = "append",
        reader_of: Callable[[Sequence[Mapping[str, object]]], ReadAction] | None = None,
    ) -> None:
        """`reader_of` gives what reads turns whose requests have tools of their own."""
        self._tokenizer, self.stop_ids = tokenizer, tuple(stop_ids)
        self._read_action, self._reader_of, self.history = read_action, reader_of, history

    def action(
        self,
        before: Sequence[int],
        ids: Sequence[int],
        *,
        unread: int = 0,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> Action:
        """The action of a turn's ids, its text with what the ids before it have opened.

        The last `unread` characters don't count. `tools` are those of its request, which without
        any has no calls; None: the episode's.
        """
        length = -unread or None
        text, said = templates.turn_text(self._tokenizer, before, ids)[:length], list(ids)
        while said and said[-1] in self.stop_ids:
            said.pop()
        marked = templates.turn_text(self._tokenizer, before, said, keep_control=True)[:length]
        action = self._reader(tools)(text, tuple(ids), marked)
        if action.content is None or marked == text:
            return action
        content = control_tokens(self._tokenizer).removed_from(action.content)
        return replace(action, content=content)

    def _reader(self, tools: Sequence[Mapping[str, object]] | None) -> ReadAction:
        if tools is not None and not tools:
            return plain_action
        if tools is None or self._reader_of is None:
            return self._read_action
        return self._reader_of(tools)

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, special tokens removed."""
        return templates.decode_response(self._tokenizer, ids)

    def end_of(self, ids: Sequence[int]) -> str:
        """How the stop token is spelled that `ids` end with; empty without one."""
        return self.spelling(ids[-1:]) if ids and ids[-1] in self.stop_ids else ""

    def of_text(self, text: str, *, continues: bool = False) -> list[int]:
        """A prompt in the model's own format, or (`continues`) what follows one."""
        return templates.encode_text(self._tokenizer, text, continues=continues)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> list[int]:
        """The prompt of messages, up to where the policy speaks."""
        return templates.encode_prompt(self._tokenizer, messages, tools)

    def observation(
        self, messages: Sequence[Message], last_sampled: int, tools: Sequence[Mapping[str, object]]
    ) -> list[int]:
        """What `messages` add after a turn that ended with the token `last_sampled`."""
        ended_by = last_sampled if last_sampled in self.stop_ids else None
        return templates.encode_continuation(
            self._tokenizer, messages, ended_by, self.stop_ids, tools
        )

    def rewritten(self, ids: Sequence[int], again: Sequence[int]) -> bool:
        """Whether `again`, the conversation rendered again, has another text than `ids`."""
        return ids != again and self.spelling(ids) != self.spelling(again)

    def spelling(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out."""
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@dataclass(slots=True, eq=False, kw_only=True)
class TurnRequest:
    """A turn to sample."""

    key: Hashable  # of the stream, e.g. (key of the prompt, index of the episode, turn)
    prompt_ids: list[int]
    max_new_tokens: int
    after: Hashable | None = None  # the turn whose ids the prompt begins with
    partial: PartialCompletion | None = None  # that it goes on from
    stops: tuple[str, ...] = ()  # texts that end it
    submitted: float = 0.0  # of time.monotonic
    late: bool = False  # it takes too long, and is cut


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
        self.messages = list(answered_messages(self.messages))  # the turn's text has the rest
        if first.done:
            self.end = "done"

    def restart(self) -> None:
        """Forget all of it: it begins from its row."""
        self.transcript, self.messages, self.info, self.turn_rewards = None, [], {}, []
        self.actions, self.truncated, self.cut = [], False, False

    def next_turn(self, now: float, saved: PartialCompletion | None = None) -> TurnRequest | None:
        """The turn to sample at `now`, of time.monotonic; None, with `end` set, if none may be.

        It goes on from `saved`, if that is not all of it.
        """
        if self.end is not None:
            return None
        assert self.transcript is not None
        limits, ids, turn = self.limits, self.transcript.ids, self.transcript.turns
        response_length = self.transcript.response_length
        length = limits.turn_length(turn + 1, len(ids), response_length)
        late = now - self.started > limits.seconds
        if late or self.cut or isinstance(length, str):
            own: End = "seconds" if late else "turn_seconds"
            self.end = length if isinstance(length, str) else own
            self.truncated, self.dropped = True, limits.drop
            return None
        after = self.latest_turn if response_length else None
        return TurnRequest(
            key=(self.key, self.index, turn),
            prompt_ids=ids,
            max_new_tokens=length,
            after=after,
            partial=saved if saved is not None and len(saved.token_ids) < length else None,
        )

    def add_turn(self, completion: Completion) -> Action:
        """Append a sampled turn; return what it says to the environment."""
        assert self.transcript is not None
        before, ids = self.transcript.ids, completion.token_ids
        self.transcript.add_turn(ids, completion.log_probs, completion.versions)
        self.truncated = completion.finish_reason == "length"
        self.cut = self.cut and self.truncated
        action = self.tokenizer.action(before, ids)
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
        self.transcript.sequences[-1].add_observation(more)
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


SUCCESS = ("success", "solved", "correct")  # what environments call it in their `info`


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
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


def summarize(episode: Episode) -> EpisodeSummary:
    """An episode that has ended."""
    transcript = episode.transcript
    assert transcript is not None
    assert episode.end is not None, "the episode was played"
    messages = after_prompt(episode.messages, transcript.turns)
    replies = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    return EpisodeSummary(
        text="\n".join(f"{message['role']}> {message['content']}" for message in messages),
        answer=replies[-1] if replies else "",
        turns=transcript.turns,
        calls=sum(len(action.tool_calls) for action in episode.actions),
        malformed=sum(len(action.malformed) for action in episode.actions),
        reward=sum(episode.turn_rewards),
        success=next((bool(episode.info[n]) for n in SUCCESS if n in episode.info), None),
        end=episode.end,
        tokens=sum(sum(sequence.sampled) for sequence in transcript.sequences),
        truncated=episode.truncated,
        failed=episode.end == "failed",
    )


def after_prompt(messages: Sequence[Message], turns: int) -> Sequence[Message]:
    """The messages from the policy's first turn on, of which there are `turns`."""
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[replies[-turns] :] if 0 < turns <= len(replies) else ()


def collate_episodes(
    prompts: Batch,
    episodes: Sequence[Episode],
    *,
    pad_token_id: int,
    version: int = 0,
    branches: bool = False,
) -> Batch:
    """The training sequences of `episodes`, in their order, in the layout of `engine.batch`.

    `prompts` has the rows that they began from. `response_mask` is 0 on what was not sampled. To
    the fields of completions come `environment_rewards` and `token_versions` `[B, R]`, `truncated`,
    `policy_version` (of the oldest token; `version` without any) and `episode_failed` `[B]`. With
    `branches` an episode may have several rows, one after the other, which `episode_ids`,
    `first_turn` and `continues` `[B]` tell.
    """
    each = 1 + max((episode.index for episode in episodes), default=0)
    sequences: list[TrainingSequence] = []
    of: list[Episode] = []  # of each sequence
    turns: list[object] = []
    for episode in episodes:
        assert episode.transcript is not None, "the episode was played"
        finished = episode.transcript.finished()
        sequences, of = sequences + finished, of + [episode] * len(finished)
        turns += [episode.transcript.turns] * len(finished)
    index = [episode.row for episode in of]
    prompt_rows = Batch(
        {"group_ids": prompts["group_ids"][index]},
        {name: values[index] for name, values in prompts.columns.items() if name != "prompt_ids"}
        | {"prompt_ids": [sequence.prompt_ids for sequence in sequences]},
    )
    batch = collate_completions(
        prompt_rows,
        range(len(sequences)),
        [sequence.token_ids for sequence in sequences],
        [sequence.log_probs for sequence in sequences],
        pad_token_id=pad_token_id,
    )
    sampled = [[float(token) for token in s.sampled] for s in sequences]
    fields: dict[str, torch.Tensor] = {
        "response_mask": pad(sampled, 0.0, side="right"),
        "environment_rewards": pad([s.rewards for s in sequences], 0.0, side="right"),
        "token_versions": pad([s.versions for s in sequences], 0, side="right"),
        "policy_version": torch.tensor([min(s.versions, default=version) for s in sequences]),
        "truncated": torch.tensor([episode.truncated for episode in of]),
        "episode_failed": torch.tensor([episode.dropped for episode in of]),
    }
    if branches:
        numbers = torch.tensor([episode.key * each + episode.index for episode in of])
        fields |= {
            "episode_ids": numbers,
            "first_turn": torch.tensor([s.first_turn for s in sequences]),
            "continues": torch.cat((numbers[:-1] == numbers[1:], torch.zeros(1).bool())),
        }
    columns: dict[str, list[object]] = {
        "episode_end": [episode.end for episode in of],
        "episode_error": [episode.error for episode in of],
        "episode_info": [episode.info for episode in of],
        "episode_turns": turns,
        "episode_turn_spans": list(map(turn_spans, of, sequences)),
        "episode_reward": [sum(episode.turn_rewards) for episode in of],
        "environment_seconds": [episode.environment_seconds for episode in of],
    }
    return batch | Batch(fields, columns)


def turn_spans(episode: Episode, sequence: TrainingSequence) -> list[dict[str, object]]:
    """Where each turn of a row lies among its response tokens, and what its calls were read as.

    E.g. [{"start": 0, "stop": 9, "calls": [("add", {"a": 1})], "malformed": []}].
    """
    actions = episode.actions[sequence.first_turn :]
    unread = [Action("")] * (len(sequence.turns) - len(actions))  # where the parser failed
    return [
        {
            "start": start,
            "stop": stop,
            "calls": [(call.name, dict(call.arguments)) for call in action.tool_calls],
            "malformed": list(action.malformed),
        }
        for (start, stop), action in zip(sequence.turns, [*actions, *unread], strict=False)
    ]


# An episode as a checkpoint holds it. One that is over is complete. One that plays goes on from its
# environment's state, at the token that its turn had got to.


class EpisodeTree(TypedDict):
    """An episode in a checkpoint."""

    index: int  # among the episodes of its prompt
    told: str  # JSON: messages, rewards, end and so on, by field of `Episode`
    seconds: float  # since it began
    environment: Tensor  # uint8, a pickled state; empty for an episode that is over
    sequences: list[dict[str, Any]]  # of its transcript
    turn: dict[str, Tensor]  # tokens of the turn that is being sampled


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """The saved state of an episode in the middle of a turn."""

    environment: bytes  # the environment's state before the turn
    tokens: PartialCompletion | None  # of the turn, so far
    seconds: float  # since the episode began


_SAVED_FIELDS = (
    *("messages", "end", "error", "info", "turn_rewards"),
    *("environment_seconds", "truncated", "dropped"),
)
_COLUMNS = {  # one entry a response token
    "token_ids": torch.int32, "sampled": torch.bool, "log_probs": torch.float32,
    "versions": torch.int32, "rewards": torch.float64,
}  # fmt: skip
_TURN = {"token_ids": torch.int32, "log_probs": torch.float32, "token_versions": torch.int32}


def save_episode(
    episode: Episode, environment: bytes = b"", turn: PartialCompletion | None = None
) -> EpisodeTree:
    """An episode that is over, or one that goes on from `environment` and `turn`."""
    assert episode.transcript is not None, "the episode has begun"
    transcript = episode.transcript
    fields = {name: getattr(episode, name) for name in _SAVED_FIELDS}
    return {
        "index": episode.index,
        "told": json.dumps(fields, default=cells.plain),
        "seconds": time.monotonic() - episode.started,
        "environment": torch.from_numpy(np.frombuffer(environment, np.uint8).copy()),
        "sequences": [_sequence_tree(sequence) for sequence in transcript.sequences],
        "turn": {
            name: torch.tensor([] if turn is None else getattr(turn, name), dtype=dtype)
            for name, dtype in _TURN.items()
        },
    }


def load_episode(episode: Episode, tree: EpisodeTree) -> SavedTurn | None:
    """Make `episode`, a new one, what was saved; return where it goes on, None if it is over."""
    fields = json.loads(tree["told"])
    for name in _SAVED_FIELDS:
        setattr(episode, name, fields[name])
    sequences = [_sequence(sequence) for sequence in tree["sequences"]]
    transcript = Transcript(sequences[0].prompt_ids)
    transcript.sequences = sequences
    episode.transcript = transcript
    if episode.end != "failed":
        episode.actions = [
            episode.tokenizer.action(s.prompt_ids + s.token_ids[:start], s.token_ids[start:stop])
            for s in sequences
            for start, stop in s.turns
        ]
    if episode.end is not None:
        return None
    turn = [tree["turn"][name].tolist() for name in _TURN]
    tokens = PartialCompletion(0, *turn) if turn[0] else None
    return SavedTurn(tree["environment"].numpy().tobytes(), tokens, tree["seconds"])


def _sequence_tree(sequence: TrainingSequence) -> dict[str, object]:
    columns = {name: torch.tensor(getattr(sequence, name), dtype=d) for name, d in _COLUMNS.items()}
    prompt = torch.tensor(sequence.prompt_ids, dtype=torch.int32)
    turns = torch.tensor(sequence.turns, dtype=torch.int32).view(-1, 2)
    return columns | {"prompt_ids": prompt, "first_turn": sequence.first_turn, "turns": turns}


def _sequence(tree: dict[str, Any]) -> TrainingSequence:
    columns = {name: tree[name].tolist() for name in _COLUMNS}
    turns = [(start, stop) for start, stop in tree["turns"].tolist()]
    return TrainingSequence(
        tree["prompt_ids"].tolist(), int(tree["first_turn"]), turns=turns, **columns
    )


@dataclass(frozen=True, slots=True)
class PartialEpisodes:
    """A prompt's episodes that are over or can go on; the others restart."""

    episodes: Sequence[EpisodeTree]  # each by its `index`

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest sampled token; None without any."""
        versions = [tree["turn"]["token_versions"] for tree in self.episodes]
        for tree in self.episodes:
            versions += [s["versions"][s["sampled"]] for s in tree["sequences"]]
        return min((int(some.min()) for some in versions if len(some)), default=None)

    def tree(self) -> dict[str, list[EpisodeTree]]:
        """Tensors and plain values, for a checkpoint."""
        return {"episodes": list(self.episodes)}

    @staticmethod
    def from_tree(tree: Mapping[str, Sequence[EpisodeTree]]) -> PartialEpisodes:
        """The inverse of `tree`."""
        return PartialEpisodes(tree["episodes"])
