"""Checkpoints under one root are written whole or not at all, and the newest good one is found.

Also which checkpoints are kept and how the others are removed. Who may write is in `run_lock`,
files and checksums are in `format`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Literal

from engine.checkpoint.format import (
    CHECKSUMS,
    MARKER,
    STATE,
    Marker,
    check_sizes,
    copy_checkpoint,
    rank_file_prefix,
    ranks_in,
    read_checksums,
    read_marker,
    read_state,
    read_written_files,
    verify,
    write_checksums,
    write_marker,
    write_state,
)
from engine.checkpoint.run_lock import check_lock
from engine.checkpoint.state_dict import StateDict, extract_tensors
from engine.errors import CheckpointError, ConfigError, DamagedCheckpointError
from engine.storage.digests import FileEntry
from engine.storage.filesystem import process_is_alive
from engine.storage.folder import Folder

log = logging.getLogger(__name__)

_DRAFT = re.compile(r"\.writing-step_\d+-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]+")
_ABANDONED_AFTER_S = 24 * 3600.0  # a draft of another machine counts as abandoned after this


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How many checkpoints are kept."""

    last: int = 2  # newest, at least 1
    best: int = 1  # by `metric`; without effect where it is empty
    metric: str = ""  # e.g. "validation/reward"
    mode: Literal["max", "min"] = "max"  # whether a high or a low value is good

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or self.mode not in ("max", "min"):
            raise ConfigError(
                f"keep_last={self.last} must be at least 1, keep_best={self.best} at least 0 and "
                f"mode={self.mode!r} max or min"
            )


def retained(markers: Sequence[Marker], keep: RetentionPolicy) -> set[int]:
    """Sequence numbers of the checkpoints that stay: the newest of each step, last n and best k.

    Where two are equally good the newer one stays.
    """
    newest = {m.step: m for m in sorted(markers, key=lambda m: m.sequence)}  # of each step
    candidates = sorted(newest.values(), key=lambda m: -m.sequence)
    stay = candidates[: keep.last]
    sign = 1.0 if keep.mode == "max" else -1.0
    measured = [m for m in candidates if math.isfinite(m.metrics.get(keep.metric, math.nan))]
    best = sorted(measured, key=lambda m: -sign * m.metrics[keep.metric])[: keep.best]
    return {m.sequence for m in (*stay, *best)}


def remove_checkpoint(folder: Folder) -> None:
    """Delete a checkpoint, marker first: what a kill leaves of it is torn, and never chosen.

    A refusal is a warning, since the new checkpoint is safe all the same.
    """
    try:
        folder.remove_file(MARKER)
        folder.remove()
    except CheckpointError as error:
        log.warning("an old checkpoint stays: %s", error)


def draft_name(step: int) -> str:
    """A folder name for an uncommitted checkpoint, with its host and process."""
    return f".writing-step_{step}-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def abandoned_drafts(root: Folder, names: Iterable[str], open_names: Iterable[str]) -> list[str]:
    """Drafts whose process has died here, or that another machine left a day ago.

    What is named otherwise is nobody's draft, and stays.
    """
    return [
        name
        for name in names
        if name not in open_names
        and (draft := _DRAFT.fullmatch(name))
        and _is_abandoned(root, draft)
    ]


def _is_abandoned(root: Folder, draft: re.Match[str]) -> bool:
    pid = int(draft["pid"])
    # A restarted container may give its process the number of the one that died.
    if draft["host"] == _host() and (pid == os.getpid() or not process_is_alive(pid)):
        return True
    try:
        age = time.time() - os.stat(f"{root.path}/{draft[0]}").st_mtime
    except OSError:  # it is gone, or not ours to look at
        return False
    return age > _ABANDONED_AFTER_S


def _host() -> str:
    return socket.gethostname().replace("-", "_")


EXPORTS = "huggingface"  # folder under the root: model folders by their checkpoints' names
_STEP = re.compile(r"step_\d+(\.\d+)?")  # step_500.1: saved when there was a step_500 already
_open_drafts: set[str] = set()  # addresses of this process's drafts, which cleaning up leaves alone


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that was verified, or has just been written."""

    folder: str  # path or URI, e.g. "/run/step_500"
    marker: Marker

    @property
    def step(self) -> int:
        """Training steps that it has seen."""
        return self.marker.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that it was saved with."""
        return self.marker.metrics

    @cached_property
    def state(self) -> StateDict:
        """The controller's state, read on first use; tuples come back as lists."""
        folder = Folder(self.folder)
        return read_state(folder, STATE, read_checksums(folder, self.marker))

    @cached_property
    def bytes(self) -> int:
        """Size of its files."""
        folder = Folder(self.folder)
        return sum(file.size for file in read_checksums(folder, self.marker).values())


@dataclass
class CheckpointDraft:
    """A checkpoint under way: ranks write into `folder`, the rest is filled in before its end."""

    step: int
    folder: str  # path or URI, the same on every node
    state: StateDict = field(default_factory=dict)  # the controller's
    metrics: dict[str, float] = field(default_factory=dict)  # e.g. {"validation/reward": 0.4}
    roles: dict[str, int] = field(default_factory=dict)  # ranks that must have written, by role
    tensor_bytes: int = 0  # set by the commit: the least that could be written


class CheckpointStore:
    """The checkpoints of one run, under a local folder or an address such as `s3://bucket/run`.

    >>> store = CheckpointStore("/runs/7", keep_last=2, keep_best=1, metric="validation/reward")
    >>> draft = store.begin(step=500)
    >>> roles.actor.save_state(draft.folder).result()
    >>> roles.actor.wait_saved().result()
    >>> draft.state = {"loader": loader.state_dict()}
    >>> store.commit(draft).folder
    '/runs/7/step_500'
    """

    def __init__(
        self,
        root: str | Path,
        keep_last: int = 2,
        keep_best: int = 1,
        metric: str = "",
        mode: Literal["max", "min"] = "max",
        *,
        restart: bool = False,
    ) -> None:
        """`restart`: checkpoints that are all damaged count as none, and are replaced.

        Raises ConfigError for a retention that keeps nothing, CheckpointError for a bad root.
        """
        self.retention = RetentionPolicy(keep_last, keep_best, metric, mode)
        self.restart = restart
        self.root = Folder(root)
        self._damaged: set[str] = set()  # names of folders that `latest` has refused

    def begin(self, step: int) -> CheckpointDraft:
        """Open a draft that has to be committed or abandoned."""
        if step < 0:
            raise CheckpointError(f"step {step} of a checkpoint must be at least 0")
        self.root.create()
        name = draft_name(step) if self.root.is_local else self._free_name(step)
        folder = self.root / name
        _open_drafts.add(folder.uri)
        folder.create()
        return CheckpointDraft(step, folder.uri)

    def commit(self, draft: CheckpointDraft) -> Checkpoint:
        """Check what the ranks wrote, write the marker, and delete old checkpoints.

        Raises CheckpointError when a rank is missing or a file isn't what its rank reported, and
        LockedCheckpointsError when another run has taken the root over.
        """
        check_lock(self.root)
        folder = Folder(draft.folder)
        checksums = self._collect(folder, draft)
        check_sizes(folder, checksums)
        others = self._markers()
        sequence = 1 + max((marker.sequence for marker in others.values()), default=0)
        digest = write_checksums(folder, checksums)
        marker = Marker(draft.step, sequence, digest, draft.metrics)
        write_marker(folder, marker)
        name = self._publish(folder, draft.step)
        _open_drafts.discard(folder.uri)
        self._remove_old(others, name, marker)
        return Checkpoint((self.root / name).uri, marker)

    def abandon(self, draft: CheckpointDraft) -> None:
        """Delete an uncommitted draft; what can't be deleted stays torn, and is never chosen."""
        if draft.folder in _open_drafts:
            remove_checkpoint(Folder(draft.folder))
            _open_drafts.discard(draft.folder)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose every file verifies; None where there is none.

        Damaged ones are skipped with a warning that says why. Raises DamagedCheckpointError when
        all are damaged, unless the run may `restart`, and CheckpointError when the root can't
        be reached: falling back to an older one would lose work for nothing.
        """
        faults: list[DamagedCheckpointError] = []
        markers = self._markers(faults)
        while markers:
            for name in sorted(markers, key=lambda name: -markers[name].sequence):
                folder = self.root / name
                try:
                    return Checkpoint(folder.uri, verify(folder))
                except DamagedCheckpointError as error:
                    self._damaged.add(name)
                    faults.insert(0, error)
                    log.warning("checkpoint %s is passed over for an older one: %s", folder, error)
            # A run that writes here may have replaced those that were listed by newer ones.
            markers = {n: m for n, m in self._markers().items() if n not in self._damaged}
        if faults and not self.restart:
            raise DamagedCheckpointError(
                f"every checkpoint in {self.root} is damaged: {faults[0]}; restore one from a "
                "copy, or let the run begin again at step 1 and replace them "
                "(on_damaged_checkpoints=restart in rl.trainer or sft)"
            )
        return None

    def complete(self) -> list[str]:
        """Names of the folders of all checkpoints that have their marker, oldest first."""
        markers = self._markers()
        return sorted(markers, key=lambda name: markers[name].sequence)

    def newest_of(self, step: int) -> Checkpoint | None:
        """The newest checkpoint of one step, whose files are not verified; None without one."""
        markers = {name: m for name, m in self._markers().items() if m.step == step}
        if not markers:
            return None
        name = max(markers, key=lambda name: markers[name].sequence)
        return Checkpoint((self.root / name).uri, markers[name])

    def adopt(self, other: Checkpoint) -> None:
        """Copy a checkpoint of another root into this one, as older than all that are here.

        No commit may be under way. Raises CheckpointError where it can't be copied, as it was.
        """
        draft = self.begin(other.step)
        folder = Folder(draft.folder)
        try:
            copy_checkpoint(Folder(other.folder), folder, other.marker)
            write_marker(folder, replace(other.marker, sequence=0))
            self._publish(folder, other.step)
        except BaseException:
            self.abandon(draft)
            raise
        _open_drafts.discard(folder.uri)

    def _collect(self, folder: Folder, draft: CheckpointDraft) -> dict[str, FileEntry]:
        """The checksums of all files that ranks reported and of the controller's state."""
        present = ranks_in(folder.sizes())
        expected = {role: set(worlds) for role, worlds in present.items()}
        expected |= {role: {ranks} for role, ranks in draft.roles.items()}
        checksums: dict[str, FileEntry] = {}
        for role, worlds in expected.items():
            for world in worlds:
                written_ranks = present.get(role, {}).get(world, set())
                if missing := sorted(set(range(world)) - written_ranks):
                    raise CheckpointError(
                        f"{folder}: ranks {missing} of {world} of role {role!r} have written "
                        "nothing; all nodes must see one folder: use a shared disk or s3://"
                    )
                for rank in range(world):
                    written = read_written_files(folder, rank_file_prefix(role, rank, world))
                    checksums |= written.files
                    draft.tensor_bytes += written.tensor_bytes
        state = write_state(folder, STATE, *extract_tensors(draft.state))
        draft.tensor_bytes += state.tensor_bytes
        return checksums | state.files

    def _publish(self, folder: Folder, step: int) -> str:
        """Rename a local draft; in an object store it has its final name from the start."""
        name = folder.uri.rsplit("/", 1)[-1]
        while self.root.is_local and not folder.move(self.root / (name := self._free_name(step))):
            pass  # another process has just taken the name
        return name

    def _free_name(self, step: int) -> str:
        taken = self.root.names()
        names = chain([f"step_{step}"], (f"step_{step}.{attempt}" for attempt in count(1)))
        return next(name for name in names if name not in taken)

    def _markers(self, faults: list[DamagedCheckpointError] | None = None) -> dict[str, Marker]:
        """The markers of all checkpoints by folder name; torn ones are left out.

        With `faults` they are warned of, and those that were complete once are added to it.
        """
        markers = {}
        for name in filter(_STEP.fullmatch, self.root.folders()):
            folder = self.root / name
            try:
                markers[name] = read_marker(folder)
            except DamagedCheckpointError as error:
                if faults is None or folder.uri in _open_drafts:
                    continue
                log.warning("checkpoint %s is torn: %s", folder, error)
                # On a disk a checkpoint appears with its marker; in an object store that is last.
                if (CHECKSUMS if self.root.is_local else MARKER) in folder.sizes():
                    faults.append(error)
        return markers

    def _remove_old(self, others: Mapping[str, Marker], name: str, marker: Marker) -> None:
        """Delete superseded and torn checkpoints, and drafts of processes that died.

        Model folders without a checkpoint go as well.
        """
        good = {n: m for n, m in others.items() if n not in self._damaged}
        stay = retained([*good.values(), marker], self.retention)
        exports = self.root / EXPORTS
        try:
            names = self.root.folders()
            export_names = exports.folders() if EXPORTS in names else []
        except CheckpointError as error:
            log.warning("old checkpoints stay: %s", error)
            return
        drafts = [address.rpartition("/") for address in _open_drafts]
        busy = {draft for root, _, draft in drafts if root == self.root.uri}
        steps = [n for n in names if _STEP.fullmatch(n) and n not in {name, *busy}]
        old = [n for n in steps if n not in good or good[n].sequence not in stay]
        for gone in (*old, *abandoned_drafts(self.root, names, busy)):
            remove_checkpoint(self.root / gone)
        remaining = {*steps, name} - {*old}
        old = [n for n in export_names if _STEP.fullmatch(n) and n not in remaining]
        for gone in (*old, *abandoned_drafts(exports, export_names, ())):
            remove_checkpoint(exports / gone)


def find_latest(root: str | Path) -> Checkpoint | None:
    """The newest good checkpoint under `root`: see `CheckpointStore.latest`."""
    return CheckpointStore(root).latest()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Verify the checkpoint in one folder, such as `ckpt/step_500`.

    Where that step was saved again by a resumed run, the newest such folder is meant. Raises
    CheckpointError when it is missing, torn or damaged.
    """
    chosen = Folder(folder)
    base, _, name = chosen.uri.rpartition("/")
    if not chosen.sizes():
        again = [other for other in Folder(base).folders() if other.startswith(f"{name}.")]
        if not again or not _STEP.fullmatch(again[-1]):
            raise CheckpointError(
                f"{chosen} is no checkpoint: it holds no files; name a folder step_<n> that has "
                f"{MARKER} and {CHECKSUMS}"
            )
        chosen = Folder(base) / again[-1]
    try:
        return Checkpoint(chosen.uri, verify(chosen))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error}; load another checkpoint, or the newest good one under {base}"
        ) from error
