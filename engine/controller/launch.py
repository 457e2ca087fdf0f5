"""Starts a placement: worker groups in this process, or Ray actors on a placement group."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from engine.controller.groups import Roles, WorkerGroup
from engine.controller.local_groups import LocalGroup, LocalHost, close_hosts, take_spans
from engine.controller.placement import ClusterNode, Placement, by_node, require_capacity
from engine.controller.timeline import CONTROLLER, Recorder, Span, recording
from engine.controller.worker_host import RoleSpec, WorkerHost
from engine.errors import PlacementError, StorageError, WorkerError
from engine.process_setup import release_freed_memory

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from engine.batch import Batch


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Launched = tuple[dict[str, WorkerGroup], Callable[[], list[Span]]]
DASHBOARD_VARIABLE = "HYBRIDFLYTE_RAY_DASHBOARD"


def launch(
    placement: Placement, specs: Sequence[RoleSpec], recorder: Recorder | None = None
) -> Roles:
    """Start the processes, build the roles in them, and return their groups.

    `recorder` is that of a run which these roles join (`Roles.recorder`): the run keeps the
    controller's own spans, and these roles record theirs if it has a timeline. Raises
    PlacementError when a role has no pool or the cluster can't hold the pools, and WorkerError when
    a role can't be built.
    """
    by_name = {spec.name: spec for spec in specs}
    placed = {role for pool in placement.pools for role in pool.roles}
    if placed != set(by_name):
        raise PlacementError(
            f"placement has {sorted(placed)}, the dataflow needs {sorted(by_name)}"
        )
    start = _launch_local if placement.kind == "local" else _launch_ray
    run_recorder = Recorder(CONTROLLER) if placement.timeline and recorder is None else None
    with ExitStack() as closing:  # undoes a launch that fails; otherwise Roles.close runs it
        if run_recorder:
            closing.enter_context(recording(run_recorder))
        groups, spans = start(placement, by_name, run_recorder or recorder, closing)

        def timeline() -> list[Span]:
            return spans() + (run_recorder.take() if run_recorder else [])

        return Roles(groups, closing.pop_all().close, run_recorder or recorder, timeline)


def _launch_local(
    placement: Placement, specs: dict[str, RoleSpec], recorder: Recorder | None, closing: ExitStack
) -> Launched:
    groups: dict[str, WorkerGroup] = {}
    hosts: list[LocalHost] = []
    closing.callback(release_freed_memory)  # runs last
    closing.callback(close_hosts, hosts)
    for pool in placement.pools:
        if pool.world_size != 1:
            raise PlacementError(
                f"roles {pool.roles} ask for {pool.world_size} ranks in one process; use "
                "trainer.placement=ray"
            )
        in_pool = [specs[role] for role in pool.roles]
        count = max(1, int(pool.cpus))
        hosts.append(LocalHost(WorkerHost(in_pool, threads=count, timeline=recorder is not None)))
        for spec in in_pool:
            groups[spec.name] = LocalGroup(spec, hosts[-1:], placement.call_timeout_s, recorder)
    for host in hosts:
        host.host.build()
    return groups, partial(take_spans, hosts, placement.call_timeout_s)


def _launch_ray(
    placement: Placement, specs: dict[str, RoleSpec], recorder: Recorder | None, closing: ExitStack
) -> Launched:
    import ray

    from engine.controller.ray_groups import RayGroup, RayHost, stop_actors, wait_all

    require_capacity(placement.pools, list(cluster_nodes().values()))
    deadline = time.monotonic() + placement.start_timeout_s
    options = iter(_reserve(placement, closing))
    run = f"hybridflyte-{uuid.uuid4().hex[:6]}"
    actor_class: Any = ray.remote(RayHost)
    groups: dict[str, WorkerGroup] = {}
    actors: list[ActorHandle] = []
    closing.callback(stop_actors, actors)
    stored: WeakKeyDictionary[Batch, ObjectRef] = WeakKeyDictionary()  # shared by all groups
    names: list[str] = []
    built: list[ObjectRef] = []
    for pool in placement.pools:
        count = max(1, int(pool.cpus))
        in_pool = [specs[role] for role in pool.roles]
        ranks: list[ActorHandle] = [
            actor_class.options(
                name=f"{run}/{pool.name}/{rank}",
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(count)}},
                **next(options),
            ).remote(in_pool, rank, pool.world_size, count, recorder is not None)
            for rank in range(pool.world_size)
        ]
        actors += ranks
        names += [f"{pool.name} rank {rank}: " for rank in range(pool.world_size)]
        # A reference: the ranks of a pool wait for rank 0's address, the controller doesn't.
        address = ranks[0].rendezvous_address.remote() if len(ranks) > 1 else ""
        built += [actor.build.remote(address) for actor in ranks]
        for spec in in_pool:
            groups[spec.name] = RayGroup(spec, ranks, placement.call_timeout_s, recorder, stored)
    labels = {ref: f"{name}its start" for ref, name in zip(built, names, strict=True)}
    wait_all(labels, placement.start_timeout_s, until=deadline)

    def spans() -> list[Span]:
        refs: list[ObjectRef[list[Span]]] = [actor.spans.remote() for actor in actors]
        labels = {ref: f"{name}its timeline" for ref, name in zip(refs, names, strict=True)}
        return [span for spans in wait_all(labels, placement.call_timeout_s) for span in spans]

    return groups, spans


def init_options(environ: Mapping[str, str]) -> dict[str, object]:
    """Arguments of `ray.init`: join the cluster of RAY_ADDRESS, or start one here."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address := environ.get("RAY_ADDRESS"):
        return {"address": address, **quiet}
    dashboard = environ.get(DASHBOARD_VARIABLE, "0") not in ("", "0")
    # "local", for without an address Ray joins whatever cluster /tmp names.
    return {"address": "local", "include_dashboard": dashboard, **quiet}


def init_ray(options: Mapping[str, Any]) -> None:
    """Call `ray.init`; a Ray that is started here listens on the loopback address alone.

    Its processes get a group of their own: SIGTERM to this one's group, as `timeout` and process
    managers send it, would end them before the step that a notice leaves time for. One that does
    not start is tried once more: Ray's node ends itself where its agent, a Python program, takes
    more than 15 s to start, as from a cold disk or on a busy machine.
    """
    import ray
    from ray._private import ray_constants, services

    ray_services: Any = services  # whose class is replaced meanwhile
    multi_node, start_process = ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen
    local = options["address"] == "local"
    if local:
        # Ray has no argument for this: it takes this machine's address in place of 127.0.0.1,
        # unless it is told, by a variable at its import, that there is no cluster of machines.
        ray_constants.ENABLE_RAY_CLUSTER = False
        ray_services.ConsolePopen = partial(start_process, process_group=0)
        # Ray's default is 15: whatever else this machine does would starve the run.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        try:
            ray.init(**options)
        except Exception as error:  # Ray's own time limit is an Exception and no more
            if not local or isinstance(error, ValueError):  # of a setting
                raise
            log.warning("Ray did not start (%s); it is tried once more", error)
            ray.init(**options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = multi_node
        ray_services.ConsolePopen = start_process


def _reserve(placement: Placement, closing: ExitStack) -> list[dict[str, object]]:
    """Reserve room for all processes at once; return each one's actor options, pool by pool."""
    import ray
    from ray.util import placement_group_table
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    processes = [pool for pool in placement.pools for _ in range(pool.world_size)]
    bundles = [pool.bundle for pool in processes if pool.bundle]
    group: PlacementGroup | None = None
    order: list[int] = []  # each process's bundle
    if bundles:
        labels = [dict(pool.labels) for pool in processes if pool.bundle]
        selectors = labels if any(labels) else None
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        closing.callback(remove_placement_group, group)
        if not group.wait(placement.start_timeout_s):
            names = {name for bundle in bundles for name in bundle}
            free = {k: v for k, v in ray.available_resources().items() if k in names}
            raise PlacementError(
                f"no room for {bundles} within {placement.start_timeout_s:g} s: something else "
                f"holds the cluster; free now: {free}"
            )
        # PACK fills nodes in no order of the bundles.
        nodes = placement_group_table(group)["bundles_to_node_id"]
        for pool in (pool for pool in placement.pools if pool.bundle):
            order += by_node(range(len(order), len(order) + pool.world_size), nodes)
    options: list[dict[str, object]] = []
    index = iter(order)
    for pool in processes:
        amounts = {"num_cpus": pool.cpus, "num_gpus": pool.gpus, "resources": dict(pool.resources)}
        if group is not None and pool.bundle:
            amounts["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=next(index)
            )
        elif pool.labels:  # takes nothing, so no bundle stands for it, but still asks for a node
            amounts["label_selector"] = dict(pool.labels)
        options.append(amounts)
    return options


PROBE_SECONDS = 60.0  # for the first task on each machine


@contextlib.contextmanager
def ray_session(placement: str, object_store_memory: int | None = None) -> Iterator[None]:
    """Start or join Ray for the block, unless roles are placed locally; end it if it was started.

    Joins the cluster that RAY_ADDRESS names, or starts one, whose object store has that many
    bytes. Raises PlacementError where that cluster can't be joined, WorkerError where none starts.
    """
    if placement == "local":
        yield
        return
    import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    options = init_options(os.environ)
    if options["address"] == "local":
        options["object_store_memory"] = object_store_memory
    try:
        init_ray(options)
        # Ray's own handler would end the process at once, without closing what is open.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    except Exception as error:  # Ray's own time limit is an Exception and no more
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cause = cause.split(". ")[0].rstrip(".;")  # Ray goes on to say what may be the reason
        if address:
            raise PlacementError(
                f"Ray could not be started at RAY_ADDRESS={address}: {cause}; check the address, "
                "or unset RAY_ADDRESS"
            ) from error
        raise WorkerError(
            f"Ray could not be started: {cause}; run again when this machine has less to do, or "
            "set rl.trainer.placement=local to do without Ray"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_nodes() -> dict[str, ClusterNode]:
    """Return the machines that are alive in the Ray cluster, by Ray's id; joins or starts Ray."""
    import ray

    if not ray.is_initialized():
        init_ray(init_options(os.environ))
    return {
        n["NodeID"]: ClusterNode(
            f"{n['NodeManagerAddress']} {n['NodeID'][:6]}", n["Resources"], n["Labels"]
        )
        for n in ray.nodes()
        if n["Alive"]
    }


def ask_nodes(
    nodes: Mapping[str, ClusterNode], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> dict[str, T]:
    """Return a function's answers by machine; PlacementError for one that can't run it."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0)(function)
    strategies = (NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in nodes)
    pending = [task.options(scheduling_strategy=s).remote(*args, **kwargs) for s in strategies]
    answers: dict[str, T] = {}
    for node, answer in zip(nodes.values(), pending, strict=True):
        try:
            answers[node.name] = ray.get(answer, timeout=PROBE_SECONDS)
        except RayError as error:
            raise PlacementError(
                f"machine {node.name} of the Ray cluster can't run a first task: {error}"
            ) from error
    return answers


def require_shared(folders: Sequence[str]) -> None:
    """Raise StorageError unless every machine of the Ray cluster has these folders."""
    nodes = cluster_nodes()
    if len(nodes) < 2:
        return
    for name, missing in ask_nodes(nodes, _missing, list(folders)).items():
        if missing:
            raise StorageError(
                f"machine {name} of the Ray cluster does not see {', '.join(missing)}; put "
                "model and results (trainer.default_local_dir, HYBRIDFLYTE_HOME) on a file system "
                "that all machines share"
            )


def _missing(folders: list[str]) -> list[str]:
    return [folder for folder in folders if not os.path.isdir(folder)]
