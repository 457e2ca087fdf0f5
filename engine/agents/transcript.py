"""An episode as the very ids: what was sampled, with log-probs and versions, and what lies between.

Pure values: no tokenizer, no model. A transcript is one training sequence, or several where a chat
template rewrites earlier turns and the episode goes on as a branch (`branch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import RolloutError


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

    def drop_tail(self) -> None:
        """Leave out what comes after the last sampled token: no turn has read it."""
        kept = self.last_sampled + 1
        for column in (self.token_ids, self.sampled, self.log_probs, self.versions, self.rewards):
            del column[kept:]

    @property
    def last_sampled(self) -> int:
        """Place of the last sampled token; −1 without any."""
        return max((i for i, own in enumerate(self.sampled) if own), default=-1)


class Transcript:
    """The ids of one episode.

    >>> episode = Transcript([1, 5, 6])
    >>> episode.add_turn([9, 2], [-0.1, -0.2], [0, 0])
    >>> episode.add_observation([7, 8])
    >>> episode.add_reward(1.0)
    >>> episode.ids, episode.sequences[0].rewards
    ([1, 5, 6, 9, 2, 7, 8], [0.0, 1.0, 0.0, 0.0])
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.sequences = [TrainingSequence(list(prompt_ids))]
        self.turns = 0
        self.sampled_tokens = 0

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
        sequence = self.sequences[-1]
        sequence.turns.append((len(sequence.token_ids), len(sequence.token_ids) + len(token_ids)))
        sequence.add(token_ids, log_probs, versions)
        self.turns += 1
        self.sampled_tokens += len(token_ids)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append what the policy reads before its next turn."""
        sequence = self.sequences[-1]
        latest = sequence.versions[-1] if sequence.versions else 0
        sequence.add(token_ids, None, [latest] * len(token_ids))

    def branch(self, prompt_ids: Sequence[int]) -> None:
        """Go on from other ids than those so far: another training sequence begins."""
        self.sequences[-1].drop_tail()
        self.sequences.append(TrainingSequence(list(prompt_ids), first_turn=self.turns))

    def add_reward(self, reward: float) -> None:
        """Add to what the latest turn earned: on its last sampled token, so that no mask hides it.

        Raises RolloutError before the first turn.
        """
        for sequence in reversed(self.sequences):
            if (last := sequence.last_sampled) >= 0:
                sequence.rewards[last] += reward
                return
        raise RolloutError("a reward came before the first turn; give it with a turn's observation")

    def finished(self) -> list[TrainingSequence]:
        """The training sequences, each up to its last sampled token; one at least.

        Of an episode without a turn it is one without response.
        """
        for sequence in self.sequences:
            sequence.drop_tail()
        return [one for one in self.sequences if one.token_ids] or self.sequences[:1]
