"""`python -m engine.health`: checks all that a run needs, and prints a table or JSON.

Exit status: 0, healthy; 1, not, with one sentence for each fault; 2, wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine.console import exit_130_on_ctrl_c, quiet, say, table
from engine.errors import ConfigError
from engine.health.cluster import ray_nodes
from engine.health.libraries import check_imports, check_versions
from engine.health.report import OPTIONAL, Expectation, HealthFinding
from engine.health.service_checks import mlflow, output_folder, s3, shared_memory

HEALTHY, UNHEALTHY, WRONG_USAGE = 0, 1, 2


def check(expected: Expectation) -> list[HealthFinding]:
    """Run all checks and return their findings."""
    findings = list(check_versions(expected))
    if not expected.quick:
        findings = check_imports(findings, expected)
    findings += [shared_memory(expected.shared_memory_gib), output_folder()]
    findings += [mlflow(expected.deadline_s), *s3(expected.deadline_s)]
    if expected.ray_nodes:
        findings.append(ray_nodes(expected.ray_nodes, expected.ray_deadline_s))
    return findings


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m engine.health --help")


def expectation(arguments: Sequence[str] | None) -> tuple[Expectation, bool]:
    """Read the arguments: what is expected, and whether to print JSON; raise ConfigError."""
    parser = _Parser(
        "python -m engine.health", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--expect", choices=("cuda", "rocm", "cpu"), help="the kind of devices")
    add("--gpus", type=int, default=0, help="how many of them, at least")
    add("--require", action="append", default=[], choices=OPTIONAL, help="must be installed, too")
    add("--shm-gib", type=float, default=1.0, help="of /dev/shm, at least (default 1)")
    add("--ray-nodes", type=int, default=0, help="wait for so many nodes of the Ray at RAY_ADDRESS")
    add("--ray-deadline", type=float, default=300.0, help="seconds to wait for them (default 300)")
    add("--deadline", type=float, default=5.0, help="seconds for MLflow and S3 (default 5)")
    add("--load-deadline", type=float, default=180.0, help="seconds for imports (default 180)")
    add("--quick", action="store_true", help="load no library, count no device")
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    for name in ("gpus", "shm_gib", "ray_nodes", "ray_deadline", "deadline", "load_deadline"):
        if getattr(given, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(given, name)}, below 0")
    if given.expect == "cpu" and given.gpus:
        raise ConfigError(f"--expect cpu and --gpus {given.gpus} contradict; leave one away")
    if given.quick and (given.expect or given.gpus):
        raise ConfigError("--quick counts no device; leave it away, or --expect and --gpus")
    expected = Expectation(
        kind=given.expect,
        gpus=given.gpus,
        required=tuple(given.require),
        shared_memory_gib=given.shm_gib,
        ray_nodes=given.ray_nodes,
        quick=given.quick,
        deadline_s=given.deadline,
        load_deadline_s=given.load_deadline,
        ray_deadline_s=given.ray_deadline,
    )
    return expected, given.json


@exit_130_on_ctrl_c
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0 healthy, 1 not, 2 wrong usage."""
    quiet()
    try:
        expected, as_json = expectation(arguments)
    except ConfigError as error:
        say(f"error: {error}", error=True)
        return WRONG_USAGE
    # As an exception, so that the probe processes end as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    findings = check(expected)
    faults = [finding.fault for finding in findings if finding.fault]
    if as_json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        say(json.dumps({"healthy": not faults, "findings": listed}, indent=2))
        return UNHEALTHY if faults else HEALTHY
    rows = [{"": "FAULT" if x.fault else "ok", "what": x.what, "found": x.found} for x in findings]
    table("Health", rows)
    for fault in faults:
        say(f"fault: {fault}", error=True)
    return UNHEALTHY if faults else HEALTHY


if __name__ == "__main__":
    sys.exit(main())
