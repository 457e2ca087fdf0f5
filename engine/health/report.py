"""What a health check expects, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass

NEEDED = ("torch", "ray", "transformers", "mlflow")
OPTIONAL = ("vllm", "bitsandbytes", "flytekit")


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One line of the report."""

    what: str  # e.g. torch
    found: str  # e.g. 2.13.0+cpu
    fault: str = ""  # what is wrong and what to do; empty without a fault


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the machine must have."""

    kind: str | None = None  # cuda, rocm or cpu; None takes any
    gpus: int = 0  # at least
    required: tuple[str, ...] = ()  # libraries of OPTIONAL that must be there
    shared_memory_gib: float = 1.0  # at least
    ray_nodes: int = 0  # alive in the cluster at RAY_ADDRESS; 0: Ray is not checked
    quick: bool = False  # load no library and count no device
    deadline_s: float = 5.0  # of an answer over the network
    load_deadline_s: float = 180.0  # of all imports together, from a cold disk
    ray_deadline_s: float = 300.0  # until all nodes are there
