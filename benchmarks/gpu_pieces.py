"""The pieces of `gpu_proof.py`, each a process of its own.

    python benchmarks/gpu_pieces.py switch --sizes 0.5B,1.5B --out figures.jsonl

A piece adds each figure to a file as soon as it has it; one that can't be measured ends with its
cause as the last line of its errors. `gpu_training.py` has the pieces that train. `--tiny` runs
them with shapes for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import gpu_training
import nccl_round_trip
import rollout
import switch
import torch
from gpu_proof import Figure
from gpu_training import timed

from engine.cli.commands.health import expectation
from engine.cli.health_checks import check
from engine.console import command_line, quiet
from engine.errors import EngineError
from engine.rollout.protocol import create_engine
from engine.runtime.policy_runtime import SleepingEngine

ROOT = Path(__file__).parents[1]
SWITCH_MS = 8.0
KV_MB = 4096  # of each rollout engine
RELOAD = "a reload"


class PieceFailed(Exception):
    """A piece that could not be measured; the message says why."""


def ceilings(args: argparse.Namespace) -> Iterator[Figure]:
    """Matrix products in bfloat16 at the largest model's shapes, copies, and the bus."""
    hidden, inner, *_, vocabulary = rollout.SHAPES[args.sizes[-1]]
    rows, wide = (64, 256) if args.tiny else (16384, 8192)
    products = {
        "up": (rows, hidden, inner),
        "down": (rows, inner, hidden),
        "o": (rows, hidden, hidden),
        "head": (rows // 4, hidden, vocabulary),
        "large": (wide, wide, wide),
    }
    for name, (m, k, n) in products.items():
        a, b = (torch.randn(s, k, device=args.device, dtype=torch.bfloat16) for s in (m, n))
        seconds, _ = timed(lambda a=a, b=b: [a @ b.t() for _ in range(5)])
        rate = 5 * 2 * m * k * n / seconds / 1e12
        yield Figure(f"matrix product {name}, {m} × {k} × {n}", rate, "Tflop/s")
    count = 1 << (20 if args.tiny else 31)
    source = torch.empty(count, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    seconds, _ = timed(lambda: target.copy_(source))
    yield Figure("copy, read and written", 2 * count / seconds / 1e12, "TB/s")
    if args.device == "cuda":
        host = torch.empty(count // 8, dtype=torch.uint8, pin_memory=True)
        seconds, _ = timed(lambda: target[: count // 8].copy_(host, non_blocking=True))
        yield Figure("host to device", count / 8 / seconds / 1e9, "GB/s")


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
                device=args.device,
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
            gpu_training.empty_cache()


def decoding(args: argparse.Namespace) -> Iterator[Figure]:
    """Tokens a second of the native engine, with and without graphs, of vLLM and transformers."""
    for size in args.sizes:
        for name in [*(name for own in args.engines for name in _variants(own)), "transformers"]:
            if name in ("native", "transformers") and size != args.sizes[0]:
                continue  # they take long
            case = rollout.parse_args(
                [
                    *("--size", size, "--dtype", "bfloat16", "--mix", "fixed"),
                    *("--device", args.device, "--prompts", str(args.prompts), "--n", str(args.n)),
                    *("--prompt-length", str(args.prompt_length)),
                    *("--max-new-tokens", str(args.new_tokens), "--max-num-seqs", "512"),
                    *("--kv-cache-memory-mb", str(4 * KV_MB), "--repeats", "1"),
                    *("--limit-s", "60", "--engines", name),
                ]
            )
            rates = rollout.run(case)[name]
            step = 1e3 * min(512, args.prompts * args.n) / rates["wall"]
            what = f"{size} {name}, {args.prompts} × {args.n}"
            yield Figure(what, rates["wall"], "tokens/s")
            yield Figure(f"{what}, a step", step, "ms")


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
    return ["native-graphs", "native"] if engine == "native" else [engine]


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
    "ceilings": ceilings,
    "update": gpu_training.update,
    "step": gpu_training.step,
    "decode": decoding,
    "switch": switching,
    "sharded": gpu_training.sharded,
    "qlora": gpu_training.qlora,
    "sleep": sleeping,
    "memory": gpu_training.memory,
    "nccl": nccl,
    "health": health,
    "tests": tests,
}
TINY = {
    "sizes": ["1M"], "prompts": 2, "n": 4, "prompt_length": 16, "new_tokens": 6, "longest": 12,
    "mean_length": 6, "step_prompts": 2, "micro_tokens": 256, "megabytes": 1,
}  # fmt: skip


def parse_args() -> argparse.Namespace:
    """What the pieces are run with; the defaults are for one device of 80 GB or more."""

    def names(text: str) -> list[str]:
        return text.split(",")

    engines = ["native"] + (["vllm"] if importlib.util.find_spec("vllm") else [])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("piece", choices=PIECES)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file for the figures, a line of JSON each")
    add("--sizes", type=names, default=["0.5B", "1.5B"], help="shapes, the last of which trains")
    add("--engines", type=names, default=engines, help="that decode")
    add("--prompts", type=int, default=64, help="of a rollout")
    add("--n", type=int, default=8, help="completions a prompt")
    add("--prompt-length", type=int, default=128)
    add("--new-tokens", type=int, default=256, help="of a rollout")
    add("--longest", type=int, default=1024, help="completion of a step and of an update")
    add("--mean-length", type=int, default=540, help="of completions, were there no longest")
    add("--step-prompts", type=int, default=32, help="of a GRPO step")
    add("--micro-tokens", type=int, default=16384, help="of a forward and backward pass")
    add("--megabytes", type=int, default=256, help="of a collective")
    add("--tests", type=names, default=["tests"], help="files with tests marked gpu")
    add("--trl-cold", action="store_true", help="time TRL's first step, with nothing before it")
    add("--tiny", action="store_true", help="the smallest shapes, also without a GPU")
    early, _ = parser.parse_known_args()
    if early.tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    torch.set_num_threads(os.cpu_count() or 1)
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and args.device == "cuda" else None
    try:
        with tempfile.TemporaryDirectory(dir=place) as folder, args.out.open("a") as out:
            args.folder = Path(folder)
            for figure in PIECES[args.piece](args):
                if math.isfinite(figure.value):
                    print(json.dumps(asdict(figure)), file=out, flush=True)
    except (PieceFailed, EngineError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    sys.exit(main())
