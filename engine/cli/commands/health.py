"""`python -m engine.health`: checks all that a run needs, and prints a table or JSON."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from engine.cli.health_checks import OPTIONAL, Expectation, check
from engine.cli.program import ArgumentParser
from engine.console import command_line, quiet, say, table
from engine.errors import ConfigError

HEALTHY, UNHEALTHY, WRONG_USAGE = 0, 1, 2
_NUMBERS = {  # an option, its type and default, and the field of Expectation
    "--gpus": (int, 0, "gpus", "how many of them, at least"),
    "--shm-gib": (float, 1.0, "shared_memory_gib", "of /dev/shm, at least (default 1)"),
    "--ray-nodes": (int, 0, "ray_nodes", "wait for this many nodes of the Ray at RAY_ADDRESS"),
    "--ray-deadline": (float, 300.0, "ray_deadline_s", "seconds to wait for them (default 300)"),
    "--deadline": (float, 5.0, "deadline_s", "seconds for MLflow and S3 (default 5)"),
    "--load-deadline": (float, 180.0, "load_deadline_s", "seconds for imports (default 180)"),
}


def expectation(arguments: Sequence[str] | None) -> tuple[Expectation, bool]:
    """Read the arguments: what is expected, and whether to print JSON; raise ConfigError."""
    parser = ArgumentParser(
        "python -m engine.health", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--expect", choices=("cuda", "rocm", "cpu"), dest="kind", help="the kind of devices")
    for option, (kind, default, name, about) in _NUMBERS.items():
        add(option, type=kind, default=default, dest=name, help=about)
    add("--require", action="append", default=[], choices=OPTIONAL, help="must be installed, too")
    add("--quick", action="store_true", help="load no library, count no device")
    add("--json", action="store_true", help="print JSON")
    values = vars(parser.parse_args(arguments))
    for option, (_, _, name, _) in _NUMBERS.items():
        if values[name] < 0:
            raise ConfigError(f"{option} is {values[name]}, below 0")
    as_json, required = values.pop("json"), tuple(values.pop("require"))
    expected = Expectation(required=required, **values)
    if expected.kind == "cpu" and expected.gpus:
        raise ConfigError(f"--expect cpu and --gpus {expected.gpus} contradict; remove one")
    if expected.quick and (expected.kind or expected.gpus):
        raise ConfigError("--quick counts no device; remove it, or --expect and --gpus")
    return expected, as_json


@command_line(WRONG_USAGE, left="its processes have ended")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status: 0 healthy, 1 not, 2 wrong usage."""
    quiet()
    expected, as_json = expectation(arguments)
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
