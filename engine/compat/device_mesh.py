"""`DeviceMesh(devices=, sub_meshes=)`: which roles sit on which devices, as pools of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.config import PoolConfig
from engine.errors import ConfigError

_RANGE = re.compile(r"(cuda|gpu|cpu)(?::(\d+)(?:-(\d+))?)?", re.IGNORECASE)
_NAMES = {"policy": "actor", "ref": "reference", "value": "critic", "reward_model": "reward"}
_WITH_ACTOR = ("rollout", "reference")


@dataclass(frozen=True)
class DeviceMesh:
    """Devices of a cluster, and the roles on parts of them.

    Devices are `cuda:3`, or ranges such as `cuda:0-3`. Roles that no part names are the actor's
    neighbours, as they are without a mesh. Ray picks the very devices; how many there are, and
    which roles share them, is as here.

    Examples:
        >>> parts = {"actor": ["cuda:0-3"], "critic": ["cuda:4-7"]}
        >>> mesh = DeviceMesh(devices=["cuda:0-7"], sub_meshes=parts)
    """

    devices: Sequence[str] = ()
    sub_meshes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = self.devices if not isinstance(self.devices, str) else [self.devices]
        there, taken = set(_expanded(listed)), dict[str, str]()
        for role, part in self.sub_meshes.items():
            for device in _expanded(part):
                if there and device not in there:
                    raise ConfigError(
                        f"DeviceMesh: sub_meshes[{role!r}] has {device}, which is not in devices; "
                        "add it there, or leave it out"
                    )
                other = taken.setdefault(device, role)
                if other != role and set(_expanded(self.sub_meshes[other])) != set(_expanded(part)):
                    raise ConfigError(
                        f"DeviceMesh: {device} is in sub_meshes[{other!r}] and in "
                        f"sub_meshes[{role!r}], which differ; give them the same devices, or others"
                    )

    def ranks(self, role: str = "actor") -> int:
        """Devices of a role; all, where no part names it."""
        part = self._parts().get(role, ())
        return len(part or _expanded(self.devices)) or 1

    def pools(self, roles: frozenset[str]) -> tuple[PoolConfig, ...]:
        """The pools of a run with these roles; ConfigError for a role that it hasn't."""
        parts = self._parts()
        if unknown := sorted(parts.keys() - roles):
            raise ConfigError(
                f"DeviceMesh: sub_meshes names {unknown[0]!r}, and this run has {sorted(roles)}; "
                "leave it out"
            )
        actor = parts.get("actor", tuple(_expanded(self.devices)))
        together: dict[tuple[str, ...], list[str]] = {}
        for role in sorted(roles, key=lambda name: (name != "actor", name)):
            beside = role in _WITH_ACTOR or role == "critic"
            part = parts.get(role, actor if beside or role == "actor" else ())
            together.setdefault(tuple(part) or (role,), []).append(role)
        return tuple(
            PoolConfig(
                roles=tuple(some),
                cpus=1.0 if "actor" in some else 0.0,
                gpus=1.0 if part[0].startswith("cuda") else 0.0,
            )
            for part, some in together.items()
        )

    def _parts(self) -> dict[str, tuple[str, ...]]:
        return {
            _NAMES.get(role, role): tuple(_expanded(part)) for role, part in self.sub_meshes.items()
        }


def _expanded(devices: Sequence[str] | str) -> list[str]:
    """One name a device, e.g. "cuda:0"; raises ConfigError for another form."""
    found: list[str] = []
    for text in [devices] if isinstance(devices, str) else devices:
        match = _RANGE.fullmatch(str(text).strip())
        if match is None:
            raise ConfigError(f"DeviceMesh: {text!r} is no device; write cuda:0, cuda:0-3 or cpu")
        kind = "cpu" if match[1].lower() == "cpu" else "cuda"
        first = int(match[2] or 0)
        found += [f"{kind}:{n}" for n in range(first, int(match[3] or first) + 1)]
    return found
