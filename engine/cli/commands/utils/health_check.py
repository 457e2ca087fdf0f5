"""`health_check.run()`: whether this machine can do the work, as `python -m engine.health` says."""

from __future__ import annotations

from engine.cli.health_checks import Expectation, HealthFinding, check


def run(*, quick: bool = False, expect: str | None = None, gpus: int = 0) -> list[HealthFinding]:
    """Run all checks, and return their findings; one with a `fault` is not healthy.

    `quick` loads no library; `expect` is the kind of devices that must be there (cuda, rocm, cpu),
    `gpus` how many at least.
    """
    kind = expect if expect in ("cuda", "rocm", "cpu") else None
    return check(Expectation(kind=kind, gpus=gpus, quick=quick))
