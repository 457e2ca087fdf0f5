"""`python -m engine.serve MODEL`: an OpenAI-compatible endpoint of a checked model.

Exit status: 0 never, as it serves until it is stopped; 1, not started, or the server ended, with
one sentence that says why; 2, wrong usage; 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from engine.console import INTERRUPTED, command_line, human_time, quiet, say
from engine.errors import EngineError, RolloutError
from engine.serve import Identity, resolve

T = TypeVar("T")
FAILED, TERMINATED = 1, 143
_SIGNALS_S = 1.0  # a signal that comes just before a wait is handled after it: no wait is longer


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.vllm = words[split + 1 :]
    quiet()
    previous_handler = signal.signal(signal.SIGTERM, _terminate)
    try:
        with tempfile.TemporaryDirectory(
            prefix="hybridflyte-serve-", ignore_cleanup_errors=True
        ) as scratch:
            _serve(options, Path(scratch))
    except EngineError as error:
        say(f"error: {error}", error=True)
        return FAILED
    except KeyboardInterrupt:
        say("interrupted; the server has stopped", error=True)
        return INTERRUPTED
    except SystemExit:  # by `_terminate`
        say("terminated; the server has stopped", error=True)
        return TERMINATED
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _serve(options: argparse.Namespace, scratch: Path) -> NoReturn:
    from engine.serve.vllm_server import is_installed

    if options.engine == "vllm" or (options.engine == "auto" and is_installed()):
        _with_vllm(options, scratch)
    if options.vllm:
        raise RolloutError(f"{' '.join(options.vllm)} is for vLLM, which is not the engine here")
    _with_native(options, scratch)


def _with_native(options: argparse.Namespace, scratch: Path) -> NoReturn:
    from engine.serve.api_server import ApiServer

    # The port first: a model that can't be served there need not be hashed and loaded.
    server = ApiServer(options.host, options.port, options.request_timeout)
    started = time.monotonic()

    def load() -> Identity:
        folder, identity = resolve(options.model, scratch, options.name)
        server.start(identity)
        from engine.serve.native_backend import NativeBackend  # loads torch

        server.backend = NativeBackend.load(folder, options.max_model_len)
        return identity

    try:
        identity = _interruptible(load)
        _say_ready(identity, "native", f"http://{options.host}:{server.server_port}", started)
        while True:
            time.sleep(_SIGNALS_S)
    finally:
        server.stop()


def _with_vllm(options: argparse.Namespace, scratch: Path) -> NoReturn:
    from engine.serve.vllm_server import check_port, log_end, vllm_server

    started, port = time.monotonic(), check_port(options.host, options.port)

    def load() -> tuple[Path, Identity]:
        from engine.runtime.policy_runtime import open_tokenizer  # loads torch

        resolved = resolve(options.model, scratch, options.name)
        open_tokenizer(resolved[0])
        return resolved

    folder, identity = _interruptible(load)
    if options.max_model_len is not None:
        options.vllm.insert(0, f"--max-model-len={options.max_model_len}")
    address, timeout = (options.host, port), options.start_timeout
    server = vllm_server(folder, identity, address, options.vllm, scratch, timeout)
    with server as (process, url):
        _say_ready(identity, "vLLM", url, started)
        while process.poll() is None:
            time.sleep(_SIGNALS_S)
    raise RolloutError(f"vLLM's server ended with status {process.returncode}: {log_end(scratch)}")


def _interruptible(work: Callable[[], T]) -> T:
    """Do `work` in a thread: a signal raised while PyTorch is being imported aborts the import."""
    loading = ThreadPoolExecutor(1, thread_name_prefix="load").submit(work)
    while wait([loading], _SIGNALS_S).not_done:
        pass
    return loading.result()


def _say_ready(identity: Identity, engine: str, url: str, started: float) -> None:
    version = f" version {identity.version}" if identity.version else ""
    say(
        f"{url}/v1: {identity.name}{version}, content {identity.digest}, served by {engine} after "
        f"{human_time(time.monotonic() - started)}"
    )


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve",
        description="Serve a model over OpenAI's API (/v1/completions, /v1/chat/completions, "
        "/v1/models), after its files were re-hashed. /health names its version and digest. "
        "What stands behind -- is passed on to vLLM.",
        epilog="exit status: 1 not started, or the server ended; 2 wrong usage; 130 after Ctrl-C, "
        "143 after SIGTERM",
    )
    add = parser.add_argument
    add("model", help="models:/NAME@ALIAS, models:/NAME/VERSION, or a model's folder")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    add(
        "--engine",
        choices=("auto", "vllm", "native"),
        default="auto",
        help="what decodes (default: vllm where it is installed, else native)",
    )
    add("--name", default="", help="the model's id in the API (default: its registered name, or "
        "its folder's)")  # fmt: skip
    add("--max-model-len", type=int, metavar="TOKENS", help="default: the model's context")
    add(
        "--request-timeout", type=float, default=600.0, metavar="SECONDS",
        help="native: longest wait for an answer (default: 600)",
    )  # fmt: skip
    add(
        "--start-timeout", type=float, default=900.0, metavar="SECONDS",
        help="vllm: longest wait for its start (default: 900)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # What loads or decodes is in a thread that Python's own exit would tear at.
    os._exit(status)
