"""The files of a checkpoint: what they are, how they are checked, and how a rank's state is read.

    step_500/
      actor-00000-of-00001.json                     a rank's values, checksums of its other files
      actor-00000-of-00001.model.safetensors        its tensors, a file for each part of its state
      actor-00000-of-00001.optimizer.safetensors
      state.json, state.<part>.safetensors          the controller's state
      checksums.json                                SHA-256 and size of every file above
      COMPLETE                                      written last; the digest of checksums.json

Without `COMPLETE` a folder is torn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from engine.checkpoint.state_dict import (
    StateDict,
    Tensors,
    extract_tensors,
    file_metadata,
    insert_tensors,
    name_prefix,
    safetensors_bytes,
    shard_offsets,
)
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.storage.digests import FileEntry, hash_chunks
from engine.storage.folder import Folder

STATE, CHECKSUMS, MARKER = "state", "checksums.json", "COMPLETE"
_RANK = re.compile(r"(?P<role>.+)-(?P<rank>\d{5})-of-(?P<world>\d{5})\.json")
_READERS = 4  # files hashed at once


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    files: dict[str, FileEntry]
    tensor_bytes: int  # bytes of the tensors' elements: the least that could be written


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Where the tensors of one first-level key of a state dict are."""

    file: str  # e.g. "actor-00000-of-00004.model.safetensors"
    prefix: str  # of their names in the file, e.g. "actor.model."


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of `COMPLETE`."""

    step: int  # e.g. 500
    sequence: int  # counts the commits under one root; the newest checkpoint has the highest
    checksums: str  # SHA-256 of checksums.json
    metrics: dict[str, float] = field(default_factory=dict)  # by which the best are kept


_MARKER = TypeAdapter(Marker)


def rank_file_prefix(role: str, rank: int, world_size: int) -> str:
    return f"{role}-{rank:05d}-of-{world_size:05d}"


def write_state(
    folder: Folder, rank_prefix: str, values: StateDict, groups: dict[str, Tensors]
) -> WrittenFiles:
    """Write a state dict whose tensors were extracted; its JSON file comes last."""
    files, parts = {}, {}
    for part, tensors in groups.items():
        file, offsets = f"{rank_prefix}.{part}.safetensors", shard_offsets(values, tensors)
        start = name_prefix(rank_prefix, part, shared=offsets is not None)
        offsets = offsets or {name: [0] * tensor.dim() for name, tensor in tensors.items()}
        metadata = file_metadata({start + name: offset for name, offset in offsets.items()})
        named = {start + name: tensor for name, tensor in tensors.items()}
        files[file] = folder.write(file, safetensors_bytes(named, metadata))
        parts[part] = {"file": file, "prefix": start}
    size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
    entries = {name: entry.model_dump() for name, entry in files.items()}
    report = {"values": values, "parts": parts, "files": entries, "tensor_bytes": size}
    name = f"{rank_prefix}.json"
    return WrittenFiles(files | {name: folder.write(name, [json.dumps(report).encode()])}, size)


def read_written_files(folder: Folder, rank_prefix: str) -> WrittenFiles:
    """The files that a rank wrote, by its JSON file."""
    name = f"{rank_prefix}.json"
    data = folder.read(name)
    report = _parse(folder, name, data)
    files = {file: FileEntry(**entry) for file, entry in report["files"].items()}
    return WrittenFiles(files | {name: hash_chunks([data])}, report["tensor_bytes"])


def read_state(folder: Folder, rank_prefix: str, checksums: dict[str, FileEntry]) -> RankState:
    """What `write_state` wrote: plain values now, tensors on first use, checked on the way."""
    name = f"{rank_prefix}.json"
    report = _parse(folder, name, _checked_bytes(folder, name, checksums))
    parts = {part: TensorFile(**file) for part, file in report["parts"].items()}
    return RankState(report["values"], parts, folder, checksums)


def read_tensors(folder: Folder, part: TensorFile, checksums: dict[str, FileEntry]) -> Tensors:
    """Load a part's tensors; from a disk they are mapped into memory."""
    try:
        if folder.is_local:
            _compare(folder, part.file, folder.digest(part.file), checksums)
            tensors = safetensors.torch.load_file(f"{folder.path}/{part.file}")
        else:
            tensors = safetensors.torch.load(_checked_bytes(folder, part.file, checksums))
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpointError(f"{folder}/{part.file} can't be loaded: {error}") from error
    return {name.removeprefix(part.prefix): tensor for name, tensor in tensors.items()}


def ranks_in(names: Iterable[str]) -> dict[str, dict[int, set[int]]]:
    """Which ranks of which roles have a JSON file: `{role: {world_size: {rank, …}}}`."""
    roles: dict[str, dict[int, set[int]]] = {}
    for match in filter(None, map(_RANK.fullmatch, names)):
        worlds = roles.setdefault(match["role"], {})
        worlds.setdefault(int(match["world"]), set()).add(int(match["rank"]))
    return roles


def write_checksums(folder: Folder, checksums: dict[str, FileEntry]) -> str:
    """Write checksums.json; return its own digest, which the marker holds."""
    text = json.dumps({name: checksums[name].model_dump() for name in sorted(checksums)}, indent=1)
    return folder.write(CHECKSUMS, [text.encode()]).sha256


def write_marker(folder: Folder, marker: Marker) -> None:
    """Make the checkpoint complete."""
    folder.write(MARKER, [json.dumps(asdict(marker)).encode()])


def read_marker(folder: Folder) -> Marker:
    """Read COMPLETE; DamagedCheckpointError where there is none."""
    try:
        return _MARKER.validate_python(_parse(folder, MARKER, folder.read(MARKER)))
    except ValidationError as error:
        what = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise DamagedCheckpointError(f"{folder}/{MARKER} is not a marker: {what}") from error


def read_checksums(folder: Folder, marker: Marker) -> dict[str, FileEntry]:
    """Read checksums.json, checked against the marker."""
    data = folder.read(CHECKSUMS)
    if hashlib.sha256(data).hexdigest() != marker.checksums:
        raise DamagedCheckpointError(f"{folder}/{CHECKSUMS} differs from what {MARKER} recorded")
    return {name: FileEntry(**file) for name, file in _parse(folder, CHECKSUMS, data).items()}


def check_sizes(folder: Folder, checksums: dict[str, FileEntry]) -> None:
    """Raise DamagedCheckpointError unless every file is there in its full size."""
    sizes = folder.sizes()
    for name, entry in checksums.items():
        if name not in sizes:
            raise DamagedCheckpointError(f"{folder}/{name} is missing")
        if sizes[name] != entry.size:
            raise DamagedCheckpointError(
                f"{folder}/{name} has {sizes[name]} bytes where {entry.size} were written"
            )


def verify(folder: Folder) -> Marker:
    """Hash every file of a checkpoint; raise DamagedCheckpointError that names the first fault."""
    marker = read_marker(folder)
    checksums = read_checksums(folder, marker)
    check_sizes(folder, checksums)
    with ThreadPoolExecutor(_READERS) as pool:
        for name, entry in zip(checksums, pool.map(folder.digest, checksums), strict=True):
            _compare(folder, name, entry, checksums)
    return marker


def copy_checkpoint(source: Folder, target: Folder, marker: Marker) -> None:
    """Copy a complete checkpoint but for its marker; DamagedCheckpointError unless as recorded."""
    checksums = read_checksums(source, marker)
    check_sizes(source, checksums)
    for name in checksums:
        _compare(source, name, target.write(name, source.files.chunks(name)), checksums)
    write_checksums(target, checksums)


def _checked_bytes(folder: Folder, name: str, checksums: dict[str, FileEntry]) -> bytes:
    data = folder.read(name)
    _compare(folder, name, hash_chunks([data]), checksums)
    return data


def _compare(folder: Folder, name: str, entry: FileEntry, checksums: dict[str, FileEntry]) -> None:
    recorded = checksums.get(name)
    if recorded is None:
        raise DamagedCheckpointError(f"{folder}/{name} is not in {CHECKSUMS}")
    if entry != recorded:
        raise DamagedCheckpointError(
            f"{folder}/{name} differs from its checksum: {entry.size} bytes of SHA-256 "
            f"{entry.sha256[:12]}, recorded {recorded.size} bytes of {recorded.sha256[:12]}"
        )


def _parse(folder: Folder, name: str, data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{folder}/{name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DamagedCheckpointError(f"{folder}/{name} is not a JSON object")
    return values


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
        """A subtree with its tensors, or None; DamagedCheckpointError for a missing or bad file."""
        values: object = self.values
        for key in path:
            values = values.get(key) if isinstance(values, dict) else None
        return None if values is None else insert_tensors(values, {path[0]: self._part(path[0])})

    def state_dict(self) -> StateDict:
        parts = {part: self._part(part) for part in {*self._parts, *self._loaded}}
        return insert_tensors(self.values, parts)

    def _part(self, part: str) -> Tensors:
        if part not in self._loaded and part in self._parts:
            assert self._folder is not None
            self._loaded[part] = read_tensors(self._folder, self._parts[part], self._checksums)
        return self._loaded.get(part, {})


def read_role_states(uri: str, role: str) -> list[RankState]:
    """What every rank of a role saved in a checkpoint, by rank.

    Raises DamagedCheckpointError for a torn or changed one, CheckpointError without this role.
    """
    folder = Folder(uri)
    checksums = read_checksums(folder, read_marker(folder))
    worlds = ranks_in(checksums).get(role, {})
    if not worlds:
        raise CheckpointError(f"{folder} has no state of role {role!r}; resume with its algorithm")
    [world_size] = worlds
    prefixes = [rank_file_prefix(role, rank, world_size) for rank in range(world_size)]
    return [read_state(folder, prefix, checksums) for prefix in prefixes]


def read_controller_state(uri: str) -> RankState:
    """The controller's state in a checkpoint; DamagedCheckpointError for a torn or changed one."""
    folder = Folder(uri)
    return read_state(folder, STATE, read_checksums(folder, read_marker(folder)))


def state_of_rank(
    states: list[RankState], rank: int, world_size: int, *, any_rank: bool
) -> RankState:
    """The state for `rank`; CheckpointError for another number of ranks, unless `any_rank`."""
    if not any_rank and len(states) != world_size:
        raise CheckpointError(
            f"{len(states)} ranks saved it and this run has {world_size}; resume on {len(states)}"
        )
    return states[rank % len(states)]
