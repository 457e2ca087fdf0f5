"""A prompt's episodes that are not all over, in a form that outlives the process playing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.agents.saved_episode import EpisodeTree, token_versions


@dataclass(frozen=True, slots=True)
class PartialEpisodes:
    """Those that are over and those that can go on; the others are begun again."""

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
        """Of each index, what was saved."""
        return {tree["index"]: tree for tree in self.episodes}
