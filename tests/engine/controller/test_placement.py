"""Placements that contradict themselves, and what a local launch closes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.controller.host import RoleSpec
from engine.controller.launch import Placement, Pool, launch, require_capacity
from engine.errors import PlacementError, WorkerError
from engine.workers.base import Worker

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSED: list[str] = []


class Closing(Worker):
    """Notes when it is closed; may fail to be built, or to close."""

    def __init__(self, context: Any, *, fails: bool = False, stuck: bool = False) -> None:
        super().__init__(context)
        if fails:
            raise OSError("no such device")
        self.stuck = stuck

    def close(self) -> None:
        CLOSED.append(self.context.role)
        if self.stuck:
            raise OSError("stuck")


def local(*pools: tuple[str, ...]) -> Placement:
    return Placement(tuple(Pool(pool) for pool in pools), kind="local")


def test_a_role_in_two_pools() -> None:
    with pytest.raises(PlacementError, match=r"placed twice: \['a'\]"):
        local(("a", "b"), ("a",))


def test_roles_without_a_pool() -> None:
    with pytest.raises(
        PlacementError, match=r"placement has \['a'\], the dataflow needs \['a', 'b"
    ):
        launch(local(("a",)), [RoleSpec("a", Closing), RoleSpec("b", Closing)], threads=1)


def test_one_process_holds_one_rank() -> None:
    placement = Placement((Pool(("a",), world_size=2),), kind="local")
    with pytest.raises(PlacementError, match=r"2 ranks in one process; use trainer.placement=ray"):
        launch(placement, [RoleSpec("a", Closing)], threads=1)


def test_a_failed_launch_closes_what_it_built() -> None:
    CLOSED.clear()
    specs = [
        RoleSpec("a", Closing),
        RoleSpec("b", Closing),
        RoleSpec("c", Closing, {"fails": True}),
    ]
    with pytest.raises(
        WorkerError, match="c rank 0: its construction failed with OSError: no such"
    ):
        launch(local(("a",), ("b", "c")), specs, threads=1)
    assert CLOSED == ["b", "a"]


def test_all_roles_are_closed_though_one_fails_to() -> None:
    CLOSED.clear()
    specs = [
        RoleSpec("a", Closing),
        RoleSpec("b", Closing, {"stuck": True}),
        RoleSpec("c", Closing),
    ]
    roles = launch(local(("a", "b"), ("c",)), specs, threads=1)
    with pytest.raises(OSError, match="stuck"):
        roles.close()
    assert CLOSED == ["c", "b", "a"]


def test_capacity_counts_all_bundles() -> None:
    require_capacity([{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 2.0})
    with pytest.raises(PlacementError, match=r"CPU: wanted 3, present 2\)"):
        require_capacity([{"CPU": 1.0}, {"CPU": 2.0}], {"CPU": 2.0})
