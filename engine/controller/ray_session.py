"""Ray for the duration of a run, and whether its machines see the same files."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence

from engine.controller.launch import Placement, init_options, init_ray
from engine.errors import EngineError, PlacementError, StorageError, WorkerError

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
    options = init_options(Placement(()), os.environ)
    if options["address"] == "local":
        options["object_store_memory"] = object_store_memory
    try:
        init_ray(options)
        # Ray's own handler would end the process at once, without closing what is open.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
    except Exception as error:  # Ray's own time limit is an Exception and no more
        raise _not_started(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _not_started(address: str | None, error: Exception) -> EngineError:
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    cause = cause.split(". ")[0].rstrip(".;")  # Ray goes on to say what may be the reason
    if address:
        return PlacementError(
            f"Ray could not be started at RAY_ADDRESS={address}: {cause}; check the address, or "
            "unset RAY_ADDRESS"
        )
    return WorkerError(
        f"Ray could not be started: {cause}; run again when this machine has less to do, or set "
        "rl.trainer.placement=local to do without Ray"
    )


def require_shared(folders: Sequence[str]) -> None:
    """Raise StorageError unless every machine of the Ray cluster has these folders.

    The policy reads its model and writes the result wherever Ray placed it, so a missing folder
    would end the run, at worst after the last step.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
    if len(nodes) < 2:
        return
    look = ray.remote(num_cpus=0)(_missing)
    asked = {
        node: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        ).remote(list(folders))
        for node in nodes
    }
    for node, answer in asked.items():
        try:
            missing = ray.get(answer, timeout=PROBE_SECONDS)
        except RayError as error:
            raise PlacementError(
                f"machine {nodes[node]} of the Ray cluster can't run a first task: {error}"
            ) from error
        if missing:
            raise StorageError(
                f"machine {nodes[node]} of the Ray cluster does not see {', '.join(missing)}; put "
                "model and results (trainer.default_local_dir, HYBRIDFLYTE_HOME) on a file system "
                "that all machines share"
            )


def _missing(folders: list[str]) -> list[str]:
    return [folder for folder in folders if not os.path.isdir(folder)]
