"""One run a folder: refusals, stale locks, and holders that were overtaken; on a disk and on S3."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint import CheckpointStore
from engine.checkpoint.run_lock import NAME, FolderLock, Owner, hold_lock
from engine.errors import LockedCheckpointsError
from engine.storage.folder import Folder

ELSEWHERE = Owner("another machine", "node-9", 4711, "5", "2026-11-22T08:00:00Z")


@pytest.fixture(params=["disk", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "disk":
        return Folder(tmp_path / "run")
    return Folder(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


def write(root: Folder, lock: Owner) -> None:
    root.create()
    root.write(NAME, [lock.as_json()])


def locks(root: Folder) -> list[str]:
    return [name for name in root.entries() if name.startswith(".lock")]


@contextmanager
def held_by_a_fork(root: Path) -> Iterator[int]:
    """Another process of this machine that holds the lock, until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold_lock(root):
                os.write(writing, b".")
                signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reading, 1) == b"."
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_second_run_is_refused_and_one_that_was_killed_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with held_by_a_fork(tmp_path) as pid:
        for _ in range(2):
            with (
                pytest.raises(
                    LockedCheckpointsError, match=f"{tmp_path} is in use .*process {pid}"
                ),
                hold_lock(tmp_path),
            ):
                pytest.fail("two runs have the folder")
    assert len(locks(Folder(tmp_path))) == 1
    begin = time.monotonic()
    with hold_lock(tmp_path):
        assert len(locks(Folder(tmp_path))) == 1, "the dead run's is gone"
    assert time.monotonic() - begin < 3
    assert f"the lock of process {pid} on" in caplog.text
    assert locks(Folder(tmp_path)) == []


def test_a_process_has_its_own_folder_again(root: Folder) -> None:
    for _ in range(2):
        with hold_lock(root.uri), hold_lock(root.uri):
            assert len(locks(root)) == 1
        assert locks(root) == []
    with hold_lock(None):
        pass


def test_a_lock_without_a_sign_of_life_is_taken_over(root: Folder) -> None:
    for lock in (ELSEWHERE, None):
        write(root, ELSEWHERE)
        if lock is None:
            root.write(NAME, [b"[" * 100_000])
        with hold_lock(root.uri, stale_s=0.2):
            assert locks(root) == [NAME]
            assert json.loads(root.read(NAME))["pid"] == os.getpid()
        assert locks(root) == []


def test_a_beating_lock_of_another_machine_is_refused(root: Folder) -> None:
    write(root, ELSEWHERE)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            write(root, replace(ELSEWHERE, beat=time.monotonic_ns()))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(LockedCheckpointsError, match=r"in use by .*process 4711 on node-9"),
            hold_lock(root.uri, stale_s=5.0),
        ):
            pytest.fail("two runs have the folder")
    finally:
        ended.set()
        thread.join()
    assert json.loads(root.read(NAME))["pid"] == 4711


def test_a_holder_that_was_overtaken_commits_nothing(root: Folder) -> None:
    store = CheckpointStore(root.uri)
    with hold_lock(root.uri, beat_s=60.0):
        draft = store.begin(1)
        root.remove_file(NAME)  # nobody has taken it
        store.commit(draft)
        assert locks(root) == [NAME]
        draft = store.begin(2)
        write(root, ELSEWHERE)
        with pytest.raises(LockedCheckpointsError, match=r"has taken .* over, because this one"):
            store.commit(draft)
        store.abandon(draft)
    assert root.folders() == ["step_1"]


def test_a_holder_beats_and_sees_that_it_was_overtaken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Folder(tmp_path)
    with hold_lock(tmp_path, beat_s=0.05):
        beats = {json.loads(root.read(NAME))["beat"]}
        deadline = time.monotonic() + 20
        while len(beats) < 3 and time.monotonic() < deadline:
            beats.add(json.loads(root.read(NAME))["beat"])
        assert len(beats) == 3
        write(root, ELSEWHERE)
        while "taken" not in caplog.text and time.monotonic() < deadline:
            write(root, ELSEWHERE)  # its next beat may be written just after a look
            time.sleep(0.2)
    assert f"another run has taken {tmp_path} over" in caplog.text


def test_a_folder_that_takes_no_lock_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), hold_lock(tmp_path / "file"):
        pass
    assert "other runs can't be kept out of this folder" in caplog.text


def test_of_two_that_find_a_stale_lock_one_has_the_folder(root: Folder) -> None:
    write(root, ELSEWHERE)
    locks_ = [FolderLock(root, beat_s=60.0, stale_s=0.5) for _ in range(2)]
    for number, lock in enumerate(locks_):  # as runs of two other machines
        lock._owner = replace(lock._owner, machine=f"machine {number}", pid=number + 1)
    refused: list[str] = []

    def take(lock: FolderLock) -> None:
        try:
            lock.acquire()
        except LockedCheckpointsError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks_]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == 1
    assert "is in use by another run" in refused[0]
