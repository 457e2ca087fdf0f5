"""Whether all nodes of a Ray cluster are alive."""

from __future__ import annotations

import os

from engine.health.isolated_probe import run_isolated
from engine.health.report import HealthFinding

# Ray waits for an absent cluster without a limit, hence in a separate process.
NODE_COUNTER = """
import ray, time
while True:
    try:
        ray.init(address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
        break
    except Exception as error:
        emit(fault=str(error).strip().splitlines()[0].rstrip("."))
        time.sleep(1.0)
while True:
    alive = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
    emit(alive=alive)
    if len(alive) >= int(sys.argv[1]):
        break
    time.sleep(1.0)
"""


def ray_nodes(wanted: int, deadline_s: float) -> HealthFinding:
    """Wait until that many nodes are alive in the cluster at $RAY_ADDRESS."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    emitted, ended = run_isolated(NODE_COUNTER, [str(wanted), address], deadline_s)
    last = emitted[-1] if emitted else {}
    alive = last.get("alive", [])
    found = f"{len(alive)} nodes at {address}"
    if len(alive) >= wanted:
        return HealthFinding("Ray", found)
    there = f"there are {', '.join(alive)}" if alive else last.get("fault", "it does not answer")
    fault = (
        f"{len(alive)} of {wanted} nodes are in the Ray cluster at {address} ({ended}): {there}; "
        "look at the logs of the others"
    )
    return HealthFinding("Ray", found, fault)
