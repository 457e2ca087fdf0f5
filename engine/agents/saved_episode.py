"""An episode as a checkpoint holds it: tensors and plain values.

One that is over is complete. One that plays goes on from its environment's state, at the token that
its turn had got to. `PartialEpisodes` are those of a prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from engine.agents.episode import Episode, TrainingSequence, Transcript
from engine.rollout.stream import PartialCompletion


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
    """Where an episode goes on."""

    environment: bytes  # the environment's state before the turn
    tokens: PartialCompletion | None  # of the turn, so far
    seconds: float  # since the episode began


_TOLD = (
    *("messages", "end", "error", "info", "turn_rewards"),
    *("environment_seconds", "truncated", "dropped"),
)
_COLUMNS = {
    "token_ids": torch.int32,
    "sampled": torch.bool,
    "log_probs": torch.float32,
    "versions": torch.int32,
    "rewards": torch.float64,
}  # one entry a response token
_TURN = {
    "token_ids": torch.int32,
    "log_probs": torch.float32,
    "token_versions": torch.int32,
}


def save_episode(
    episode: Episode, environment: bytes = b"", turn: PartialCompletion | None = None
) -> EpisodeTree:
    """An episode that is over, or one that goes on from `environment` and `turn`."""
    assert episode.transcript is not None, "the episode has begun"
    transcript = episode.transcript
    told = {name: getattr(episode, name) for name in _TOLD}
    told |= {"turns": transcript.turns, "sampled_tokens": transcript.sampled_tokens}
    return {
        "index": episode.index,
        "told": json.dumps(told, default=_plain),
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
    told = json.loads(tree["told"])
    for name in _TOLD:
        setattr(episode, name, told[name])
    sequences = [_sequence(sequence) for sequence in tree["sequences"]]
    transcript = Transcript(sequences[0].prompt_ids)
    transcript.sequences = sequences
    transcript.turns, transcript.sampled_tokens = told["turns"], told["sampled_tokens"]
    episode.transcript = transcript
    if episode.end != "failed":
        sampled = [s.token_ids[start:stop] for s in sequences for start, stop in s.turns]
        episode.actions = [episode.tokenizer.action(ids) for ids in sampled]
    if episode.end is not None:
        return None
    turn = [tree["turn"][name].tolist() for name in _TURN]
    tokens = PartialCompletion(0, *turn) if turn[0] else None
    return SavedTurn(tree["environment"].numpy().tobytes(), tokens, tree["seconds"])


def token_versions(trees: Sequence[EpisodeTree]) -> set[int]:
    """The versions of all sampled tokens."""
    versions: set[int] = set()
    for tree in trees:
        versions.update(tree["turn"]["token_versions"].tolist())
        for sequence in tree["sequences"]:
            versions.update(sequence["versions"][sequence["sampled"]].tolist())
    return versions


def _sequence_tree(sequence: TrainingSequence) -> dict[str, Any]:
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


def _plain(value: object) -> object:
    """Arrays and NumPy numbers of a data set's rows as lists and numbers; others as text."""
    plain = getattr(value, "tolist", None)
    return plain() if plain is not None else str(value)


@dataclass(frozen=True, slots=True)
class PartialEpisodes:
    """A prompt's episodes that are over or can go on; the others restart."""

    episodes: Sequence[EpisodeTree]  # each by its `index`

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without any token."""
        return min(token_versions(self.episodes), default=None)

    def tree(self) -> dict[str, list[EpisodeTree]]:
        """Tensors and plain values, for a checkpoint."""
        return {"episodes": list(self.episodes)}

    @staticmethod
    def from_tree(tree: Mapping[str, Sequence[EpisodeTree]]) -> PartialEpisodes:
        """The inverse of `tree`."""
        return PartialEpisodes(tree["episodes"])

    def by_index(self) -> dict[int, EpisodeTree]:
        """The saved episodes by their index."""
        return {tree["index"]: tree for tree in self.episodes}
