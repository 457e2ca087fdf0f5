"""The health check and its probes."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from thorough import and_slow

from engine.cli import health_checks
from engine.cli.commands.health import HEALTHY, UNHEALTHY, WRONG_USAGE, main
from engine.cli.health_checks import (
    Expectation,
    HealthFinding,
    check_devices,
    check_imports,
    check_versions,
    mlflow,
    output_folder,
    ray_nodes,
    run_isolated,
    s3,
    shared_memory,
)

TORCH = """
class version:
    hip = cuda = None
class cuda:
    device_count = int
"""


GPU = {"name": "NVIDIA H100 80GB HBM3", "fault": ""}


@pytest.fixture(autouse=True)
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of the test."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "FLYTE_", "MLFLOW_", "HYBRIDFLYTE_", "RAY_")):
            monkeypatch.delenv(name)
        if name.endswith("VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server() -> Iterator[str]:
    """An HTTP server: /health as MLflow's, with credentials below /closed; all else is 404."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            granted = self.headers.get("Authorization") == "Bearer right"
            status = {"/health": 200, "/closed/health": 200 if granted else 401}
            self.send_response(status.get(self.path, 503 if self.path == "/busy" else 404))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.fixture
def silent() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    "not_loaded", and_slow([("ray", "transformers", "mlflow", "vllm", "bitsandbytes")], [((),)])
)
def test_this_environment_is_healthy_and_the_report_names_all(
    not_loaded: tuple[str, ...], tmp_path: Path
) -> None:
    """The command itself, in a process of its own; the slow test has it load every library."""
    code = (
        "import runpy; from engine.cli import health_checks; "
        f"health_checks.NEVER_LOADED += {not_loaded}; "
        "runpy.run_module('engine.health', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", "--shm-gib", "0", "--require", "flytekit"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    report = json.loads(done.stdout)
    findings = {x["what"]: x for x in report["findings"]}
    assert (done.returncode, report["healthy"]) == (HEALTHY, True), done.stdout + done.stderr
    libraries, places = {"torch", "ray", "transformers"}, {"/dev/shm", "MLflow"}
    assert libraries | {"devices", "kernels"} | places <= findings.keys()
    assert "2.13" in findings["torch"]["found"]
    installed = [name for name in not_loaded if findings[name]["found"] != "not installed"]
    assert all(map(importlib.util.find_spec, installed)), "one is imported by another name"
    assert findings["MLflow"]["found"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert list(tmp_path.iterdir()) == [], "a look leaves nothing behind"


def test_quick_loads_nothing_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["--quick", "--shm-gib", "0"]) == HEALTHY
    assert time.monotonic() - started < 5
    output = capsys.readouterr().out
    assert "transformers" in output
    assert "devices" not in output
    assert "FAULT" not in output


def test_a_fault_is_a_sentence_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    assert main(["--quick", "--shm-gib", "1e6"]) == UNHEALTHY
    said = capsys.readouterr()
    faults = [x for x in said.err.splitlines() if x.startswith("fault: ")]
    assert len(faults) == 2
    assert "at least 1e+06 GiB is needed" in faults[0]
    assert "MLflow at http://127.0.0.1:9 can't be used: connection refused" in faults[1]
    assert "secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "-1"], "--gpus is -1, below 0"),
        (["--expect", "tpu"], "invalid choice: 'tpu'"),
        (["--expect", "cpu", "--gpus", "8"], "--expect cpu and --gpus 8 contradict"),
        (["--quick", "--gpus", "8"], "--quick counts no device"),
    ],
)
def test_wrong_usage_is_refused_at_once(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == WRONG_USAGE
    assert sentence in capsys.readouterr().err


def broken_library(
    folder: Path,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...] = ("torch", "ray"),
    deadline_s: float = 60.0,
) -> list[HealthFinding]:
    """What the check finds with this code in place of ray, and little in place of torch."""
    (folder / "ray.py").write_text(code)
    (folder / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(health_checks, "NEEDED", names)
    monkeypatch.setattr(health_checks, "OPTIONAL", ())
    expected = Expectation(load_deadline_s=deadline_s)
    return check_imports(list(check_versions(expected)), expected)


def test_a_library_that_raises_is_named_and_the_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, ray, devices = broken_library(
        tmp_path, "raise ImportError('libcudart.so.13: no such file')", monkeypatch
    )
    assert torch.fault == devices.fault == ""
    assert "ray can't be loaded: ImportError: libcudart.so.13: no such file" in ray.fault


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import os; os.kill(os.getpid(), 4)", "it was ended by SIGILL"),
        ("import os; os._exit(3)", "it ended with exit status 3"),
    ],
)
def test_a_library_that_ends_its_process_is_named(
    code: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, ray, devices = broken_library(tmp_path, code, monkeypatch)
    assert torch.fault == ""
    assert f"ray can't be loaded: {ending}" in ray.fault
    assert "loading stopped at ray" in devices.fault


def test_a_library_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.monotonic()
    code = "import time; time.sleep(600)"
    ray, torch, _ = broken_library(tmp_path, code, monkeypatch, ("ray", "torch"), deadline_s=3.0)
    assert "ray can't be loaded: it was not done in 3 s" in ray.fault
    assert torch.fault == ""
    assert time.monotonic() - started < 15


def test_what_is_not_installed_is_a_fault_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_checks, "NEEDED", ("torch", "no-such-thing"))
    monkeypatch.setattr(health_checks, "OPTIONAL", ("nor-this", "nor-that"))
    found = {x.what: x for x in check_versions(Expectation(required=("nor-that",)))}
    assert {name for name, x in found.items() if x.fault} == {"no-such-thing", "nor-that"}
    assert found["nor-this"].found == "not installed"


@pytest.mark.parametrize(
    ("build", "devices", "expected", "fault"),
    [
        ("cuda", [GPU] * 8, Expectation(kind="cuda", gpus=8), ""),
        ("cuda", [GPU] * 8, Expectation(gpus=4), ""),
        ("rocm", [{**GPU, "name": "AMD Instinct MI300X"}], Expectation(kind="rocm"), ""),
        ("cuda", [], Expectation(), ""),
        ("cuda", [], Expectation(kind="cpu"), ""),
        ("cuda", [GPU] * 7, Expectation(gpus=8), "7 GPUs are visible, at least 8 expected"),
        ("cuda", [], Expectation(kind="cuda"), "0 GPUs are visible, at least 1 expected; start"),
        ("rocm", [], Expectation(kind="rocm"), "--device /dev/kfd"),
        ("cpu", [], Expectation(kind="rocm"), "is a cpu build, rocm is expected; use the image"),
        ("cuda", [GPU], Expectation(kind="rocm"), "images/Dockerfile.rocm"),
        ("cpu", [], Expectation(gpus=1), "use an image with a CUDA or ROCm build"),
        ("cuda", [GPU], Expectation(kind="cpu"), "devices are visible where none is expected"),
        ("cuda", [GPU, {**GPU, "fault": "ECC error"}], Expectation(), "GPU 1: ECC error"),
    ],
)
def test_devices_are_held_against_what_is_expected(
    build: str, devices: list[dict[str, str]], expected: Expectation, fault: str
) -> None:
    finding = check_devices(build, devices, expected)
    assert fault in finding.fault
    assert bool(finding.fault) == bool(fault)


def test_hidden_devices_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "(CUDA_VISIBLE_DEVICES=0)" in check_devices("cuda", [GPU], Expectation(gpus=2)).fault


@pytest.mark.gpu
def test_the_devices_of_this_machine_work() -> None:
    expected = Expectation(gpus=1)
    (devices,) = [
        x for x in check_imports(list(check_versions(expected)), expected) if x.what == "devices"
    ]
    assert devices.fault == ""


def test_shared_memory_is_measured() -> None:
    room = os.statvfs("/dev/shm")
    gib = room.f_blocks * room.f_frsize / 2**30
    assert shared_memory(gib * 0.99).fault == ""
    assert "docker run --shm-size" in shared_memory(gib * 1.01).fault


def test_the_output_folder_must_take_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "not" / "yet"))
    assert output_folder().fault == ""
    assert not (tmp_path / "not").exists()
    monkeypatch.setenv("HYBRIDFLYTE_HOME", "/proc/outputs")  # read-only, for root too
    assert "/proc/outputs can't be written" in output_folder().fault
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "file" / "outputs"))
    assert "Not a directory" in output_folder().fault


def test_mlflow_that_answers(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{server}")
    assert mlflow(5.0).fault == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{server}/other")
    assert "status 404 at /health, is it an MLflow server?" in mlflow(5.0).fault
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{server}/closed")
    assert "wants other credentials" in mlflow(5.0).fault
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "right")
    assert mlflow(5.0).fault == ""


def test_mlflow_that_never_answers_is_given_up(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{silent}")
    started = time.monotonic()
    assert "no answer in" in mlflow(1.0).fault
    assert time.monotonic() - started < 5


def test_an_mlflow_database_needs_a_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/mlflow.db")
    assert "/proc can't be written" in mlflow(1.0).fault
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    assert mlflow(1.0).found == "databricks, not looked at"


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT"])
def test_an_s3_endpoint_must_answer(
    variable: str, server: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(s3(5.0)) == []
    monkeypatch.setenv(variable, f"http://{server}")
    assert [x.fault for x in s3(5.0)] == [""], "a refusal is an answer"
    monkeypatch.setenv(variable, f"http://{server}/busy")
    assert f"status 503; check {variable}" in next(s3(5.0)).fault
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    assert "connection refused" in next(s3(5.0)).fault
    monkeypatch.setenv(variable, f"http://{silent}")
    assert "no answer in 1 s" in next(s3(1.0)).fault


def test_the_shared_store_must_be_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "s3://bucket/team")
    assert [(x.found, x.fault) for x in s3(1.0)] == [("s3://bucket/team", "")]
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "/shared/store")
    assert "HYBRIDFLYTE_STORE='/shared/store' is no address in S3" in next(s3(1.0)).fault
    monkeypatch.setenv("HYBRIDFLYTE_STORE", "s3://key:hunter2@bucket/x")
    assert "HYBRIDFLYTE_STORE='s3://key:***@bucket/x' is no address in S3" in next(s3(1.0)).fault


def test_ray_that_is_not_there_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own patience is minutes. That real nodes are counted: tests/images/test_slurm.py."""
    monkeypatch.setenv("RAY_ADDRESS", silent)
    started = time.monotonic()
    fault = ray_nodes(2, 3.0).fault
    assert f"0 of 2 nodes are in the Ray cluster at {silent} (it was not done in 3 s)" in fault
    assert time.monotonic() - started < 15


def look(*arguments: str) -> Iterator[dict[str, Any]]:
    print("a library's own words")
    yield {"arguments": arguments}
    yield {"last": True}


def test_what_a_probe_yields_is_returned_and_what_it_prints_is_not(capfd: Any) -> None:
    assert run_isolated(look, "a b", "c", deadline_s=60.0) == (
        [{"arguments": ("a b", "c")}, {"last": True}],
        "",
    )
    assert capfd.readouterr().out == ""
