"""The store of checkpoints and its lock."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from s3_server import environment
from thorough import and_slow

from engine.checkpoint import CheckpointStore, find_latest, open_checkpoint
from engine.checkpoint.format import (
    Marker,
    rank_file_prefix,
    read_role_states,
    state_of_rank,
    verify,
    write_state,
)
from engine.checkpoint.run_lock import NAME, FolderLock, Owner, hold_lock
from engine.checkpoint.state_dict import extract_tensors
from engine.checkpoint.store import RetentionPolicy, abandoned_drafts, draft_name, retained
from engine.errors import CheckpointError, DamagedCheckpointError, LockedCheckpointsError
from engine.storage.folder import Folder


# Memory is an object store as S3 is, to all but the requests.
@pytest.fixture(params=and_slow(["disk", "memory"], ["s3"]))
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "run")
    if request.param == "memory":
        return f"memory://{tmp_path.name}/run"
    bucket: str = request.getfixturevalue("bucket")
    return f"{bucket}/{tmp_path.name}/run"


def save(store: CheckpointStore, step: int, ranks: int = 2, **metrics: float) -> str:
    """A checkpoint whose every tensor is filled with its step."""
    draft = store.begin(step)
    for rank in range(ranks):
        write_rank(draft.folder, rank, ranks, step)
    draft.state = {"step": step, "generator": torch.full((5,), step)}
    draft.metrics = metrics
    return store.commit(draft).folder


def write_rank(folder: str, rank: int, ranks: int, step: int) -> None:
    tree = {"model": {"w": torch.full((300,), float(step + rank))}, "rank": rank}
    write_state(Folder(folder), rank_file_prefix("actor", rank, ranks), *extract_tensors(tree))


def read_rank(folder: str, rank: int, world_size: int, *, any_rank: bool = False) -> dict[str, Any]:
    """What `rank` of the role takes back."""
    return state_of_rank(
        read_role_states(folder, "actor"), rank, world_size, any_rank=any_rank
    ).state_dict()


def names(root: str) -> list[str]:
    return Folder(root).folders()


def flip(folder: str, name: str, at: int = -1) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/{name}")
    data = bytearray(fs.cat_file(path))
    data[at] ^= 1
    fs.pipe_file(path, bytes(data))


def cut(folder: str, name: str) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/{name}")
    fs.pipe_file(path, fs.cat_file(path)[:-1])


def put(folder: str, name: str, data: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/{name}")
    fs.pipe_file(path, data)


def delete(folder: str, name: str) -> None:
    fs, path = fsspec.core.url_to_fs(f"{folder}/{name}")
    fs.rm_file(path)


SHARD = "actor-00001-of-00002.model.safetensors"


@pytest.mark.parametrize("root", ["disk", "memory", "s3"], indirect=True)
def test_what_was_saved_is_found_and_read(root: str) -> None:
    store = CheckpointStore(root, keep_last=2)
    assert store.latest() is None
    for step in (1, 2, 3):
        save(store, step)
    assert names(root) == ["step_2", "step_3"]
    found = find_latest(root)
    assert found is not None
    assert (found.step, found.folder) == (3, f"{root}/step_3")
    assert found.state["step"] == 3
    assert found.state["generator"].tolist() == [3] * 5
    for rank in range(2):
        tree = read_rank(found.folder, rank, 2)
        assert tree["rank"] == rank
        assert tree["model"]["w"].tolist() == [3.0 + rank] * 300
    assert open_checkpoint(f"{root}/step_2").state["step"] == 2
    sizes = Folder(found.folder).sizes()
    assert found.bytes == sum(sizes.values()) - sizes["checksums.json"] - sizes["COMPLETE"]


DAMAGE: dict[str, tuple[Callable[[str], None], str]] = {
    "flipped shard": (lambda f: flip(f, SHARD), rf"{SHARD} differs from its checksum"),
    "flipped state": (lambda f: flip(f, "state.json", 3), r"state\.json differs from its checksum"),
    "cut shard": (lambda f: cut(f, SHARD), rf"{SHARD} has \d+ bytes where \d+ were written"),
    "deleted shard": (lambda f: delete(f, SHARD), rf"{SHARD} is missing"),
    "deleted rank": (lambda f: delete(f, "actor-00000-of-00002.json"), r"00002\.json is missing"),
    "flipped checksums": (lambda f: flip(f, "checksums.json", 9), r"checksums\.json differs from"),
    "deleted checksums": (lambda f: delete(f, "checksums.json"), r"checksums\.json is missing"),
    "no marker": (lambda f: delete(f, "COMPLETE"), r"is torn: .*COMPLETE is missing"),
    "cut marker": (lambda f: cut(f, "COMPLETE"), r"is torn: .*COMPLETE is not JSON"),
    "deep marker": (
        lambda f: put(f, "COMPLETE", b"[" * 200_000),
        r"is torn: .*COMPLETE is not JSON: maximum recursion",
    ),
    "other marker": (
        lambda f: put(f, "COMPLETE", b'{"step": "two", "sequence": 2, "checksums": ""}'),
        r"is torn: .*COMPLETE is not a marker: step: Input should be a valid integer",
    ),
}


ON_S3 = ("flipped shard", "no marker")


@pytest.mark.parametrize(
    ("root", "damage"),
    and_slow(
        [*((where, damage) for where in ("disk", "memory") for damage in DAMAGE)]
        + [("s3", damage) for damage in ON_S3],
        [("s3", damage) for damage in DAMAGE if damage not in ON_S3],
    ),
    indirect=["root"],
)
def test_damage_falls_back_to_the_one_before_with_a_warning(
    root: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    act, match = DAMAGE[damage]
    store = CheckpointStore(root, keep_last=2)
    save(store, 1)
    bad = save(store, 2)
    act(bad)
    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert found.step == 1
    assert read_rank(found.folder, 1, 2)["model"]["w"][0] == 2.0
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("engine")]
    assert f"{root}/step_2" in line
    assert re.search(match, line), line
    with pytest.raises(DamagedCheckpointError, match=r"load another checkpoint"):
        open_checkpoint(bad)
    # The damaged one doesn't count among those kept, and leaves with the next commit.
    save(store, 2)
    again = find_latest(root)
    assert again is not None
    assert again.step == 2
    assert again.folder != bad
    assert names(root) == ["step_1", again.folder.rsplit("/", 1)[-1]]
    assert open_checkpoint(bad).folder == again.folder


@pytest.mark.parametrize("damage", ["flipped shard", "deep marker", "no marker"])
def test_checkpoints_that_are_all_damaged_are_not_replaced_unasked(root: str, damage: str) -> None:
    act, match = DAMAGE[damage]
    bad = [save(CheckpointStore(root, keep_last=2), step) for step in (1, 2)]
    if damage == "no marker" and "://" in root:
        pytest.skip("in an object store that is a save which was broken off")
    for folder in bad:
        act(folder)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: .*; restore one") as caught:
        find_latest(root)
    assert re.search(match.removeprefix("is torn: "), str(caught.value))
    restarted = CheckpointStore(root, keep_last=2, restart=True)
    assert restarted.latest() is None
    save(restarted, 1)
    assert names(root) == ["step_1.1"]


def test_the_last_written_is_the_latest_whatever_its_step(root: str) -> None:
    store = CheckpointStore(root, keep_last=3)
    for step in (10, 20, 30):
        save(store, step)
    save(store, 20)  # another course that started from step 10
    found = store.latest()
    assert found is not None
    assert found.step == 20
    assert names(root) == ["step_10", "step_20.1", "step_30"]
    assert open_checkpoint(f"{root}/step_20").folder == f"{root}/step_20.1"


def test_the_best_stays(root: str) -> None:
    store = CheckpointStore(root, keep_last=1, keep_best=1, metric="reward")
    for step, reward in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5)):
        save(store, step, reward=reward)
    assert names(root) == ["step_2", "step_4"]
    assert open_checkpoint(f"{root}/step_2").metrics == {"reward": 0.9}


@pytest.mark.parametrize("stray", [".writing-x", ".writing-step_1-host-x-1", "step_x", "notes"])
def test_a_stray_folder_costs_no_checkpoint_and_stays(tmp_path: Path, stray: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / stray).mkdir()
    save(store, 1)
    save(store, 2)
    assert names(str(tmp_path)) == sorted([stray, "step_2"])


def test_a_commit_without_all_ranks_is_refused_and_leaves_nothing(root: str) -> None:
    store = CheckpointStore(root)
    save(store, 1)

    def write(ranks: list[int], **roles: int) -> None:
        draft = store.begin(2)
        draft.roles = roles
        for rank in ranks:
            write_rank(draft.folder, rank, 3, 2)
        try:
            store.commit(draft)
        finally:
            store.abandon(draft)

    with pytest.raises(CheckpointError, match=r"ranks \[2\] of 3 of role 'actor' have written not"):
        write([0, 1])
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\] of 2 of role 'actor'"):
        write([0, 1, 2], actor=2)
    with pytest.raises(CheckpointError, match=r"ranks \[0\] of 1 of role 'critic'"):
        write([0, 1, 2], actor=3, critic=1)
    assert names(root) == ["step_1"]


def test_a_file_that_changed_before_the_commit_is_noticed(root: str) -> None:
    store = CheckpointStore(root)
    draft = store.begin(1)
    write_rank(draft.folder, 0, 1, 1)
    cut(draft.folder, "actor-00000-of-00001.model.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"has \d+ bytes where \d+ were written"):
        store.commit(draft)
    store.abandon(draft)
    assert names(root) == []


def test_ranks_that_are_alike_share_states(root: str) -> None:
    found = save(CheckpointStore(root), 1)
    assert [read_rank(found, r, 5, any_rank=True)["rank"] for r in range(5)] == [
        0,
        1,
        0,
        1,
        0,
    ]
    with pytest.raises(CheckpointError, match=r"2 ranks saved it and this run has 5"):
        read_rank(found, 4, 5)


def test_wrong_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step_9 is no checkpoint: it holds no files"):
        open_checkpoint(tmp_path / "step_9")
    with pytest.raises(CheckpointError, match=r"checkpoint folder nope://x can't be used"):
        CheckpointStore("nope://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file can't be written: File exists"):
        CheckpointStore(tmp_path / "file").begin(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a folder"])
def test_a_name_that_something_else_has_is_passed_over(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (tmp_path / "other").mkdir()
    target = tmp_path / ("other" if kind == "link to a folder" else "nowhere")
    if kind == "file":
        (root / "step_5").write_text("notes")
    else:
        (root / "step_5").symlink_to(target)
    store = CheckpointStore(root)
    assert save(store, 5) == f"{root}/step_5.1"
    assert save(store, 5) == f"{root}/step_5.2"
    assert (root / "step_5").is_file() == (kind == "file")


@pytest.mark.timeout(60)
def test_a_target_that_can_t_be_renamed_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match=r"made can't be written: Not a directory; check"):
        Folder(tmp_path / "made").move(Folder(tmp_path / "taken"))


def test_a_killed_deletion_leaves_no_checkpoint_behind(tmp_path: Path) -> None:
    """The marker goes first: what is left without it is swept by the next commit."""
    store = CheckpointStore(tmp_path, keep_last=1)
    old = Path(save(store, 1))
    kept = {path.name: path.read_bytes() for path in old.iterdir() if path.name != "COMPLETE"}
    save(store, 2)
    old.mkdir()
    for name, data in kept.items():
        (old / name).write_bytes(data)
    found = store.latest()
    assert found is not None
    assert found.step == 2
    save(store, 3)
    assert names(str(tmp_path)) == ["step_3"]


def test_an_unreachable_s3_is_said_and_not_taken_for_an_empty_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_MAX_ATTEMPTS="1"):
        store = CheckpointStore("s3://checkpoints/run")
        with pytest.raises(
            CheckpointError,
            match=r"s3://checkpoints/run can't be read: .*check the address, the endpoint",
        ) as caught:
            store.latest()
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_bucket_that_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises(CheckpointError, match=r"s3://other/run/step_1/.*can't be written"):
        save(CheckpointStore("s3://other/run"), 1)


def test_a_marker_says_what_people_look_for(tmp_path: Path) -> None:
    folder = Path(save(CheckpointStore(tmp_path), 7, reward=0.5))
    marker: dict[str, Any] = json.loads((folder / "COMPLETE").read_text())
    assert (marker["step"], marker["sequence"], marker["metrics"]) == (7, 1, {"reward": 0.5})


def test_a_run_saves_on_while_its_newest_checkpoint_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed is gone when it is read; a newer one is there."""
    writing = CheckpointStore(tmp_path / "run", keep_last=1, keep_best=0)
    save(writing, 1)

    def meanwhile(folder: Folder) -> Marker:
        monkeypatch.undo()
        save(writing, 2)
        return verify(folder)

    monkeypatch.setattr("engine.checkpoint.format.verify", meanwhile)
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert found.folder.endswith("step_2")


def test_a_draft_of_another_run_keeps_no_checkpoint_of_this_one(tmp_path: Path) -> None:
    other, here = CheckpointStore(f"memory://{tmp_path.name}"), CheckpointStore(tmp_path, 1, 0)
    assert other.begin(1).folder.endswith("/step_1")
    for step in (1, 2):
        save(here, step)
    assert names(str(tmp_path)) == ["step_2"]


def marker(sequence: int, step: int, value: float | None = None) -> Marker:
    return Marker(step, sequence, "", {} if value is None else {"reward": value})


def test_last_and_best_stay() -> None:
    values = [0.1, 0.9, 0.3, math.nan, 0.2]
    markers = [marker(i, 10 * i, value) for i, value in enumerate(values)]
    assert retained(markers, RetentionPolicy(2, 1, "reward")) == {3, 4, 1}
    assert retained(markers, RetentionPolicy(2, 2, "reward")) == {3, 4, 1, 2}
    assert retained(markers, RetentionPolicy(1, 3)) == {4}
    assert retained(
        [marker(0, 0, 0.5), marker(1, 1, 0.5), marker(2, 2)], RetentionPolicy(1, 1, "reward")
    ) == {
        2,
        1,
    }


def test_the_newest_is_the_last_written_and_not_the_highest_step() -> None:
    # A run went on from step 10 after 20 and 30 had been written: 20 is of the present course.
    markers = [marker(1, 10), marker(2, 20), marker(3, 30), marker(4, 20)]
    assert retained(markers, RetentionPolicy(1)) == {4}
    assert retained(markers, RetentionPolicy(2)) == {4, 3}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.none() | st.floats(-1, 1)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_newest_always_stays_and_counts_hold(
    facts: list[tuple[int, float | None]], last: int, best: int
) -> None:
    markers = [marker(i, step, value) for i, (step, value) in enumerate(facts)]
    stay = retained(markers, RetentionPolicy(last, best, "reward"))
    assert len(markers) - 1 in stay
    steps = [facts[i][0] for i in stay]
    assert len(set(steps)) == len(steps) <= last + best
    newest_of = {step: i for i, (step, _) in enumerate(facts)}
    measured = [facts[i][1] for i in newest_of.values() if facts[i][1] is not None]
    if best and measured:
        assert max(measured) in [facts[i][1] for i in stay]


def test_only_drafts_of_the_dead_are_abandoned(tmp_path: Path) -> None:
    host = socket.gethostname().replace("-", "_")
    own = draft_name(3)
    dead = f".writing-step_3-{host}-999999999-ab"  # above the largest process id
    parent = f".writing-step_3-{host}-{os.getppid()}-ab"
    reborn = f".writing-step_3-{host}-{os.getpid()}-ab"  # a restarted container's process id
    young, old = ".writing-step_3-elsewhere-1-ab", ".writing-step_4-elsewhere-1-ab"
    huge = f".writing-step_3-{host}-{10**30}-ab"
    names = [own, dead, parent, reborn, young, old, huge, ".writing-x", "step_3"]
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / old, (0, time.time() - 2 * 24 * 3600))
    assert abandoned_drafts(Folder(tmp_path), names, [own]) == [dead, reborn, old, huge]


ELSEWHERE = Owner("another machine", "node-9", 4711, "5", "2026-11-22T08:00:00Z")


@pytest.fixture(params=["disk", "s3"])
def root_lock(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "disk":
        return Folder(tmp_path / "run")
    return Folder(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")


def write(root_lock: Folder, lock: Owner) -> None:
    root_lock.create()
    root_lock.write(NAME, [lock.as_json()])


def locks(root_lock: Folder) -> list[str]:
    return [name for name in root_lock.entries() if name.startswith(".lock")]


@contextmanager
def held_by_a_fork(root_lock: Path) -> Iterator[int]:
    """Another process of this machine that holds the lock, until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with hold_lock(root_lock):
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


def test_a_process_has_its_own_folder_again(root_lock: Folder) -> None:
    for _ in range(2):
        with hold_lock(root_lock.uri), hold_lock(root_lock.uri):
            assert len(locks(root_lock)) == 1
        assert locks(root_lock) == []
    with hold_lock(None):
        pass


def test_a_lock_without_a_sign_of_life_is_taken_over(root_lock: Folder) -> None:
    for lock in (ELSEWHERE, None):
        write(root_lock, ELSEWHERE)
        if lock is None:
            root_lock.write(NAME, [b"[" * 100_000])
        with hold_lock(root_lock.uri, stale_s=0.2):
            assert locks(root_lock) == [NAME]
            assert json.loads(root_lock.read(NAME))["pid"] == os.getpid()
        assert locks(root_lock) == []


def test_a_beating_lock_of_another_machine_is_refused(root_lock: Folder) -> None:
    write(root_lock, ELSEWHERE)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            write(root_lock, replace(ELSEWHERE, beat=time.monotonic_ns()))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(LockedCheckpointsError, match=r"in use by .*process 4711 on node-9"),
            hold_lock(root_lock.uri, stale_s=5.0),
        ):
            pytest.fail("two runs have the folder")
    finally:
        ended.set()
        thread.join()
    assert json.loads(root_lock.read(NAME))["pid"] == 4711


def test_a_holder_that_was_overtaken_commits_nothing(root_lock: Folder) -> None:
    store = CheckpointStore(root_lock.uri)
    with hold_lock(root_lock.uri, beat_s=60.0):
        draft = store.begin(1)
        root_lock.remove_file(NAME)  # nobody has taken it
        store.commit(draft)
        assert locks(root_lock) == [NAME]
        draft = store.begin(2)
        write(root_lock, ELSEWHERE)
        with pytest.raises(LockedCheckpointsError, match=r"has taken .* over, because this one"):
            store.commit(draft)
        store.abandon(draft)
    assert root_lock.folders() == ["step_1"]


def test_a_holder_beats_and_sees_that_it_was_overtaken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root_lock = Folder(tmp_path)
    with hold_lock(tmp_path, beat_s=0.05):
        beats = {json.loads(root_lock.read(NAME))["beat"]}
        deadline = time.monotonic() + 20
        while len(beats) < 3 and time.monotonic() < deadline:
            beats.add(json.loads(root_lock.read(NAME))["beat"])
        assert len(beats) == 3
        write(root_lock, ELSEWHERE)
        while "taken" not in caplog.text and time.monotonic() < deadline:
            write(root_lock, ELSEWHERE)  # its next beat may be written just after a look
            time.sleep(0.2)
    assert f"another run has taken {tmp_path} over" in caplog.text


def test_a_folder_that_takes_no_lock_stops_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), hold_lock(tmp_path / "file"):
        pass
    assert "other runs can't be kept out of this folder" in caplog.text


def test_of_two_that_find_a_stale_lock_one_has_the_folder(root_lock: Folder) -> None:
    write(root_lock, ELSEWHERE)
    locks_ = [FolderLock(root_lock, beat_s=60.0, stale_s=0.5) for _ in range(2)]
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
