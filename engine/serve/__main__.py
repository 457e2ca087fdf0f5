"""`python -m engine.serve MODEL`: an OpenAI-compatible endpoint of a checked model."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import ValidationError

from engine.console import command_line, human_time, quiet, say
from engine.errors import ConfigError, RolloutError
from engine.openai_api.http_server import listen
from engine.serve import Identity, resolve
from engine.serve.api_server import ApiServer, ServerLimits
from engine.storage.signatures import KEYS_VARIABLE, trusted_keys

T = TypeVar("T")
GIB = 2**30
_SIGNALS_S = 1.0  # a signal that comes just before a wait is handled after it: no wait is longer


@command_line(left="the server has stopped")
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.vllm = words[split + 1 :]
    quiet()
    folder = tempfile.TemporaryDirectory(prefix="hybridflyte-serve-", ignore_cleanup_errors=True)
    with folder as scratch:
        _serve(options, Path(scratch))
    return 0


def _serve(options: argparse.Namespace, scratch: Path) -> None:
    from engine.serve.vllm_server import is_installed

    uses_vllm = options.engine == "vllm" or (options.engine == "auto" and is_installed())
    if options.vllm and not uses_vllm:
        raise RolloutError(f"{' '.join(options.vllm)} is for vLLM, which is not the engine here")
    for name in ServerLimits.model_fields if uses_vllm else ():
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is the native server's; vLLM's own options go behind --")
    if options.dry_run:
        _say_plan(options, scratch, uses_vllm)
    elif uses_vllm:
        _with_vllm(options, scratch)
    else:
        _with_native(options, scratch)


def _say_plan(options: argparse.Namespace, scratch: Path, uses_vllm: bool) -> None:
    """Check port, limits and model; say what would be served, and the memory that it takes."""
    from engine.models import saved_dtype, text_config, vocabulary_and_context
    from engine.parallel.layout import ModelShape
    from engine.rollout.protocol import resolve_max_model_len
    from engine.serve.fair_decoder import SEQUENCES
    from engine.serve.vllm_server import require_vllm

    listen(options.host, options.port).close()
    _limits(options)
    folder, identity = _resolve(options, scratch)
    if uses_vllm:
        require_vllm()
    weights, shape = folder.glob("*.safetensors"), ModelShape.of(text_config(folder))
    bytes_each = 4 if saved_dtype(folder) == "float32" else 2
    context = resolve_max_model_len(options.max_model_len, vocabulary_and_context(folder)[1])
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_each
    sizes = [sum(file.stat().st_size for file in weights), SEQUENCES * context * token]
    say(
        f"dry run, nothing is served; {identity.name}, content {identity.digest}, by "
        f"{'vLLM' if uses_vllm else 'native'} at http://{options.host}:{options.port}/v1"
    )
    say(
        f"memory    weights {sizes[0] / GIB:.2f} GiB as saved; keys and values {token} bytes a "
        f"token, {sizes[1] / GIB:.2f} GiB for {SEQUENCES} sequences of {context} tokens"
    )


def _with_native(options: argparse.Namespace, scratch: Path) -> NoReturn:
    # The port first: a model that can't be served there need not be hashed and loaded.
    server = ApiServer(options.host, options.port, _limits(options))
    started = time.monotonic()

    def load() -> Identity:
        folder, identity = _resolve(options, scratch)
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
    folder, identity = _interruptible(lambda: _resolve(options, scratch))
    if options.max_model_len is not None:
        options.vllm.insert(0, f"--max-model-len={options.max_model_len}")
    address, timeout = (options.host, port), options.start_timeout
    say(
        f"starting vLLM for {identity.name} at http://{options.host}:{port}/v1 (minutes on a CPU, "
        "where --engine native is quick)"
    )
    server = vllm_server(folder, identity, address, options.vllm, scratch, timeout)
    with server as (process, url):
        _say_ready(identity, "vLLM", url, started)
        while process.poll() is None:
            time.sleep(_SIGNALS_S)
    raise RolloutError(f"vLLM's server ended with status {process.returncode}: {log_end(scratch)}")


def _resolve(options: argparse.Namespace, scratch: Path) -> tuple[Path, Identity]:
    from engine.runtime.policy_runtime import open_tokenizer  # loads torch

    trusted = trusted_keys() if options.require_signatures else None
    folder, identity = resolve(options.model, scratch, options.name, trusted)
    open_tokenizer(folder)
    return folder, identity


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.serve",
        description="Serve a model over OpenAI's API (/v1/completions, /v1/chat/completions, "
        "/v1/models), after hashing its files again. /health names its version and digest. "
        "Arguments after -- go to vLLM.",
        epilog="exit status: 1 not started, or the server ended; 2 wrong usage; 130 after Ctrl-C, "
        "143 after SIGTERM",
    )
    add = parser.add_argument
    add("model", help="models:/NAME@ALIAS, models:/NAME/VERSION, or a model's folder")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="default: 8000; 0: any free port")
    about = "what decodes (default: vllm if it is installed, else native)"
    add("--engine", choices=("auto", "vllm", "native"), default="auto", help=about)
    add("--dry-run", action="store_true", help="check all, say what would be served, and exit")
    about = "the model's id in the API (default: its registered name, or its folder's)"
    add("--name", default="", help=about)
    about = f"refuse a model that none of the keys in ${KEYS_VARIABLE} signed"
    add("--require-signatures", action="store_true", help=about)
    add("--max-model-len", type=int, metavar="TOKENS", help="default: the model's context")
    about = "vllm: longest wait for its start (default: 900)"
    add("--start-timeout", type=float, default=900.0, metavar="SECONDS", help=about)
    limits = parser.add_argument_group("limits of the native server")
    for name, info in ServerLimits.model_fields.items():
        about = f"{' '.join((info.description or '').split())} (default: {info.default})"
        option = f"--{name.replace('_', '-')}"
        limits.add_argument(option, type=type(info.default), metavar="NUMBER", help=about)
    return parser


def _limits(options: argparse.Namespace) -> ServerLimits:
    given = {name: getattr(options, name) for name in ServerLimits.model_fields}
    try:
        return ServerLimits(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{option} {first['input']}: {first['msg']}") from None


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # What loads or decodes is in a thread that Python's own exit would tear at.
    os._exit(status)
