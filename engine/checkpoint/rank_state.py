"""The state that each rank of a role saved, read file by file: few ranks need all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.checkpoint.format import (
    STATE,
    TensorFile,
    rank_file_prefix,
    ranks_in,
    read_checksums,
    read_marker,
    read_state_index,
    read_tensors,
)
from engine.checkpoint.state_dict import StateDict, Tensors, extract_tensors, insert_tensors
from engine.errors import CheckpointError
from engine.storage.folder import Folder
from engine.storage.hashing import FileEntry


@dataclass
class RankState:
    """One rank's state, whose tensors are read and checked on first use, a file at a time."""

    values: StateDict  # plain, with marks where tensors were
    _parts: dict[str, TensorFile] = field(default_factory=dict)
    _folder: Folder | None = None
    _checksums: dict[str, FileEntry] = field(default_factory=dict)
    _loaded: dict[str, Tensors] = field(default_factory=dict)

    @staticmethod
    def of(state: StateDict) -> RankState:
        """A state that is in memory; its tensors are used as they are."""
        values, groups = extract_tensors(state)
        return RankState(values, _loaded=groups)

    def get(self, *path: str) -> Any:
        """A subtree with its tensors, or None where there is none.

        Raises DamagedCheckpointError for a file that is missing or was changed.
        """
        values: object = self.values
        for key in path:
            values = values.get(key) if isinstance(values, dict) else None
        return None if values is None else insert_tensors(values, {path[0]: self._part(path[0])})

    def state_dict(self) -> StateDict:
        """All of it."""
        parts = {part: self._part(part) for part in {*self._parts, *self._loaded}}
        state: StateDict = insert_tensors(self.values, parts)
        return state

    def _part(self, part: str) -> Tensors:
        if part not in self._loaded and part in self._parts:
            assert self._folder is not None
            self._loaded[part] = read_tensors(self._folder, self._parts[part], self._checksums)
        return self._loaded.get(part, {})


def read_role_states(uri: str, role: str) -> list[RankState]:
    """What every rank of a role saved in a complete checkpoint, by rank.

    Raises DamagedCheckpointError for a torn or changed checkpoint, CheckpointError for one without
    this role.
    """
    folder = Folder(uri)
    checksums = read_checksums(folder, read_marker(folder))
    worlds = ranks_in(checksums).get(role, {})
    if not worlds:
        raise CheckpointError(
            f"{folder} has no state of role {role!r}; resume with the algorithm that wrote it"
        )
    [world_size] = worlds
    ranks = []
    for rank in range(world_size):
        values, parts = read_state_index(
            folder, rank_file_prefix(role, rank, world_size), checksums
        )
        ranks.append(RankState(values, parts, folder, checksums))
    return ranks


def read_controller_state(uri: str) -> RankState:
    """The controller's state in a complete checkpoint.

    Raises DamagedCheckpointError for a torn or changed checkpoint.
    """
    folder = Folder(uri)
    checksums = read_checksums(folder, read_marker(folder))
    values, parts = read_state_index(folder, STATE, checksums)
    return RankState(values, parts, folder, checksums)


def read_values(uri: str) -> StateDict:
    """The plain values of the controller's state, no tensor read; raises as that."""
    return read_controller_state(uri).values


def state_of_rank(
    states: list[RankState], rank: int, world_size: int, *, any_rank: bool
) -> RankState:
    """The state for `rank`; `any_rank`: any will do, so the number of ranks may have changed.

    Raises CheckpointError where their number must be the same and is not.
    """
    if not any_rank and len(states) != world_size:
        raise CheckpointError(
            f"{len(states)} ranks saved it and this run has {world_size}; resume on {len(states)}"
        )
    return states[rank % len(states)]
