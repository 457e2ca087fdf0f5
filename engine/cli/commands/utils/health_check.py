"""`health_check.run()`: whether this machine can do the work, as `python -m engine.health` says."""

from engine.cli.health_checks import Expectation, HealthFinding, check


def run(*, quick: bool = False, expect: str | None = None, gpus: int = 0) -> list[HealthFinding]:
    """Run all checks, and return their findings; one with a `fault` is not healthy.

    `quick` loads no library; `expect` is the kind of devices (cuda, rocm, cpu), `gpus` the least.
    """
    return check(Expectation(kind=expect, gpus=gpus, quick=quick))
