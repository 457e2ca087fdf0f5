"""Placement: which roles share which processes, and bringing those processes up.

`Placement` is a value; `launch` turns it and the roles' specs into worker groups, in this process
or as Ray actors on one placement group. Asking for more than the cluster has fails at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from engine.controller.groups import LocalGroup, Roles, WorkerGroup
from engine.controller.host import Host, RoleSpec
from engine.errors import PlacementError


@dataclass(frozen=True, slots=True)
class Pool:
    """Roles that live together in each of `world_size` processes."""

    roles: tuple[str, ...]  # built in this order, e.g. ("actor", "rollout", "reference")
    world_size: int = 1
    cpus: float = 1.0  # a process, e.g. 2.0; 0 for roles that mostly wait
    gpus: float = 0.0  # a process, e.g. 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Which role sits where.

    >>> Placement.colocated(("actor", "rollout", "reference"), cpus=2, reward_apart=True)
    """

    pools: tuple[Pool, ...]
    kind: Literal["ray", "local"] = "ray"
    start_timeout_s: float = 120.0  # deadline for the processes to be up
    call_timeout_s: float = 1800.0  # deadline for one call

    def __post_init__(self) -> None:
        roles = [role for pool in self.pools for role in pool.roles]
        doubled = sorted({role for role in roles if roles.count(role) > 1})
        if doubled:
            raise PlacementError(f"placed twice: {doubled}; give each role one pool")


def launch(placement: Placement, specs: Sequence[RoleSpec], threads: int = 0) -> Roles:
    """Start the processes, build the roles in them, and return their groups.

    Raises PlacementError when a role has no pool or the cluster can't hold the pools, and
    WorkerError when a role can't be built.
    """
    by_name = {spec.name: spec for spec in specs}
    placed = {role for pool in placement.pools for role in pool.roles}
    if placed != set(by_name):
        raise PlacementError(
            f"placement has {sorted(placed)}, the dataflow needs {sorted(by_name)}"
        )
    if placement.kind == "local":
        return _launch_local(placement, by_name, threads)
    return _launch_ray(placement, by_name, threads)


def _launch_local(placement: Placement, specs: dict[str, RoleSpec], threads: int) -> Roles:
    groups: dict[str, WorkerGroup] = {}
    hosts: list[Host] = []
    for pool in placement.pools:
        if pool.world_size != 1:
            raise PlacementError(
                f"roles {pool.roles} ask for {pool.world_size} ranks in one process; use "
                "trainer.placement=ray"
            )
        host = Host([specs[role] for role in pool.roles], threads=threads)
        hosts.append(host)
        for role in pool.roles:
            groups[role] = LocalGroup(role, specs[role].worker_class, [host])

    def close() -> None:
        with ExitStack() as stack:
            for host in hosts:
                stack.callback(host.close)

    try:
        for host in hosts:
            host.build()
    except BaseException:
        close()
        raise
    return Roles(groups, close)


def _launch_ray(placement: Placement, specs: dict[str, RoleSpec], threads: int) -> Roles:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from engine.controller.ray_groups import RayGroup, get

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    bundles = [_bundle(pool) for pool in placement.pools for _ in range(pool.world_size)]
    require_capacity(bundles, ray.cluster_resources())
    needed = [b for b in bundles if b]
    reservation = placement_group(needed, strategy="PACK") if needed else None
    actors: list[Any] = []

    def close() -> None:
        _stop(actors)
        if reservation is not None:
            remove_placement_group(reservation)

    try:
        if reservation is not None and not reservation.wait(placement.start_timeout_s):
            raise PlacementError(
                f"no room for {needed} within {placement.start_timeout_s:.0f} s: something else "
                f"holds the cluster; free now: {_plain(ray.available_resources())}"
            )
        groups: dict[str, WorkerGroup] = {}
        index = 0
        for pool in placement.pools:
            ranks = []
            for rank in range(pool.world_size):
                options: dict[str, Any] = {"num_cpus": pool.cpus, "num_gpus": pool.gpus}
                if reservation is not None and _bundle(pool):
                    options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                        reservation, placement_group_bundle_index=index
                    )
                    index += 1
                count = threads or max(1, int(pool.cpus)) if pool.cpus else 1
                ranks.append(
                    ray.remote(Host)
                    .options(
                        name=_actor_name(pool, rank),
                        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(count)}},
                        **options,
                    )
                    .remote([specs[r] for r in pool.roles], rank, pool.world_size, count)
                )
            actors.extend(ranks)
            for role in pool.roles:
                groups[role] = RayGroup(
                    role, specs[role].worker_class, ranks, placement.call_timeout_s
                )
        get([a.build.remote() for a in actors], "starting the workers", placement.start_timeout_s)
    except BaseException:
        close()
        raise
    return Roles(groups, close)


def require_capacity(bundles: Sequence[dict[str, float]], total: dict[str, float]) -> None:
    """Raise PlacementError, with a table of wanted and present, when `total` can't hold them."""
    wanted = {key: sum(b.get(key, 0.0) for b in bundles) for b in bundles for key in b}
    short = {key for key, amount in wanted.items() if amount > total.get(key, 0.0)}
    if short:
        table = "; ".join(f"{k}: wanted {wanted[k]:g}, present {total.get(k, 0):g}" for k in wanted)
        raise PlacementError(f"the Ray cluster is too small ({table}); ask for less or add nodes")


def _bundle(pool: Pool) -> dict[str, float]:
    wanted = {"CPU": pool.cpus, "GPU": pool.gpus}
    return {key: amount for key, amount in wanted.items() if amount > 0}


def _actor_name(pool: Pool, rank: int) -> str:
    return f"{'+'.join(pool.roles)}-{rank}-{os.getpid()}-{time.monotonic_ns()}"


def _plain(resources: dict[str, float]) -> dict[str, float]:
    return {key: resources.get(key, 0.0) for key in ("CPU", "GPU")}


def _stop(actors: Sequence[Any]) -> None:
    """Let all actors close their roles within a few seconds, then end their processes."""
    import ray

    closing = [actor.close.remote() for actor in actors]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=5)  # dead or hung ones don't matter
    for actor in actors:
        ray.kill(actor)
