"""Dispatch: local and Ray groups give equal results, and rows don't pass through the driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probe_worker import Probe

from engine.batch import Batch
from engine.controller import ray_groups
from engine.controller.futures import LazyBatch
from engine.controller.groups import LocalGroup, Roles, WorkerGroup
from engine.controller.host import Host, RoleSpec
from engine.controller.launch import Placement, Pool, launch
from engine.errors import DataError, WorkerError

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [RoleSpec("probe", Probe), RoleSpec("other", Probe)]


def batch(rows: int = 5) -> Batch:
    return Batch({"x": torch.arange(rows).float() + 1}, {"tag": [{"row": i} for i in range(rows)]})


def local_group(ranks: int) -> LocalGroup:
    hosts = [Host(SPECS, rank, ranks, threads=1) for rank in range(ranks)]
    for host in hosts:
        host.build()
    return LocalGroup("probe", Probe, hosts)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Roles]:
    pool = Pool(("probe", "other"), world_size=2, cpus=0.5)
    with launch(Placement((pool,), call_timeout_s=60), SPECS) as roles:
        yield roles


@pytest.fixture(params=["local", "ray"])
def group(request: pytest.FixtureRequest, ray_cluster: None) -> WorkerGroup:
    if request.param == "local":
        return local_group(2)
    roles: Roles = request.getfixturevalue("two_ranks")
    return roles.probe


def test_data_parallel_equals_one_rank(group: WorkerGroup) -> None:
    alone = local_group(1).double(batch()).result()
    spread = group.double(batch()).result()
    assert spread["doubled"].tolist() == alone["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert list(spread.columns["tag"]) == list(alone.columns["tag"]) == list(batch().columns["tag"])
    assert spread["rank"].tolist() == [0, 0, 1, 1, 1]
    assert alone["rank"].tolist() == [0] * 5


def test_ranks_that_pad_differently_are_joined(group: WorkerGroup) -> None:
    spread, alone = group.answer(batch()).result(), local_group(1).answer(batch()).result()
    for name in ("attention_mask", "responses", "response_mask", "prompts"):
        assert torch.equal(spread[name], alone[name]), name


def test_metrics_are_averaged_by_rows(group: WorkerGroup) -> None:
    # Ranks see rows 1, 2 and 3, 4, 5: the mean over ranks would be 2.75.
    assert group.measure(batch()).result() == {"mean": 3.0, "seen": (2 * 2 + 3 * 3) / 5}
    assert local_group(1).measure(batch()).result() == {"mean": 3.0, "seen": 5.0}


def test_one_to_all_gives_everything_to_each_and_returns_rank_zero(group: WorkerGroup) -> None:
    assert group.total(batch(), 2.0).result() == 30.0


def test_rank_zero(group: WorkerGroup) -> None:
    assert group.whoami().result()[:3] == ("probe", 0, 2)


def test_too_few_rows_for_the_ranks(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match="1 rows into 2 parts"):
        group.double(batch(1)).result()


def test_a_future_feeds_the_next_call(group: WorkerGroup) -> None:
    lazy = LazyBatch(batch()) | group.answer(batch())
    doubled = group.double(lazy)
    lazy = lazy | doubled
    assert lazy["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert group.total(lazy, 1.0).result() == 15.0


def test_errors_of_ours_cross_as_themselves(group: WorkerGroup) -> None:
    with pytest.raises(DataError, match=r"^row 3 is wrong; repair it$"):
        group.fail("data").result()


def test_other_errors_name_role_rank_method_and_traceback(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        group.fail("teapot").result()
    text = str(caught.value)
    assert re.match(r"probe rank [01]: fail failed with KeyError: 'teapot'\nTraceback", text)
    assert "raise KeyError(kind)" in text
    assert group.whoami().result()[0] == "probe", "the group must go on serving"


def test_a_method_that_is_not_marked_can_t_be_called(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"Probe\.unmarked can't be called on a group"):
        group.unmarked()
    with pytest.raises(WorkerError, match=r"Probe\.missing"):
        group.missing()


def test_rows_go_from_worker_to_worker(
    ray_cluster: None, two_ranks: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[Any] = []
    real = ray_groups.ray.put
    monkeypatch.setattr(ray_groups.ray, "put", lambda value: put.append(value) or real(value))
    prompts = batch()
    lazy = LazyBatch(prompts) | two_ranks.probe.double(prompts)
    assert put == [prompts]
    lazy.resolve()  # reading on the driver must not turn refs into values that are sent again
    future = two_ranks.other.double(lazy | two_ranks.probe.answer(prompts))
    assert future.result()["doubled"].tolist() == [2, 4, 6, 8, 10]
    assert all(value is prompts for value in put)


def test_roles_close_once() -> None:
    calls: list[int] = []
    group = local_group(1)
    roles = Roles({"probe": group}, lambda: calls.append(1))
    assert "probe" in roles
    with roles:
        assert roles.probe is group
        with pytest.raises(AttributeError, match=r"no role 'critic' .*\['probe'\]"):
            _ = roles.critic
    roles.close()
    assert calls == [1]
