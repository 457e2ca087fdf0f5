"""Bringing a placement up: worker groups in this process, or Ray actors on a placement group.

The values (`Placement`, `Pool`) and the check of what a cluster holds are in `placement`.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from engine.controller.groups import Roles, WorkerGroup
from engine.controller.local_groups import LocalGroup, LocalHost, take_spans
from engine.controller.placement import Node, Placement, Pool, require_capacity
from engine.controller.timeline import CONTROLLER, Recorder, Span, recording
from engine.controller.worker_host import Host, RoleSpec
from engine.errors import PlacementError

__all__ = ["Placement", "Pool", "launch"]

Started = tuple[dict[str, WorkerGroup], Callable[[], list[Span]]]
DASHBOARD_VARIABLE = "HYBRIDFLYTE_RAY_DASHBOARD"


def launch(
    placement: Placement,
    specs: Sequence[RoleSpec],
    threads: int = 0,
    recorder: Recorder | None = None,
) -> Roles:
    """Start the processes, build the roles in them, and return their groups.

    `recorder` is that of a run which these roles join (`Roles.recorder`): its timeline keeps the
    controller's own spans, and these roles record theirs if that run does.
    Raises PlacementError when a role has no pool or the cluster can't hold the pools, and
    WorkerError when a role can't be built.
    """
    by_name = {spec.name: spec for spec in specs}
    placed = {role for pool in placement.pools for role in pool.roles}
    if placed != set(by_name):
        raise PlacementError(
            f"placement has {sorted(placed)}, the dataflow needs {sorted(by_name)}"
        )
    start = _launch_local if placement.kind == "local" else _launch_ray
    own = Recorder(CONTROLLER) if placement.timeline and recorder is None else None
    with ExitStack() as closing:  # undoes a launch that fails, and later is what close() does
        if own:
            closing.enter_context(recording(own))
        groups, spans = start(placement, by_name, threads, own or recorder, closing)

        def timeline() -> list[Span]:
            return spans() + (own.take() if own else [])

        return Roles(groups, closing.pop_all().close, own or recorder, timeline)


def _launch_local(
    placement: Placement,
    specs: dict[str, RoleSpec],
    threads: int,
    recorder: Recorder | None,
    closing: ExitStack,
) -> Started:
    groups: dict[str, WorkerGroup] = {}
    hosts: list[LocalHost] = []
    for pool in placement.pools:
        if pool.world_size != 1:
            raise PlacementError(
                f"roles {pool.roles} ask for {pool.world_size} ranks in one process; use "
                "trainer.placement=ray"
            )
        held = [specs[role] for role in pool.roles]
        count = threads or max(1, int(pool.cpus))
        hosts.append(LocalHost(Host(held, threads=count, timeline=recorder is not None)))
        closing.callback(hosts[-1].close)
        for spec in held:
            groups[spec.name] = LocalGroup(spec, hosts[-1:], placement.call_timeout_s, recorder)
    for host in hosts:
        host.host.build()

    def spans() -> list[Span]:
        return take_spans(hosts, placement.call_timeout_s)

    return groups, spans


def _launch_ray(
    placement: Placement,
    specs: dict[str, RoleSpec],
    threads: int,
    recorder: Recorder | None,
    closing: ExitStack,
) -> Started:
    import ray

    from engine.controller.ray_groups import RayGroup, RayHost, stop, wait

    if not ray.is_initialized():
        ray.init(**init_options(placement, os.environ))
    require_capacity(placement.pools, _nodes(), placement.strategy)
    where = iter(_reserve(placement, closing))
    run = f"hybridflyte-{placement.run}{'-' if placement.run else ''}{uuid.uuid4().hex[:6]}"
    groups: dict[str, WorkerGroup] = {}
    actors: list[Any] = []
    closing.callback(stop, actors)
    sent: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # the run's, for all groups
    names: list[str] = []
    first: list[int] = []  # which of `actors` is rank 0 of each one's pool
    for pool in placement.pools:
        count = (threads or max(1, int(pool.cpus))) if pool.cpus else 1
        held = [specs[role] for role in pool.roles]
        ranks = [
            ray.remote(RayHost)
            .options(
                name=f"{run}/{pool.name}/{rank}",
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(count)}},
                **next(where),
            )
            .remote(held, rank, pool.world_size, count, recorder is not None)
            for rank in range(pool.world_size)
        ]
        first.extend([len(actors)] * len(ranks))
        actors.extend(ranks)
        names.extend(f"{pool.name} rank {rank}: " for rank in range(pool.world_size))
        for spec in held:
            groups[spec.name] = RayGroup(spec, ranks, placement.call_timeout_s, recorder, sent)
    # A reference to the answer of rank 0: its pool's ranks wait for it, the controller doesn't.
    points = {
        at: actors[at].rendezvous_address.remote() for at in set(first) if first.count(at) > 1
    }
    built = [a.build.remote(points.get(at, "")) for a, at in zip(actors, first, strict=True)]
    wait(
        {ref: f"{n}its start" for ref, n in zip(built, names, strict=True)},
        placement.start_timeout_s,
    )

    def spans() -> list[Span]:
        asked = [actor.spans.remote() for actor in actors]
        parts = {ref: f"{n}its timeline" for ref, n in zip(asked, names, strict=True)}
        return [span for part in wait(parts, placement.call_timeout_s) for span in part]

    return groups, spans


def init_options(placement: Placement, environ: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `ray.init`: join the cluster of RAY_ADDRESS, or start one here."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := environ.get("RAY_ADDRESS"):
        return {"address": address, **quiet}
    wanted = placement.dashboard or environ.get(DASHBOARD_VARIABLE, "0") not in ("", "0")
    return {"include_dashboard": wanted, **quiet}


def _nodes() -> list[Node]:
    import ray

    return [
        Node(f"{n['NodeManagerAddress']} {n['NodeID'][:6]}", n["Resources"], n["Labels"])
        for n in ray.nodes()
        if n["Alive"]
    ]


def _reserve(placement: Placement, closing: ExitStack) -> list[dict[str, Any]]:
    """Reserve room for all processes at once; return each one's actor options, pool by pool."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = [pool for pool in placement.pools for _ in range(pool.world_size)]
    bundles = [pool.bundle for pool in wanted if pool.bundle]
    group: Any = None
    if bundles:
        labels = [dict(pool.labels) for pool in wanted if pool.bundle]
        group = placement_group(
            bundles,
            strategy=placement.strategy,
            bundle_label_selector=labels if any(labels) else None,
        )
        closing.callback(remove_placement_group, group)
        if not group.wait(placement.start_timeout_s):
            free = {k: v for k, v in ray.available_resources().items() if k in _kinds(bundles)}
            raise PlacementError(
                f"no room for {bundles} within {placement.start_timeout_s:g} s: something else "
                f"holds the cluster; free now: {free}"
            )
    options: list[dict[str, Any]] = []
    index = 0
    for pool in wanted:
        amounts = {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "resources": dict(pool.resources)}
        if pool.bundle:
            amounts["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            index += 1
        elif pool.labels:  # takes nothing, so no bundle stands for it, but still asks for a node
            amounts["label_selector"] = dict(pool.labels)
        options.append(amounts)
    return options


def _kinds(bundles: Sequence[dict[str, float]]) -> set[str]:
    return {kind for bundle in bundles for kind in bundle}
