"""A real vLLM server in a process of its own, started once for all tests that want it."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

_START_S = 540  # most of it imports: 20 s on an idle machine, minutes on a busy one
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the executor "uni": one process less to start
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a compiler
}
_FLAGS = [
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--max-num-seqs=64",
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--disable-log-stats",
    "--disable-uvicorn-access-log",
    "--distributed-executor-backend=uni",
    "--block-size=32",
    "--no-enable-chunked-prefill",
    "--max-num-batched-tokens=8192",
    "--served-model-name=policy",
    "--worker-extension-cls=engine.rollout.server.vllm_worker.WeightReceiver",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_url(model: Callable[[], Any], *flags: str) -> str:
    """Address of a server of `model()`, whose context is that; skips where vLLM isn't installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    url, problem = _start(model, *flags)
    assert not problem, f"vLLM's server did not start:\n{problem}"
    return url


@cache  # a failure as well: no test waits for it again
def _start(model: Callable[[], Any], *flags: str) -> tuple[str, str]:
    """The server's address, and the end of its log if it did not start."""
    folder = Path(tempfile.mkdtemp(prefix="served-"))
    served = model()
    served.save_pretrained(folder)
    context = served.config.max_position_embeddings
    port, log = free_port(), folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *(f"--model={folder}", f"--port={port}", f"--max-model-len={context}"),
                *(*_FLAGS, *flags),
            ],
            env=os.environ | _ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_the_tests,
        )
    atexit.register(_stop, server, folder)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return url, ""
        except httpx.TransportError:
            time.sleep(0.2)
    return url, log.read_text()[-3000:]


def _end_with_the_tests() -> None:
    """A server must not outlive tests that are killed (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _stop(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.terminate()
    try:
        server.wait(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=15)
    shutil.rmtree(folder, ignore_errors=True)
