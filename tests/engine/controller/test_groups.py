"""Worker groups: roles, dispatch, rows over ranks."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mypy import api
from probe_worker import Probe

from engine.batch import Batch, LazyBatch, Ready
from engine.controller import local_groups, ray_groups
from engine.controller.groups import Roles, WorkerGroup
from engine.controller.launch import launch
from engine.controller.local_groups import LocalGroup, LocalHost, threads_left_behind
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import (
    RankMetrics,
    RoleSpec,
    WorkerHost,
    drop_padding,
    merge_results,
    reduce_metrics,
    shard_rows,
)
from engine.errors import DataError, PlacementError, WorkerError
from engine.parallel.layout import Layout, RankGrid
from engine.workers.role import Dispatch, Metric, dispatch

ROLES = ("probe", "other")


HOSTS: list[LocalHost] = []


@pytest.fixture(autouse=True)
def close_hosts() -> Iterator[None]:
    """End the threads of local groups."""
    yield
    while HOSTS:
        local_groups.close_hosts([HOSTS.pop()])


def batch(rows: int = 5) -> Batch:
    return Batch({"x": torch.arange(rows).float() + 1}, {"tag": [{"row": i} for i in range(rows)]})


def masked(rows: int) -> Batch:
    return batch(rows) | {"response_mask": torch.ones(rows, 3)}


def local_roles(ranks: int, layout: RankGrid | None = None, **options: Any) -> Roles:
    specs = [RoleSpec(role, Probe, layout=layout) for role in ROLES]
    hosts = [LocalHost(WorkerHost(specs, rank, ranks, threads=1)) for rank in range(ranks)]
    for host in hosts:
        host.host.build()
    HOSTS.extend(hosts)
    return Roles({spec.name: LocalGroup(spec, hosts, **options) for spec in specs}, lambda: None)


def local_group(ranks: int, layout: RankGrid | None = None, **options: Any) -> WorkerGroup:
    return local_roles(ranks, layout, **options).probe


@pytest.fixture(scope="module")
def ray_roles() -> Iterator[Roles]:
    pool = Pool(ROLES, world_size=2, cpus=0.5)
    specs = [RoleSpec(role, Probe) for role in ROLES]
    with launch(Placement((pool,), call_timeout_s=60), specs) as roles:
        yield roles


@pytest.fixture(params=["local", "ray"])
def roles(request: pytest.FixtureRequest, ray_cluster: None) -> Roles:
    """Two roles on two ranks."""
    if request.param == "local":
        return local_roles(2)
    return request.getfixturevalue("ray_roles")


@pytest.fixture
def group(roles: Roles) -> WorkerGroup:
    return roles.probe


@pytest.mark.usefixtures("one_thread")
def test_data_parallel_equals_one_rank(group: WorkerGroup) -> None:
    alone = local_group(1).double(batch()).result()
    spread = group.double(batch()).result()
    assert spread["doubled"].tolist() == alone["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert list(spread.columns["tag"]) == list(alone.columns["tag"]) == list(batch().columns["tag"])
    assert spread["rank"].tolist() == [0, 0, 1, 1, 1]
    assert alone["rank"].tolist() == [0] * 5


@pytest.mark.usefixtures("one_thread")
def test_ranks_that_pad_differently_are_joined(group: WorkerGroup) -> None:
    spread, alone = group.answer(batch()).result(), local_group(1).answer(batch()).result()
    for name in ("attention_mask", "responses", "response_mask", "prompts"):
        assert torch.equal(spread[name], alone[name]), name


@pytest.mark.usefixtures("one_thread")
def test_plain_metrics_are_averaged_by_rows(group: WorkerGroup) -> None:
    # Ranks see rows 1, 2 and 3, 4, 5: the mean over ranks would be 2.75.
    assert group.measure(batch()).result() == {"mean": 3.0, "seen": (2 * 2 + 3 * 3) / 5}
    assert local_group(1).measure(batch()).result() == {"mean": 3.0, "seen": 5.0}


@pytest.mark.usefixtures("one_thread")
def test_metrics_are_merged_as_they_say(group: WorkerGroup) -> None:
    spread = group.measure_all(batch()).result()
    by_tokens = (1.5 * 3 + 4.0 * 1) / 4
    wanted = {"mean": 3.0, "sum": 15.0, "max": 5.0, "min": 1.0, "by_tokens": by_tokens}
    assert spread == wanted | {"only_last": 7.0}
    alone = local_group(1).measure_all(batch()).result()
    assert alone == wanted | {"by_tokens": 3.0, "only_last": 7.0}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_padding_gives_equal_shares_and_is_dropped(group: WorkerGroup, rows: int) -> None:
    out = group.padded(masked(rows)).result()
    assert out["x"].tolist() == [float(r + 1) for r in range(rows) for _ in range(2)]
    share = -(-rows // 2)
    assert set(out["seen"].tolist()) == {share}
    real = [share, rows - share]  # the last rank has the padding
    tokens = [3.0 * real[0]] * 2 * real[0] + [3.0 * real[1]] * 2 * real[1]
    assert out["tokens"].tolist() == tokens


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 5])
def test_padding_counts_in_no_metric(group: WorkerGroup, rows: int) -> None:
    assert group.padded_measure(masked(rows)).result() == {"mean": (rows + 1) / 2}


@pytest.mark.usefixtures("one_thread")
def test_one_to_all_gives_everything_to_each_and_returns_rank_zero(group: WorkerGroup) -> None:
    assert group.total(batch(), 2.0).result() == 30.0
    assert group.total(factor=2.0, batch=batch()).result() == 30.0


@pytest.mark.usefixtures("one_thread")
def test_rank_zero(group: WorkerGroup) -> None:
    assert group.whoami().result()[:3] == ("probe", 0, 2)


@pytest.mark.usefixtures("one_thread")
def test_too_few_rows_for_the_ranks(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match="1 rows into 2 parts"):
        group.double(batch(1)).result()


@pytest.mark.usefixtures("one_thread")
def test_a_future_feeds_the_next_call(roles: Roles) -> None:
    lazy = LazyBatch(batch()) | roles.probe.answer(batch())
    doubled = roles.other.double(lazy)
    lazy = lazy | doubled
    assert lazy["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert roles.probe.total(batch=lazy, factor=1.0).result() == 15.0
    assert roles.probe.total(Ready(batch()), 1.0).result() == 15.0


@pytest.mark.usefixtures("one_thread")
def test_a_provided_result_answers_the_next_call_with_its_batch() -> None:
    group, mine = local_group(1), batch()
    ahead = Ready(batch(2))
    group.provide_result("double", mine, ahead)
    assert len(group.double(batch()).result()) == 5, "another batch"
    assert group.double(LazyBatch(Ready(mine))) is ahead
    assert len(group.double(mine).result()) == 5, "once"


@pytest.mark.usefixtures("one_thread")
def test_any_value_can_be_handed_on(roles: Roles) -> None:
    seconds = roles.probe.total(batch(), 0.0)  # a float on rank 0, None from rank 1
    assert roles.other.nap(seconds).result() == 0.0
    metrics = roles.probe.measure(batch())
    with pytest.raises(WorkerError, match=r"other rank \d: nap failed with TypeError"):
        roles.other.nap(metrics).result()  # reaches it as the merged dict


@pytest.mark.usefixtures("one_thread")
def test_only_batches_are_united(roles: Roles) -> None:
    lazy = LazyBatch(batch(), roles.probe.measure(batch()))
    with pytest.raises(WorkerError, match=r"a LazyBatch is made of \['Batch', 'dict'\]"):
        roles.other.double(lazy).result()


@pytest.mark.usefixtures("one_thread")
def test_errors_of_ours_cross_as_themselves_and_say_where(group: WorkerGroup) -> None:
    with pytest.raises(DataError) as caught:
        group.fail("data").result()
    assert str(caught.value) == "row 3 is wrong; repair it"
    [note] = caught.value.__notes__
    assert re.match(r"raised in probe rank [01]: fail\nTraceback", note)
    assert 'raise DataError("row 3 is wrong; repair it")' in note


@pytest.mark.usefixtures("one_thread")
def test_other_errors_name_role_rank_method_and_traceback(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.fail("teapot").result()
    text = str(caught.value)
    assert re.match(r"probe rank [01]: fail failed with KeyError: 'teapot'\nTraceback", text)
    assert "raise KeyError(kind)" in text
    assert group.whoami().result()[0] == "probe", "the group must keep serving"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["data", "teapot"])
def test_a_failed_future_that_is_handed_on_reports_its_cause(roles: Roles, kind: str) -> None:
    failed = roles.probe.fail(kind)
    after = roles.other.double(LazyBatch(batch()) | failed)
    last = roles.probe.total(LazyBatch(after), 1.0)
    with pytest.raises(Exception) as direct:  # noqa: PT011
        failed.result()
    assert isinstance(failed.failure(), type(direct.value))
    for future in (after, last):
        with pytest.raises(type(direct.value)) as caught:
            future.result()
        first, wanted = (str(e.value).splitlines()[0] for e in (caught, direct))
        assert re.sub(r"rank \d", "", first) == re.sub(r"rank \d", "", wanted)  # both ranks fail
        where = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert re.search(r"probe rank [01]: fail", where)
        assert "other rank" not in where


@pytest.mark.usefixtures("one_thread")
def test_one_rank_s_error_does_not_wait_for_the_others(group: WorkerGroup) -> None:
    start = time.monotonic()
    future = group.fail_on(1, seconds=2.0)
    with pytest.raises(WorkerError, match=r"^probe rank 1: fail_on failed with KeyError"):
        future.result()
    assert future.done()
    assert "probe rank 1: fail_on" in str(future.failure())
    assert time.monotonic() - start < 1.5
    group.nap(0.0).result()


@pytest.mark.usefixtures("one_thread")
def test_done_tells_whether_a_result_is_there(group: WorkerGroup) -> None:
    start = time.monotonic()
    future = group.nap(0.5)
    assert not future.done()
    assert future.failure() is None
    while not future.done() and time.monotonic() - start < 10:
        time.sleep(0.01)
    assert time.monotonic() - start >= 0.5
    assert future.failure() is None
    assert future.result() == 0.5


@pytest.mark.usefixtures("one_thread")
def test_seconds_of_calls_are_summed_without_their_waiting(roles: Roles) -> None:
    roles.take_costs()  # those of other tests
    calls = [roles.probe.nap(0.1), roles.probe.nap(1.0), roles.other.nap(0.05)]
    failed = roles.probe.fail("value")
    for call in calls:
        call.result()
    with pytest.raises(WorkerError):
        failed.result()
    seconds = roles.take_costs()
    assert seconds.keys() - {"max_memory_allocated_gb"} == {"probe.nap_s", "other.nap_s"}
    assert seconds["probe.nap_s"] >= 1.1
    assert 0.05 <= seconds["other.nap_s"] < 1.0, "it took its turn after the others"
    assert roles.take_costs() == {}


def test_a_method_that_is_not_marked_can_t_be_called(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"Probe\.unmarked can't be called on a group"):
        group.unmarked()
    with pytest.raises(WorkerError, match=r"Probe\.missing"):
        group.missing()


@pytest.mark.usefixtures("one_thread")
def test_rows_are_sent_once_and_never_read_back(
    ray_cluster: None, ray_roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[Any] = []
    real = ray_groups.ray.put
    monkeypatch.setattr(ray_groups.ray, "put", lambda value: put.append(value) or real(value))
    prompts = batch()
    lazy = LazyBatch(prompts) | ray_roles.probe.double(prompts)
    lazy.resolve()  # reading on the driver must not turn refs into values that are sent again
    future = ray_roles.other.double(lazy | ray_roles.probe.answer(prompts))
    assert future.result()["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert put == [prompts]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", [1, 1 << 18], ids=["inline", "object_store"])
def test_the_controller_never_unpickles_what_it_hands_on(
    ray_cluster: None, ray_roles: Roles, tmp_path: Path, size: int
) -> None:
    notes = tmp_path / "pids"
    wrapped = ray_roles.probe.wrap(str(notes), size)
    kind, reader = ray_roles.other.unwrap(LazyBatch(wrapped)).result()
    assert kind == "Payload"
    assert set(notes.read_text().split()) == {str(reader)}
    wrapped.result()  # the probe does notice a process that reads
    assert str(os.getpid()) in notes.read_text().split()


@pytest.mark.usefixtures("one_thread")
def test_data_parallel_follows_the_dp_axis() -> None:
    group = local_group(4, Layout(dp=2, tp=2))
    out = group.double(batch()).result()
    assert out["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert out["rank"].tolist() == [0, 0, 2, 2, 2], "ranks 1 and 3 computed the same rows again"
    # By rows of the two dp parts; a mean over four ranks would differ.
    assert group.measure(batch()).result() == {"mean": 3.0, "seen": (2 * 2 + 3 * 3) / 5}
    assert group.place().result() == {"pp": 0, "dp": 0, "fsdp": 0, "sp": 0, "tp": 0}
    sharded = local_group(4, Layout(tp=1, dp=2, fsdp=2))
    assert sharded.double(batch(4)).result()["rank"].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("one_thread")
def test_a_mesh_must_cover_the_ranks() -> None:
    with pytest.raises(PlacementError, match="the layout dp=2 tp=2 of 4 ranks on a pool of 2"):
        local_group(2, Layout(dp=2, tp=2))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (Dispatch.RANK_ZERO, {"pad": True}, "splits no rows"),
        (Dispatch.ONE_TO_ALL, {"unit": 2}, "splits no rows"),
    ],
)
def test_dispatch_that_makes_no_sense(mode: Dispatch, options: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        dispatch(mode, **options)


@pytest.mark.usefixtures("one_thread")
def test_local_calls_return_at_once_and_run_in_order() -> None:
    roles = local_roles(1)
    start = time.monotonic()
    first, second = roles.probe.nap(0.3), roles.other.nap(0.01)
    assert time.monotonic() - start < 0.2
    assert second.result() == 0.01
    assert time.monotonic() - start >= 0.3, "roles of one host take turns"
    assert first.result() == 0.3


@pytest.mark.usefixtures("one_thread")
def test_local_pools_overlap() -> None:
    pools = (Pool(("probe",)), Pool(("other",)))
    specs = [RoleSpec(role, Probe) for role in ROLES]
    with launch(Placement(pools, kind="local"), specs) as roles:
        start = time.monotonic()
        slow, fast = roles.probe.nap(2.0), roles.other.nap(0.1)
        assert fast.result() == 0.1
        assert time.monotonic() - start < 1.5
        assert {t.name for t in threading.enumerate()} >= {"probe/0", "other/0"}
        assert slow.result() == 2.0
    assert not {t.name for t in threading.enumerate()} & {"probe/0", "other/0"}
    with pytest.raises(WorkerError, match="probe/0 is closed"):
        roles.probe.nap(0.0)


@pytest.mark.usefixtures("one_thread")
def test_each_local_pool_computes_with_its_own_threads() -> None:
    torch.set_num_threads(2)  # `one_thread` restores it
    pools = (Pool(("probe",), cpus=3.0), Pool(("other",), cpus=0.0))
    specs = [RoleSpec(role, Probe) for role in ROLES]
    with launch(Placement(pools, kind="local"), specs) as roles:
        assert (roles.probe.threads().result(), roles.other.threads().result()) == (3, 1)
        assert torch.get_num_threads() == 2, "roles leave the caller's count alone"


@pytest.mark.usefixtures("one_thread")
def test_a_local_call_ends_the_threads_that_wait_for_its_caller_s_next_operation() -> None:
    group = local_group(1)
    torch.set_num_threads(3)  # `one_thread` restores it
    before = psutil.Process().num_threads()
    torch.ones(1_000_000).exp_()
    assert psutil.Process().num_threads() == before + 2
    group.threads().result()
    until = time.monotonic() + 5.0
    while psutil.Process().num_threads() > before:
        assert time.monotonic() < until, "the threads are still there"
        time.sleep(0.01)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("one_thread")
def test_a_local_call_has_a_deadline_and_calls_behind_it_end_with_its_host() -> None:
    group = local_group(1, timeout_s=0.1)
    with pytest.raises(WorkerError, match=r"probe rank 0: spin gave no result within 0\.1 s"):
        group.spin(1.0).result()
    behind = group.whoami()
    start = time.monotonic()
    local_groups.close_hosts(HOSTS[-1:], 0.1)
    assert time.monotonic() - start < 0.8
    assert threads_left_behind() == ["probe+other/0"]
    until = time.monotonic() + 5.0
    while threads_left_behind():
        assert time.monotonic() < until, "it ends with its call"
        time.sleep(0.05)
    with pytest.raises(WorkerError, match=r"probe\+other/0 is closed"):
        behind.result()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("error", "told"), [(WorkerError("late"), ["WARNING"]), (KeyboardInterrupt(), [])]
)
def test_a_local_call_in_foreign_code_is_left_behind(
    error: BaseException, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    group = local_group(1)
    group.nap(1.0)
    with suppress(type(error)):
        try:
            raise error
        finally:
            local_groups.close_hosts(HOSTS[-1:], 0.1)
    about = [r.levelname for r in caplog.records if "closed during a call" in r.getMessage()]
    assert about == told, "who pressed Ctrl-C needs no warning"
    assert threads_left_behind() == ["probe+other/0"]
    until = time.monotonic() + 5.0
    while threads_left_behind():
        assert time.monotonic() < until, "it ends with its foreign code"
        time.sleep(0.05)


LEFT_BEHIND = """
import atexit, signal, time
atexit.register(print, "cleaned up")
class Finalized:
    def __del__(self): print("finalized")
kept = Finalized()
from types import SimpleNamespace
from engine.controller.local_groups import LocalHost, close_hosts

host = LocalHost(SimpleNamespace(name="slow", use_threads=lambda: None, close=lambda: None))
host.submit(lambda: time.sleep(60))
try:
    raise {error}
finally:
    close_hosts([host], 0.1)
"""


@pytest.mark.parametrize(
    ("error", "status"),
    [("KeyboardInterrupt", 130), ("SystemExit(signal.SIGTERM)", 143), ("ValueError", 1)],
)
def test_a_process_ends_without_the_calls_that_it_left_behind(error: str, status: int) -> None:
    """Its interpreter doesn't die around them: a call that returns then aborts the process."""
    program = LEFT_BEHIND.format(error=error)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (status, "cleaned up\n"), ended.stderr


CALLS = """
from engine.batch import Batch
from engine.controller.groups import Roles
from engine.batch import Future, LazyBatch


def right(roles: Roles, batch: Batch) -> dict[str, float]:
    lazy = LazyBatch(roles.rollout.generate(batch))
    lazy |= roles.reward.score(lazy)
    lazy |= roles.critic.values(lazy)
    old: Future[Batch] = roles.actor.log_probs(roles.reference.log_probs(lazy))
    roles.sampler.load_weights(roles.actor.weights()).result().bit_length()
    roles["judge"].verdict(old).result().anything()
    return roles.actor.update(old).result()


def wrong(roles: Roles, batch: Batch) -> None:
    roles.actor.updat(batch)
    roles.actor.update(3)
    roles.actor.update()
    roles.actor.save(batch)
    roles.actr.update(batch)
    roles.actor.update(batch)["loss"]
    roles.actor.log_probs(batch).result().lower()
"""


WRONG = [
    '"ActorGroup" has no attribute "updat"',
    'Argument 1 has incompatible type "int"; expected "Batch | LazyBatch | Future[Batch]"',
    "Too few arguments",
    'has incompatible type "Batch"; expected "str"',
    '"Roles" has no attribute "actr"',
    '"Future[dict[str, float]]" is not indexable',
    '"Batch" has no attribute "lower"',
]


def test_roles_by_name_and_closed_once() -> None:
    with launch(Placement((Pool(("probe",)),), kind="local"), [RoleSpec("probe", Probe)]) as run:
        group, calls = run["probe"], list[int]()
    roles = Roles({"probe": group}, lambda: calls.append(1))
    assert "probe" in roles
    with roles:
        assert roles["probe"] is getattr(roles, "probe") is group  # noqa: B009
        with pytest.raises(AttributeError, match=r"no role 'critic' .*\['probe'\]"):
            _ = roles.critic
        with pytest.raises(PlacementError, match=r"no role 'critic' .*\['probe'\]"):
            _ = roles["critic"]
    roles.close()
    assert calls == [1]


@pytest.mark.slow
def test_a_type_checker_knows_the_calls(tmp_path: Path) -> None:
    file, settings = tmp_path / "calls.py", tmp_path / "mypy.ini"
    file.write_text(CALLS)
    root = Path(__file__).parents[3]
    # Libraries are left out: what they do isn't asked, and they take a minute.
    settings.write_text(
        f"[mypy]\nmypy_path = {root}\nfollow_imports = silent\nignore_missing_imports = true\n"
        "ignore_errors = false\n"
        "[mypy-torch.*,transformers.*,ray.*,numpy.*,pandas.*,peft.*,vllm.*,pydantic.*]\n"
        "follow_imports = skip\n"
    )
    report, _, status = api.run(
        ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), str(file)]
    )
    first = CALLS.splitlines().index("def wrong(roles: Roles, batch: Batch) -> None:") + 2
    found = [line.split(": ", 2) for line in report.splitlines() if ": error: " in line]
    lines = [(int(where.rsplit(":", 1)[1]), text) for where, _, text in found]
    assert status == 1, report
    assert [number for number, _ in lines] == list(range(first, first + len(WRONG))), report
    for (_, text), wanted in zip(lines, WRONG, strict=True):
        assert wanted in text


def batch_row(rows: int) -> Batch:
    tensors = {"x": torch.arange(rows), "response_mask": torch.ones(rows, 2)}
    return Batch(tensors, {"tag": list(range(rows))})


@given(rows=st.integers(1, 17), ranks=st.integers(1, 6), repeat=st.integers(1, 3))
def test_padded_shares_are_equal_and_join_to_the_whole(rows: int, ranks: int, repeat: int) -> None:
    layout = Layout(dp=ranks)
    parts = []
    for rank in range(ranks):
        part, real = shard_rows(batch_row(rows), layout.data_shard(rank), pad=True)
        assert len(part) == math.ceil(rows / ranks)
        assert part["response_mask"].sum() == 2 * real
        result = part.rows(torch.arange(len(part)).repeat_interleave(repeat))
        parts.append(drop_padding(result, len(part), real))
    whole = merge_results(parts)
    assert whole["x"].tolist() == [row for row in range(rows) for _ in range(repeat)]
    assert whole.columns["tag"].tolist() == whole["x"].tolist()
    assert whole["response_mask"].min() == 1


@given(rows=st.integers(1, 17), ranks=st.integers(1, 6))
def test_shares_without_padding_differ_by_one_row(rows: int, ranks: int) -> None:
    layout = Layout(dp=ranks)
    if rows < ranks:
        with pytest.raises(DataError, match="use more rows or fewer ranks"):
            shard_rows(batch_row(rows), layout.data_shard(0))
        return
    parts = [shard_rows(batch_row(rows), layout.data_shard(rank)) for rank in range(ranks)]
    assert all(len(part) == real for part, real in parts)
    assert {len(part) for part, _ in parts} <= {rows // ranks, -(-rows // ranks)}
    assert merge_results([part for part, _ in parts])["x"].tolist() == list(range(rows))


@given(
    units=st.integers(1, 17),
    unit=st.integers(1, 3),
    ranks=st.integers(1, 6),
    pad=st.booleans(),
)
def test_units_of_rows_stay_together(units: int, unit: int, ranks: int, pad: bool) -> None:
    layout, whole = Layout(dp=ranks), batch_row(units * unit)
    if units < ranks and not pad:
        with pytest.raises(DataError, match="use more rows or fewer ranks"):
            shard_rows(whole, layout.data_shard(0), unit=unit)
        return
    shares = [
        shard_rows(whole, layout.data_shard(rank), unit=unit, pad=pad) for rank in range(ranks)
    ]
    for part, real in shares:
        assert real % unit == 0
        runs = part["x"].view(-1, unit)
        assert torch.equal(runs, runs[:, :1] // unit * unit + torch.arange(unit))
        assert part["response_mask"].sum(1).tolist() == [2.0] * real + [0.0] * (len(part) - real)
    sizes = {len(part) // unit for part, _ in shares}
    assert sizes <= ({-(-units // ranks)} if pad else {units // ranks, -(-units // ranks)})
    kept = [drop_padding(part, len(part), real) for part, real in shares]
    assert merge_results(kept)["x"].tolist() == list(range(units * unit))


def test_three_pairs_on_two_ranks() -> None:
    layout = Layout(dp=2)
    shares = [
        shard_rows(batch_row(6), layout.data_shard(rank), unit=2, pad=True) for rank in range(2)
    ]
    assert [(part["x"].tolist(), real) for part, real in shares] == [
        ([0, 1, 2, 3], 4),
        ([4, 5, 0, 1], 2),
    ]


def test_half_a_pair() -> None:
    with pytest.raises(DataError, match="3 rows make no whole units of 2"):
        shard_rows(batch_row(3), Layout(dp=1).data_shard(0), unit=2)


def test_the_batch_that_is_padded_stays_as_it_was() -> None:
    whole = batch_row(3)
    shard_rows(whole, Layout(dp=2).data_shard(1), pad=True)
    assert whole["response_mask"].min() == 1


@pytest.mark.parametrize("result", [{"x": 1.0}, batch_row(3)])
def test_padding_that_can_t_be_told_apart(result: object) -> None:
    with pytest.raises(WorkerError, match="padding can't be told apart"):
        drop_padding(result, 2, 1)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.floats(-10, 10), st.floats(0.5, 10)), min_size=1, max_size=5
    )
)
def test_reductions(parts: list[tuple[int, float, float]]) -> None:
    ranks = [
        RankMetrics(
            rows,
            {
                "rows": value,
                "weighted": Metric(value, weight=weight),
                "sum": Metric(value, "sum"),
                "max": Metric(value, "max"),
                "min": Metric(value, "min"),
            },
        )
        for rows, value, weight in parts
    ]
    got = reduce_metrics(ranks)
    values = [value for _, value, _ in parts]
    total, weight = sum(r for r, _, _ in parts), sum(w for _, _, w in parts)
    assert got["rows"] == pytest.approx(sum(r * v for r, v, _ in parts) / total, abs=1e-9)
    assert got["weighted"] == pytest.approx(sum(w * v for _, v, w in parts) / weight, abs=1e-9)
    assert (got["sum"], got["max"], got["min"]) == (sum(values), max(values), min(values))
    assert all(isinstance(value, float) for value in got.values())


def test_values_without_weight_are_left_out() -> None:
    parts = [{"a": Metric(math.nan, weight=0.0)}, {"a": Metric(2.0, weight=3.0)}]
    assert reduce_metrics([RankMetrics(1, part) for part in parts]) == {"a": 2.0}
    nothing = [RankMetrics(1, {"a": Metric(v, weight=0.0)}) for v in (1.0, 3.0)]
    assert reduce_metrics(nothing) == {"a": 2.0}


def test_ranks_must_agree_on_a_reduction() -> None:
    ranks = [RankMetrics(1, {"a": Metric(1.0, "max")}), RankMetrics(1, {"a": 1.0})]
    with pytest.raises(WorkerError, match=r"'a' is merged as \['max', 'mean'\]"):
        reduce_metrics(ranks)


def test_joining_other_results() -> None:
    assert merge_results([None, None]) is None
    assert merge_results(["alone"]) == "alone"
    with pytest.raises(WorkerError, match=r"\['float', 'str'\] can't be merged"):
        merge_results([1.0, "a"])


def test_ranks_that_differ_in_dp_get_rows_of_their_own() -> None:
    layout = Layout(pp=2, dp=3, tp=2)
    shards = [layout.data_shard(rank) for rank in range(12)]
    assert [s.index for s in shards] == [0, 0, 1, 1, 2, 2] * 2
    assert {s.count for s in shards} == {3}
    assert [r for r, s in enumerate(shards) if s.collects] == [0, 2, 4]
