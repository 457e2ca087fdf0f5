"""Plays the episodes of prompts, and returns finished groups as batches.

`engine.agents.rollout` plays; this module has the prompts and the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.agents.collate import collate_episodes
from engine.agents.episode import Episode
from engine.agents.partial_episodes import PartialEpisodes
from engine.agents.rollout import EpisodePlayer
from engine.agents.saved_episode import EpisodeTree, save_episode
from engine.batch import Batch
from engine.errors import RolloutError
from engine.rollout.partial_groups import take_partial_groups
from engine.rollout.stream import RolloutStream

_WAIT_S = 0.05  # of one step, for an environment
_STATES_S = 2.0  # for environments to answer and to give their states, below the report's deadline

NewEpisode = Callable[[int, int, list[int]], Episode]  # of key, index and the row's prompt


class EpisodeGroups:
    """Plays `n` episodes of each prompt, and returns finished groups: a `Groups`.

    A prompt's key is its `group_ids`; a key may be reused once its group was returned.
    """

    def __init__(
        self,
        stream: RolloutStream,
        player: EpisodePlayer,
        new_episode: NewEpisode,
        *,
        n: int,
        pad_token_id: int,
        branches: bool,
        retain: bool = False,
    ) -> None:
        """With `retain`, groups that were returned are among those that `partial_groups` copies."""
        self._stream, self._player, self._new = stream, player, new_episode
        self._n, self._pad, self._branches = n, pad_token_id, branches
        self._prompts: dict[int, Batch] = {}
        self._episodes: dict[int, list[Episode]] = {}  # by key, then index
        self._left: dict[int, int] = {}  # episodes that have not ended
        self._retained: dict[int, list[Episode]] | None = {} if retain else None
        self._trees: dict[int, EpisodeTree] = {}  # by id of the episode: the latest of those saved

    @property
    def busy(self) -> int:
        """Episodes that play, wait for a place, or wait to be returned."""
        return self._player.busy

    @property
    def full(self) -> bool:
        """Whether a whole group's turns wait: the engine has no room for what it was given."""
        return self._stream.waiting >= self._n

    @property
    def version(self) -> int:
        """Version of the weights that sample the next tokens."""
        return self._stream.policy_version

    def submit(self, prompts: Batch) -> None:
        """Add prompts, one row per group; what was begun of them (`PARTIAL_GROUP`) goes on.

        Raises RolloutError for completions that are no episodes.
        """
        prompts, begun = take_partial_groups(prompts)
        for row, key in enumerate(prompts["group_ids"].tolist()):
            prompt, saved = prompts.rows([row]), begun[row]
            if not isinstance(saved, PartialEpisodes | None):
                raise RolloutError(
                    f"group {key} was saved with completions of one turn; resume with "
                    "rollout.multi_turn.enable=false, or begin again"
                )
            trees = saved.by_index() if saved is not None else {}
            ids = list(prompt.columns["prompt_ids"][0])
            episodes = [self._new(key, index, ids) for index in range(self._n)]
            self._prompts[key], self._episodes[key] = prompt, episodes
            self._left[key] = self._n
            for episode in episodes:
                self._player.add(episode, _row(prompt), trees.get(episode.index))

    def partial_groups(self, seconds: float = _STATES_S) -> dict[int, PartialEpisodes]:
        """Copies of all unfinished groups, by key; playing continues.

        An episode whose environment doesn't answer within `seconds` is as it was the last time.
        """
        self._trees |= self._player.save(seconds)
        groups = self._episodes | (self._retained or {})
        found: dict[int, PartialEpisodes] = {}
        for key, episodes in groups.items():
            trees = []
            for one in episodes:
                if one.end is not None:
                    self._trees[id(one)] = save_episode(one)
                if id(one) in self._trees:
                    trees.append(self._trees[id(one)])
            found[key] = PartialEpisodes(trees)
        return found

    def step(self) -> list[Batch]:
        """Decode a token of each turn, or wait a moment for environments; return the groups that
        are finished now."""
        groups = []
        for episode in self._player.step(_WAIT_S):
            self._left[episode.key] -= 1
            if not self._left[episode.key]:
                groups.append(self._batch(episode.key))
        return groups

    def update_weights(self, version: int) -> None:
        """Continue with the policy's weights, which have changed in place."""
        self._stream.update_weights(None, version)

    def close(self) -> None:
        """Stop playing."""
        self._player.close()
        self._stream.close()

    def _batch(self, key: int) -> Batch:
        del self._left[key]
        episodes = self._episodes.pop(key)
        if self._retained is not None:
            self._retained[key] = episodes
        else:
            for episode in episodes:
                self._trees.pop(id(episode), None)
        return collate_episodes(
            self._prompts.pop(key),
            episodes,
            pad_token_id=self._pad,
            version=self.version,
            branches=self._branches,
        )


def _row(prompt: Batch) -> Mapping[str, object]:
    """The row of the data set of a batch of one prompt."""
    return {name: column[0] for name, column in prompt.columns.items() if name != "prompt_ids"}
