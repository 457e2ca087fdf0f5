"""The pieces of `gpu_check.py`, each a process of its own.

    python benchmarks/gpu_pieces.py switch --sizes 0.5B,1.5B --out figures.json

A piece ends with its figures in a file; one that can't be measured ends with its cause as the last
line of its errors. `gpu_step.py` has the pieces that train.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_step
import nccl_round_trip
import rollout
import switch
import torch
from gpu_report import Figure, write_figures

from engine.cli.commands.health import expectation
from engine.cli.health_checks import check
from engine.console import quiet
from engine.errors import EngineError
from engine.rollout.protocol import create_engine
from engine.runtime.policy_runtime import SleepingEngine

ROOT = Path(__file__).parents[1]
SWITCH_MS = 8.0
KV_MB = 4096  # of each rollout engine
RELOAD = "a reload"


class PieceFailed(Exception):
    """A piece that could not be measured; the message says why."""


def health(args: argparse.Namespace) -> Iterator[Figure]:
    """`python -m engine.health` with the device that is here."""
    kind = "rocm" if torch.version.hip else "cuda"
    expected, _ = expectation(["--expect", kind, "--gpus", str(torch.cuda.device_count())])
    findings = check(expected)
    faults = [finding.fault for finding in findings if finding.fault]
    if faults:
        raise PieceFailed("; ".join(faults))
    yield Figure("checks without a fault", len(findings), "", "all")


def nccl(args: argparse.Namespace) -> Iterator[Figure]:
    """Every collective that the engine uses, on all devices of this machine."""
    if not torch.distributed.is_nccl_available():
        raise PieceFailed("this PyTorch has no NCCL; install its CUDA or ROCm build")
    ranks = torch.cuda.device_count()
    found = nccl_round_trip.run(ranks, "nccl", "cuda", args.megabytes)
    for name, seconds in found.items():
        yield Figure(f"{name}, {ranks} rank(s), {args.megabytes} MB", 1e3 * seconds, "ms")


def switching(args: argparse.Namespace) -> Iterator[Figure]:
    """HybridActor's switch against a reload: below 8 ms, and no new memory."""
    for size in args.sizes:
        for engine in args.engines:
            reloads = 3 if engine == "native" else 0  # starting vLLM again takes minutes
            case = argparse.Namespace(
                dtype="bfloat16",
                device="cuda",
                repeats=9,
                reloads=reloads,
                kv_cache_memory_mb=256,
            )
            row = switch.measure(case, size, engine)
            for way in ("train", "rollout"):
                ms = row[f"to_{way}_ms"][0]
                limit = f"< {SWITCH_MS:g} ms"
                yield Figure(f"{size} {engine}, to {way}", ms, "ms", limit, ms < SWITCH_MS)
            new = row["new_mb"] * 1e6
            yield Figure(f"{size} {engine}, new memory", new, "bytes", "0 bytes", new == 0)
            if reloads:
                yield Figure(f"{size} {engine}, {RELOAD}", row["reload_ms"][0], "ms")
                times = row["ratio"]
                yield Figure(f"{size} {engine}, switch to reload", times, "x", "> 1", times > 1)
            torch.cuda.empty_cache()


def decoding(args: argparse.Namespace) -> Iterator[Figure]:
    """Tokens a second of the native engine, with and without graphs, and of vLLM."""
    engines = [name for own in args.engines for name in _variants(own)]
    case = rollout.parse_args(
        [
            *("--size", args.sizes[0], "--dtype", "bfloat16", "--mix", "fixed"),
            *("--device", "cuda", "--prompts", str(args.prompts), "--n", str(args.n)),
            *("--prompt-length", str(args.prompt_length)),
            *("--max-new-tokens", str(args.new_tokens), "--max-num-seqs", "512"),
            *("--kv-cache-memory-mb", str(KV_MB), "--repeats", "2", "--limit-s", "60"),
            *("--engines", *engines),
        ]
    )
    for name, rates in rollout.run(case).items():
        yield Figure(f"{case.size} {name}, {args.prompts} × {args.n}", rates["wall"], "tokens/s")


def sleeping(args: argparse.Namespace) -> Iterator[Figure]:
    """Device memory that vLLM gives back for the update, by sleep level; its weights are shared."""
    if "vllm" not in args.engines:
        return
    size = args.sizes[0]
    model = rollout.build_model(size, "bfloat16", "cuda")
    length = args.prompt_length + args.new_tokens
    engine = create_engine(
        "vllm", model, max_model_len=length, kv_cache_memory_mb=KV_MB, enforce_eager=True
    )
    assert isinstance(engine, SleepingEngine)
    try:
        for level in (1, 2):
            awake, begin = _taken(), time.perf_counter()
            engine.sleep(level)
            freed, seconds = awake - _taken(), time.perf_counter() - begin
            least = 0.9 * KV_MB / 1024
            name = f"{size} vllm, sleep level {level}"
            yield Figure(f"{name}, given back", freed, "GiB", f"> {least:.3g} GiB", freed > least)
            begin = time.perf_counter()
            engine.wake_weights()
            engine.update_weights(model, level)
            engine.wake_kv()
            torch.cuda.synchronize()
            yield Figure(f"{name}, to sleep", 1e3 * seconds, "ms")
            yield Figure(f"{name}, to wake", 1e3 * (time.perf_counter() - begin), "ms")
    finally:
        engine.close()


def _taken() -> float:
    """GiB of the device: PyTorch doesn't count what vLLM maps itself."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def _variants(engine: str) -> list[str]:
    return ["native", "native-graphs"] if engine == "native" else [engine]


def tests(args: argparse.Namespace) -> Iterator[Figure]:
    """The tests that need a device."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *args.tests], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if not counts.get("passed") and not counts.get("failed"):
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise PieceFailed(f"pytest ran no test: {''.join(last)}")
    broken = counts.get("failed", 0) + counts.get("error", 0)
    yield Figure("tests marked gpu, passed", counts.get("passed", 0), "")
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    names = f"failed, the first {first[1]}" if first else "failed"
    yield Figure(f"tests marked gpu, {names}", broken, "", "0", not broken)


Piece = Callable[[argparse.Namespace], Iterator[Figure]]
PIECES: dict[str, Piece] = {
    "health": health,
    "nccl": nccl,
    "switch": switching,
    "memory": gpu_step.memory,
    "step": gpu_step.step,
    "rollout": decoding,
    "sleep": sleeping,
    "tests": tests,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the pieces are run with; the defaults are for one device of 16 GB or more."""

    def names(text: str) -> list[str]:
        return text.split(",")

    engines = ["native"] + (["vllm"] if importlib.util.find_spec("vllm") else [])
    add = parser.add_argument
    add("--sizes", type=names, default=["0.5B", "1.5B"], help="shapes; the first also trains")
    add("--engines", type=names, default=engines, help="that decode")
    add("--prompts", type=int, default=64, help="of a rollout; a step takes a quarter")
    add("--n", type=int, default=8, help="completions a prompt")
    add("--prompt-length", type=int, default=128)
    add("--new-tokens", type=int, default=256)
    add("--megabytes", type=int, default=256, help="of a collective")
    add("--tests", type=names, default=["tests"], help="files with tests marked gpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--out", type=Path, required=True, help="file for the figures")
    add_arguments(parser)
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(os.cpu_count() or 1)
    figures: list[Figure] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            args.folder = Path(folder)
            figures.extend(f for f in PIECES[args.piece](args) if math.isfinite(f.value))
    except (PieceFailed, EngineError) as error:
        sys.exit(f"{error}")
    finally:  # also what was measured before a failure
        write_figures(args.out, figures)


if __name__ == "__main__":
    main()
