"""What the ranks of a role saved, read part by part: a rank may need little of others' state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.layout import (
    STATE,
    Part,
    rank_stem,
    ranks_in,
    read_checksums,
    read_marker,
    read_report,
    read_tensors,
)
from engine.checkpoint.tree import Tensors, Tree, split, unite
from engine.errors import CheckpointError
from engine.storage.folder import Folder
from engine.storage.hashing import FileEntry


@dataclass
class SavedRank:
    """One rank's state, whose tensors are read and checked on first use, a file at a time."""

    values: Tree  # plain, with marks where tensors were
    _parts: dict[str, Part] = field(default_factory=dict)
    _folder: Folder | None = None
    _sums: dict[str, FileEntry] = field(default_factory=dict)
    _read: dict[str, Tensors] = field(default_factory=dict)

    @staticmethod
    def of(tree: Tree) -> SavedRank:
        """A state that is in memory; its tensors are used as they are."""
        values, groups = split(tree)
        return SavedRank(values, _read=groups)

    def get(self, *path: str) -> Any:
        """A subtree with its tensors, or None where there is none.

        Raises DamagedCheckpointError for a file that is missing or was changed.
        """
        values: Any = self.values
        for key in path:
            values = values.get(key) if isinstance(values, dict) else None
        return None if values is None else unite(values, {path[0]: self._part(path[0])})

    def tree(self) -> Tree:
        """All of it."""
        parts = {part: self._part(part) for part in {*self._parts, *self._read}}
        tree: Tree = unite(self.values, parts)
        return tree

    def _part(self, part: str) -> Tensors:
        if part not in self._read and part in self._parts:
            assert self._folder is not None
            self._read[part] = read_tensors(self._folder, self._parts[part], self._sums)
        return self._read.get(part, {})


def read_role(uri: str, role: str) -> list[SavedRank]:
    """What every rank of a role saved in a complete checkpoint, by rank.

    Raises DamagedCheckpointError for a torn or changed checkpoint, CheckpointError for one without
    this role.
    """
    folder = Folder(uri)
    sums = read_checksums(folder, read_marker(folder))
    worlds = ranks_in(sums).get(role, {})
    if not worlds:
        raise CheckpointError(
            f"{folder} has no state of role {role!r}; resume with the algorithm that wrote it"
        )
    [world_size] = worlds
    ranks = []
    for rank in range(world_size):
        values, parts = read_report(folder, rank_stem(role, rank, world_size), sums)
        ranks.append(SavedRank(values, parts, folder, sums))
    return ranks


def read_values(uri: str) -> Tree:
    """The plain values of the controller's state in a complete checkpoint, no tensor read.

    Raises DamagedCheckpointError for a torn or changed checkpoint.
    """
    folder = Folder(uri)
    values, _ = read_report(folder, STATE, read_checksums(folder, read_marker(folder)))
    return values


def own_of(saved: list[SavedRank], rank: int, world_size: int, *, alike: bool) -> SavedRank:
    """What `rank` takes back; with `alike` ranks may be more or fewer than those that saved.

    Raises CheckpointError where their number must be the same and is not.
    """
    if not alike and len(saved) != world_size:
        raise CheckpointError(
            f"{len(saved)} ranks saved it and this run has {world_size}; resume on {len(saved)}"
        )
    return saved[rank % len(saved)]
