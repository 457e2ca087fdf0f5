"""Checkpoints under one root: written whole or not at all, found, kept and removed."""

import contextlib
import logging
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path

from engine.checkpoint import format
from engine.checkpoint.run_lock import check_lock
from engine.checkpoint.state_dict import StateDict, extract_tensors
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.storage.digests import FileEntry
from engine.storage.filesystem import process_is_alive
from engine.storage.folder import Folder

log = logging.getLogger(__name__)

_DRAFT = re.compile(r"\.writing-step_\d+-(?P<host>[^-]+)-(?P<pid>\d+)-[0-9a-f]+")
_ABANDONED_AFTER_S = 24 * 3600.0  # a draft of another machine counts as abandoned after this


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    last: int = 2  # newest, at least 1
    best: int = 1  # by `metric`; without effect where it is empty
    metric: str = ""  # e.g. "validation/reward"; the higher the better


def retained(markers: Sequence[format.Marker], keep: RetentionPolicy) -> set[int]:
    """Sequence numbers of the newest checkpoint of each step among the last n and the best k."""
    newest = {m.step: m for m in sorted(markers, key=lambda m: m.sequence)}  # of each step
    candidates = sorted(newest.values(), key=lambda m: -m.sequence)
    measured = [m for m in candidates if math.isfinite(m.metrics.get(keep.metric, math.nan))]
    best = sorted(measured, key=lambda m: -m.metrics[keep.metric])
    return {m.sequence for m in (*candidates[: keep.last], *best[: keep.best])}


def remove_checkpoint(folder: Folder) -> None:
    """Delete a checkpoint, marker first: what a kill leaves is torn. A refusal is a warning."""
    try:
        folder.remove_file(format.MARKER)
        folder.remove()
    except CheckpointError as error:
        log.warning("an old checkpoint stays: %s", error)


def draft_name(step: int) -> str:
    """A folder name for an uncommitted checkpoint, with its host and process."""
    return f".writing-step_{step}-{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def abandoned_drafts(root: Folder, names: Iterable[str], open_names: Iterable[str]) -> list[str]:
    """Drafts whose process has died here, or that another machine left a day ago."""
    abandoned = []
    for draft in filter(None, map(_DRAFT.fullmatch, names)):
        pid, is_old = int(draft["pid"]), False
        with contextlib.suppress(OSError):  # it is gone, or not ours to look at
            age = time.time() - os.stat(f"{root.path}/{draft[0]}").st_mtime
            is_old = age > _ABANDONED_AFTER_S
        # A restarted container may give its process the number of the one that died.
        is_dead = pid == os.getpid() or not process_is_alive(pid)
        if draft[0] not in open_names and (is_old or (draft["host"] == _host() and is_dead)):
            abandoned.append(draft[0])
    return abandoned


def _host() -> str:
    return socket.gethostname().replace("-", "_")


EXPORTS = "huggingface"  # folder under the root: model folders by their checkpoints' names
_STEP = re.compile(r"step_\d+(\.\d+)?")  # step_500.1: saved when there was a step_500 already
_open_drafts: set[str] = set()  # addresses of this process's drafts, which cleaning up leaves alone
_Markers = dict[str, format.Marker]  # by folder


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint that was verified, or has just been written."""

    folder: str  # path or URI, e.g. "/run/step_500"
    marker: format.Marker

    @property
    def step(self) -> int:
        """Training steps that it has seen."""
        return self.marker.step

    @property
    def metrics(self) -> dict[str, float]:
        return self.marker.metrics

    @cached_property
    def state(self) -> StateDict:
        """The controller's state, read on first use; tuples come back as lists."""
        folder = Folder(self.folder)
        checksums = format.read_checksums(folder, self.marker)
        return format.read_state(folder, format.STATE, checksums).state_dict()

    @cached_property
    def bytes(self) -> int:
        folder = Folder(self.folder)
        return sum(file.size for file in format.read_checksums(folder, self.marker).values())


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
        *,
        restart: bool = False,
    ) -> None:
        """`restart`: checkpoints that are all damaged count as none, and are replaced."""
        self.retention = RetentionPolicy(keep_last, keep_best, metric)
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
        format.check_sizes(folder, checksums)
        others = self._markers()
        sequence = 1 + max((marker.sequence for marker in others.values()), default=0)
        digest = format.write_checksums(folder, checksums)
        marker = format.Marker(draft.step, sequence, digest, draft.metrics)
        format.write_marker(folder, marker)
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

        Raises DamagedCheckpointError when all are damaged, unless the run may `restart`, and
        CheckpointError when the root can't be reached.
        """
        faults: list[DamagedCheckpointError] = []
        markers = self._markers(faults)
        while markers:
            for name in reversed(markers):
                folder = self.root / name
                try:
                    return Checkpoint(folder.uri, format.verify(folder))
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
        return list(self._markers())

    def newest_of(self, step: int) -> Checkpoint | None:
        """The newest checkpoint of one step, whose files are not verified; None without one."""
        for name, marker in reversed(self._markers().items()):
            if marker.step == step:
                return Checkpoint((self.root / name).uri, marker)
        return None

    def adopt(self, other: Checkpoint) -> None:
        """Copy a checkpoint of another root into this one, as older than all that are here."""
        draft = self.begin(other.step)
        folder = Folder(draft.folder)
        try:
            format.copy_checkpoint(Folder(other.folder), folder, other.marker)
            format.write_marker(folder, replace(other.marker, sequence=0))
            self._publish(folder, other.step)
        except BaseException:
            self.abandon(draft)
            raise
        _open_drafts.discard(folder.uri)

    def _collect(self, folder: Folder, draft: CheckpointDraft) -> dict[str, FileEntry]:
        """The checksums of all files that ranks reported and of the controller's state."""
        present = format.ranks_in(folder.sizes())
        others = [(role, world) for role in present.keys() - draft.roles for world in present[role]]
        checksums: dict[str, FileEntry] = {}
        for role, world in [*draft.roles.items(), *others]:
            written_ranks = present.get(role, {}).get(world, set())
            if missing := sorted(set(range(world)) - written_ranks):
                raise CheckpointError(
                    f"{folder}: ranks {missing} of {world} of role {role!r} have written "
                    "nothing; all nodes must see one folder: use a shared disk or s3://"
                )
            for rank in range(world):
                prefix = format.rank_file_prefix(role, rank, world)
                written = format.read_written_files(folder, prefix)
                checksums |= written.files
                draft.tensor_bytes += written.tensor_bytes
        state = format.write_state(folder, format.STATE, *extract_tensors(draft.state))
        draft.tensor_bytes += state.tensor_bytes
        return checksums | state.files

    def _publish(self, folder: Folder, step: int) -> str:
        """Rename a local draft; in an object store it has its final name from the start."""
        name = folder.uri.rsplit("/", 1)[-1]
        while self.root.is_local and not folder.move(self.root / (name := self._free_name(step))):
            pass  # another process has just taken the name
        return name

    def _free_name(self, step: int) -> str:
        taken = self.root.entries()
        names = chain([f"step_{step}"], (f"step_{step}.{attempt}" for attempt in count(1)))
        return next(name for name in names if name not in taken)

    def _markers(self, faults: list[DamagedCheckpointError] | None = None) -> _Markers:
        """All checkpoints' markers by folder, oldest first; `faults` gets once complete ones."""
        markers = {}
        for name in filter(_STEP.fullmatch, self.root.folders()):
            folder = self.root / name
            try:
                markers[name] = format.read_marker(folder)
            except DamagedCheckpointError as error:
                if faults is None or folder.uri in _open_drafts:
                    continue
                log.warning("checkpoint %s is torn: %s", folder, error)
                # On a disk a checkpoint appears with its marker; in an object store that is last.
                if (format.CHECKSUMS if self.root.is_local else format.MARKER) in folder.sizes():
                    faults.append(error)
        return dict(sorted(markers.items(), key=lambda item: item[1].sequence))

    def _remove_old(self, others: _Markers, name: str, marker: format.Marker) -> None:
        """Delete old and torn checkpoints, dead drafts, and model folders without a checkpoint."""
        good = {n: m for n, m in others.items() if n not in self._damaged}
        stay = retained([*good.values(), marker], self.retention)
        exports = self.root / EXPORTS
        try:
            names = self.root.folders()
            export_names = exports.folders() if EXPORTS in names else []
        except CheckpointError as error:
            log.warning("old checkpoints stay: %s", error)
            return
        start = f"{self.root.uri}/"
        busy = {uri.removeprefix(start) for uri in _open_drafts if uri.startswith(start)}
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
    """Verify the checkpoint in a folder, such as `ckpt/step_500`, or the newest of that step.

    Raises CheckpointError when it is missing, torn or damaged.
    """
    chosen = Folder(folder)
    base, _, name = chosen.uri.rpartition("/")
    if not chosen.sizes():
        again = [other for other in Folder(base).folders() if other.startswith(f"{name}.")]
        if not again or not _STEP.fullmatch(again[-1]):
            raise CheckpointError(f"{chosen} is no checkpoint: it holds no files; name a step_<n>")
        chosen = Folder(base) / again[-1]
    try:
        return Checkpoint(chosen.uri, format.verify(chosen))
    except DamagedCheckpointError as error:
        raise error.with_message(f"{error}; load another checkpoint under {base}") from error
