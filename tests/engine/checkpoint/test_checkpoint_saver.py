"""Saving beside training: what is saved, what fails, what it costs; full disks for real."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from counting import CountingWorker, SilentWorker, counts, saver, set_all, start
from fsspec.implementations.memory import MemoryFileSystem
from thorough import and_slow

from engine.checkpoint import Checkpoint, CheckpointDraft, CheckpointStore, Saver, open_checkpoint
from engine.checkpoint.format import read_role_states
from engine.checkpoint.saver import Background
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.errors import CheckpointError, WorkerError
from engine.storage.folder import CheckpointStorageError
from engine.workers.role import Dispatch, dispatch

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_is_saved_and_restored(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    with start() as roles:
        saving = saver(CheckpointStore(tmp_path), roles)
        for step in (1, 2, 3):
            set_all(roles, step)
            state = {"step": step, "generator": generator.get_state(), "kl": {"value": 0.1 * step}}
            saving.save(step, state, {"validation/reward": step / 10})
            torch.rand(5, generator=generator)  # the controller continues at once
        last = saving.wait()
        assert last is not None
        assert (last.step, last.metrics) == (3, {"validation/reward": 0.3})
        stats = saving.stats
        assert stats is not None
        least = 2 * 1000 * (4 + 2)  # both roles' float32 and bfloat16
        assert least < stats.tensor_bytes < stats.written_bytes
        assert 0 < stats.stall_s <= stats.write_s
        on_disk = sum(path.stat().st_size for path in Path(last.folder).iterdir())
        assert on_disk - 4096 < stats.written_bytes < on_disk
        assert stats.as_metrics()["checkpoint/bytes_over_least"] > 1
    with start() as roles:
        found = CheckpointStore(tmp_path).latest()
        assert found is not None
        state = saver(CheckpointStore(tmp_path), roles).restore(found)
        assert counts(roles) == [3, 3]
        assert (state["step"], state["kl"]) == (3, {"value": 0.1 * 3})
        wanted = torch.Generator().manual_seed(1)
        torch.rand(5, generator=wanted), torch.rand(5, generator=wanted)
        assert torch.equal(state["generator"], wanted.get_state())


class SlowFileSystem(MemoryFileSystem):
    """An object store that answers writes of tensors when the gate is open."""

    protocol = "slow"
    gate = threading.Event()
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("slow://", "memory://"))

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "wb" and ".model." in path:
            assert self.gate.wait(20)
        return super()._open(path, mode, *args, **options)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed; opened again at the end, so that no thread is left."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.gate.clear()
    yield SlowFileSystem.gate
    SlowFileSystem.gate.set()


def test_training_goes_on_while_files_are_written(gate: threading.Event, tmp_path: Path) -> None:
    with start() as roles:
        saving = saver(CheckpointStore(f"slow://{tmp_path.name}"), roles)
        set_all(roles, 7)
        saving.save(7, {})
        set_all(roles, 8)
        assert counts(roles) == [8, 8]
        assert saving.last is None
        gate.set()
        last = saving.wait()
        assert last is not None
        saving.restore(last)
        assert counts(roles) == [7, 7]


def test_one_save_is_in_flight_and_the_wait_for_it_counts_as_stall(
    gate: threading.Event, tmp_path: Path
) -> None:
    with start() as roles:
        saving = saver(CheckpointStore(f"slow://{tmp_path.name}"), roles)
        saving.save(1, {})
        threading.Timer(0.3, gate.set).start()
        saving.save(2, {})
        assert open_checkpoint(f"slow://{tmp_path.name}/step_1").step == 1
        saving.wait()
        assert saving.stats is not None
        assert saving.stats.step == 2
        assert saving.stats.stall_s > 0.2


def test_a_write_that_hangs_ends_in_a_sentence(gate: threading.Event, tmp_path: Path) -> None:
    with start() as roles:
        saving = saver(CheckpointStore(f"slow://{tmp_path.name}"), roles, timeout_s=0.3)
        saving.save(1, {})
        with pytest.raises(CheckpointError, match=r"actor rank 0: writing its state has not ended"):
            saving.wait()
        gate.set()
        saving.save(2, {})
        last = saving.wait()
        assert last is not None
        assert last.step == 2


def fails_then_works(root: Path, caplog: pytest.LogCaptureFixture, match: str) -> None:
    """With a disk that takes a small checkpoint and no large one."""
    store = CheckpointStore(root)
    with start(size=100) as roles:
        small = saver(store, roles)
        set_all(roles, 1)
        small.save(1, {})
        small.wait()
    with start(size=1_000_000) as roles, caplog.at_level(logging.WARNING):
        set_all(roles, 2)
        large = saver(store, roles)
        large.save(2, {})
        large.save(3, {})
        with pytest.raises(CheckpointError, match=match):
            large.wait()
        assert "writing its state failed" in caplog.text
        assert re.search(f"no checkpoint at step 2: .*{match}", caplog.text)
        found = store.latest()
        assert found is not None
        assert found.step == 1
        assert [path.name for path in root.iterdir()] == ["step_1"]
    with start(size=100) as roles:
        again = saver(store, roles)
        set_all(roles, 3)
        again.save(3, {})
        last = again.wait()
        assert last is not None
        assert last.step == 3


def test_a_limit_on_file_sizes_keeps_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        fails_then_works(tmp_path / "run", caplog, r"safetensors can't be written: .*ulimit -f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk of 2 MB needs rights that this user has not")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_the_checkpoint_before(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    match = r"safetensors can't be written: no space left; free some, keep fewer"
    fails_then_works(small_disk / "run", caplog, match)


def test_a_state_that_can_t_be_held_leaves_nothing_and_stops_nothing(tmp_path: Path) -> None:
    with start() as roles:
        saving = saver(CheckpointStore(tmp_path), roles)
        with pytest.raises(CheckpointError, match=r"state kl is a function"):
            saving.save(1, {"kl": lambda: 0})
        assert list(tmp_path.iterdir()) == []
        saving.save(1, {"kl": 0.5})
        last = saving.wait()
        assert last is not None
        assert last.state["kl"] == 0.5


class RefusingStore(CheckpointStore):
    """Refuses the commits of some steps, each once; others may be held up at a gate."""

    def __init__(self, root: Path, *refused: int, gate: threading.Event | None = None) -> None:
        super().__init__(root)
        self.refused, self.gate = list(refused), gate

    def commit(self, draft: CheckpointDraft) -> Checkpoint:
        if draft.step in self.refused:
            self.refused.remove(draft.step)
            raise CheckpointStorageError(f"S3 refused step {draft.step}")
        assert self.gate is None or self.gate.wait(20)
        return super().commit(draft)


def test_a_save_that_failed_costs_not_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as roles, caplog.at_level(logging.WARNING):
        saving = saver(RefusingStore(tmp_path, 2), roles)
        for step in (2, 4):
            set_all(roles, step)
            saving.save(step, {"step": step})
        last = saving.wait()
        assert last is not None
        assert last.step == 4
        assert saving.restore(last) == {"step": 4}
        assert counts(roles) == [4, 4]
    assert "no checkpoint at step 2: S3 refused step 2; step 4 is being saved" in caplog.text


def test_a_commit_that_hangs_is_waited_for_again_before_the_next(tmp_path: Path) -> None:
    gate = threading.Event()
    saving = Saver(RefusingStore(tmp_path, gate=gate), {}, timeout_s=0.1)
    saving.save(1, {})
    for _ in range(2):  # a second commit can't begin beside it
        with pytest.raises(CheckpointError, match=r"has not ended in 0\.2 s"):
            saving.save(2, {})
    assert saving.unsaved_step == 2
    gate.set()
    saving.drain(20.0)
    saving.save(2, {})
    saving.drain(20.0)
    last = saving.wait()
    assert last is not None
    assert (last.step, saving.unsaved_step) == (2, None)


def test_what_a_save_cost_is_told_once_and_after_its_commit(tmp_path: Path) -> None:
    gate = threading.Event()
    saving = Saver(RefusingStore(tmp_path, gate=gate), {})
    assert saving.take_metrics() == {}
    saving.save(1, {})
    assert saving.take_metrics() == {}
    gate.set()
    saving.wait()
    assert saving.stats is not None
    assert saving.take_metrics() == saving.stats.as_metrics()
    assert saving.take_metrics() == {}


def test_who_leaves_by_an_error_gives_the_commit_a_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    saving = Saver(RefusingStore(tmp_path, gate=gate), {})
    saving.save(1, {})
    with caplog.at_level(logging.WARNING):
        saving.drain(0.1)
    assert "the checkpoint of step 1 may be lost: the commit of a checkpoint has" in caplog.text
    threading.Timer(0.2, gate.set).start()
    saving.drain(20.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_rank_that_never_reports_ends_in_a_sentence(tmp_path: Path) -> None:
    with start(critic=SilentWorker) as roles:
        saving = saver(CheckpointStore(tmp_path), roles, timeout_s=0.3)
        saving.save(1, {})
        with pytest.raises(CheckpointError, match=r"critic-00000-of-00001\.json has not come in"):
            saving.wait()
        assert list(tmp_path.iterdir()) == []


class StuckWorker(CountingWorker):
    """Answers no call, as a process that is stopped."""

    awake = threading.Event()

    @dispatch(Dispatch.ONE_TO_ALL)
    def save_state(self, folder: str) -> float:
        self.awake.wait(20)
        return 0.0


def test_roles_that_are_stopped_cost_one_deadline_together(tmp_path: Path) -> None:
    specs = [RoleSpec(role, StuckWorker) for role in ("actor", "critic", "rollout")]
    pool = Pool(("actor", "critic", "rollout"))
    with launch(Placement((pool,), kind="local", call_timeout_s=1.0), specs) as roles:
        groups = {role: roles[role] for role in roles}
        begin = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"actor rank 0: save_state gave no result within 1 s"
        ):
            Saver(CheckpointStore(tmp_path), groups, timeout_s=1.0).save(1, {})
        assert time.monotonic() - begin < 3.0, "one after the other they take 4 s"
        StuckWorker.awake.set()


def test_background_work_has_a_deadline_and_gives_its_error_once() -> None:
    gate, work = threading.Event(), Background("slow work", timeout_s=0.05)
    work.start(lambda: assert_set(gate))
    assert work.busy
    with pytest.raises(CheckpointError, match=r"slow work has not ended in 0\.05 s"):
        work.wait()
    gate.set()
    work.wait(10.0)

    def fail() -> None:
        raise ZeroDivisionError("half")

    work.start(fail)
    with pytest.raises(CheckpointError, match=r"slow work failed with ZeroDivisionError: half"):
        work.wait(10.0)
    work.wait()


def test_background_work_has_one_thread_that_ends_with_it() -> None:
    ran_in: list[threading.Thread] = []
    work = Background("short work", timeout_s=10.0)
    for _ in range(3):
        work.start(lambda: ran_in.append(threading.current_thread()))
        work.wait()
    [thread] = set(ran_in)
    assert thread.daemon
    assert thread.is_alive()
    del work
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(10)


@pytest.mark.slow
def test_two_ranks_on_ray_are_saved_and_loaded(ray_cluster: None, tmp_path: Path) -> None:
    pool = Pool(("actor",), world_size=2, cpus=0.2)
    placement = Placement(pools=(pool,), kind="ray", call_timeout_s=60.0)
    with launch(placement, [RoleSpec("actor", CountingWorker)]) as roles:
        saving = Saver(CheckpointStore(tmp_path), {"actor": roles.actor}, timeout_s=60.0)
        roles.actor.set(5).result()
        saving.save(5, {"step": 5})
        roles.actor.set(6).result()
        last = saving.wait()
        assert last is not None
        assert [rank.get("count") for rank in read_role_states(last.folder, "actor")] == [5, 5]
        assert saving.restore(last) == {"step": 5}
        assert roles.actor.get().result() == 5
        roles.actor.save_state(str(tmp_path / "nowhere")).result()
        with pytest.raises(CheckpointError, match="all nodes must see one folder"):
            saving.save(6, {})


KILLED = Path(__file__).parent / "killed_at_random.py"


@pytest.mark.parametrize("kills", and_slow([6], [48]))
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path, kills: int) -> None:
    """Processes that save without pause, each killed at a random moment."""
    done = subprocess.run(
        [sys.executable, str(KILLED), str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(KILLED.parent), os.environ["PYTHONPATH"]]),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == kills
    for before, acknowledged, found, _ in rounds:
        assert found >= acknowledged >= before
        assert found - acknowledged <= 1
    assert rounds[-1][2] >= kills, "some saves have to come through"
    assert sum(torn for *_, torn in rounds) >= kills // 4, "many kills have to strike inside a save"
