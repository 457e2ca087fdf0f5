"""Placement as a value: which roles share which processes, and whether a cluster can hold them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import PlacementError

_TOLERANCE = 1e-6  # Ray counts resources in steps of 1e-4


@dataclass(frozen=True, slots=True)
class Pool:
    """Roles that share each of `world_size` processes."""

    roles: tuple[str, ...]  # built in this order, e.g. ("actor", "rollout", "reference")
    world_size: int = 1
    cpus: float = 1.0  # a process, e.g. 2.0; 0 for roles that mostly wait
    gpus: float = 0.0  # a process, e.g. 1.0
    # Other Ray resources a process, e.g. {"accelerator_type:H100": 0.001}.
    resources: Mapping[str, float] = field(default_factory=dict)
    # Node labels, as Ray's label selectors: {"disk": "ssd", "zone": "!in(a,b)"}.
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one process, e.g. {"CPU": 2.0, "GPU": 1.0}."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {key: amount for key, amount in amounts.items() if amount > 0}


@dataclass(frozen=True, slots=True)
class Placement:
    """Which role runs where.

    >>> Placement((Pool(("actor", "rollout"), world_size=2, gpus=1), Pool(("reward",), cpus=0)))
    """

    pools: tuple[Pool, ...]
    kind: Literal["ray", "local"] = "ray"
    start_timeout_s: float = 600.0  # deadline for the processes to start
    call_timeout_s: float = 1800.0  # deadline for one call
    timeline: bool = False  # record spans of all calls, see `timeline`

    def __post_init__(self) -> None:
        roles = [role for pool in self.pools for role in pool.roles]
        doubled = sorted({role for role in roles if roles.count(role) > 1})
        if doubled:
            raise PlacementError(f"placed twice: {doubled}; give each role one pool")
        for pool in self.pools:
            if pool.world_size < 1 or min(pool.cpus, pool.gpus, *pool.resources.values()) < 0:
                raise PlacementError(f"{pool}: world_size must be 1 or more, amounts 0 or more")


@dataclass(frozen=True, slots=True)
class ClusterNode:
    name: str  # e.g. "10.0.0.7"
    resources: Mapping[str, float]  # in total, free or taken, e.g. {"CPU": 8.0}
    labels: Mapping[str, str] = field(default_factory=dict)

    def capacity_for(self, pool: Pool) -> int:
        """How many processes of `pool` the empty node holds."""
        if not all(_matches(self.labels.get(k), v) for k, v in pool.labels.items()):
            return 0
        fits = [
            int((self.resources.get(key, 0.0) + _TOLERANCE) / amount)
            for key, amount in pool.bundle.items()
        ]
        return min(fits, default=pool.world_size)


def require_capacity(pools: Sequence[Pool], nodes: Sequence[ClusterNode]) -> None:
    """Raise PlacementError with a table of wanted and present when `nodes` can't hold `pools`.

    Counts the nodes' total resources, free or not: it rejects what can never fit.
    """
    wanted = _sum((pool.bundle, pool.world_size) for pool in pools)
    present = _sum((node.resources, 1) for node in nodes)
    reasons = [
        f"{key}: wanted {amount:g}, present {present.get(key, 0.0):g}"
        for key, amount in wanted.items()
        if amount > present.get(key, 0.0) + _TOLERANCE
    ] or [reason for pool in pools if (reason := _pool_shortage(pool, nodes))]
    if not reasons:
        return
    rows: list[tuple[str, Mapping[str, float]]] = [("wanted", wanted)]
    for p in pools:
        rows.append((f"  {p.world_size} × {p.name}{_label_suffix(p.labels)}, each", p.bundle))
    rows.append(("present", present))
    rows += [(f"  {node.name}{_label_suffix(node.labels)}", node.resources) for node in nodes]
    raise PlacementError(
        f"the Ray cluster can't hold the placement: {'; '.join(reasons)}; ask for less or add "
        f"nodes\n{_table([*dict.fromkeys(['CPU', 'GPU', *wanted])], rows)}"
    )


def by_node(bundles: Iterable[int], nodes: Mapping[int, str]) -> list[int]:
    """Order a pool's bundles so that those of a node follow one another, the fullest node first.

    Groups of consecutive ranks (tp, sp, shards) then stay inside a node, where sizes divide.
    """
    members: dict[str, list[int]] = {}
    for bundle in bundles:
        members.setdefault(nodes[bundle], []).append(bundle)
    return [bundle for node in sorted(members.values(), key=len, reverse=True) for bundle in node]


def _pool_shortage(pool: Pool, nodes: Sequence[ClusterNode]) -> str:
    capacity = sum(node.capacity_for(pool) for node in nodes)
    if capacity >= pool.world_size:
        return ""
    needs = ", ".join(f"{amount:g} {key}" for key, amount in pool.bundle.items()) or "nothing"
    what = f"one process of {pool.name} ({needs})"
    if pool.labels:
        what += f" with labels {dict(pool.labels)}"
    if capacity == 0:
        return f"no single node holds {what}"
    return f"the nodes hold {what} {capacity} times, wanted {pool.world_size} times"


def _sum(amounts: Iterable[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """The resources in total; each is given with how often it is there."""
    total: dict[str, float] = {}
    for resources, times in amounts:
        for key, amount in resources.items():
            total[key] = total.get(key, 0.0) + amount * times
    return total


def _table(keys: list[str], rows: list[tuple[str, Mapping[str, float]]]) -> str:
    """A line for each of `rows`, a column for each resource."""
    cells = [
        ["", *keys],
        *([name, *(f"{has.get(key, 0.0):g}" for key in keys)] for name, has in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _label_suffix(labels: Mapping[str, str]) -> str:
    shown = [f"{k}={v}" for k, v in labels.items() if k != "ray.io/node-id"]
    return f" [{', '.join(shown)}]" if shown else ""


def _matches(value: str | None, selector: str) -> bool:
    """Whether a node's label meets a selector in Ray's syntax: a, !a, in(a,b), !in(a,b)."""
    text = selector.removeprefix("!")
    listed = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (value in [option.strip() for option in listed]) != selector.startswith("!")
