"""What switching between training and rollout costs, beside a naive reload of the same model.

`python benchmarks/switch.py --help`. The hybrid actor's switch is measured by the library's own
`measure_switch_overhead`. The naive way, measured in the same run on the same model, is what a
trainer with a rollout engine of its own does: its state dict is loaded into a second model, and the
engine is built again over that. Its memory is all new tensor storage of the reload (of torch's
operators; what an engine takes inside its own kernels comes on top). Times are "median (fastest)",
in milliseconds; the ratio is the fastest reload to the fastest switch of the slower direction, for
other work on the machine disturbs those least.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rollout import SHAPES, SIZES, build_model
from transformers import Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from engine import HybridActor, measure_switch_overhead
from engine.console import command_line
from engine.rollout.protocol import create_engine
from engine.runtime.hybrid_actor import StorageCounter


@command_line()
def main() -> None:
    args = parse_args()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    rows = []
    print(
        f"{args.dtype}, {args.threads} thread(s), {args.device}; median (fastest) ms\n"
        f"{'model':<6}{'engine':<8}{'to train':>14}{'to rollout':>16}{'new MB':>8}"
        f"{'of model':>10}{'reload':>16}{'reload MB':>11}{'ratio':>8}"
    )
    for size in args.sizes:
        for engine in args.engines:
            row = measure(args, size, engine)
            rows.append(row)
            print(
                f"{size:<6}{engine:<8}{shown(row['to_train_ms'], 2):>14}"
                f"{shown(row['to_rollout_ms'], 2):>16}{row['new_mb']:>8.2f}"
                f"{row['new_mb'] / row['model_mb']:>9.2%}{shown(row['reload_ms'], 0):>17}"
                f"{row['reload_mb']:>11.1f}{row['ratio']:>7.0f}x",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"case": vars(args), "results": rows}, file, indent=2)


def shown(times: tuple[float, float], digits: int) -> str:
    return f"{times[0]:.{digits}f} ({times[1]:.{digits}f})"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Latency and memory of the train/rollout switch against a naive reload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9, help="timed switches, after one untimed")
    parser.add_argument("--reloads", type=int, default=3, help="timed naive reloads; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-cache-memory-mb", type=int, default=64, help="vLLM's KV cache")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    return parser.parse_args()


def measure(args: argparse.Namespace, size: str, engine: str) -> dict[str, Any]:
    """Figures of one size and engine."""
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "kv_cache_memory_mb": args.kv_cache_memory_mb,
    }
    if engine == "vllm":
        options["enforce_eager"] = True  # graphs take a minute to make and cost a switch nothing
    policy = build_model(size, args.dtype, args.device)
    model_mb = sum(p.nbytes for p in policy.parameters()) / 1e6
    actor = HybridActor(policy, rollout_engine=engine, rollout_options=options)
    try:
        actor.generate(torch.tensor([[5, 6, 7]], device=args.device), max_new_tokens=4)
        costs = {mode: measure_switch_overhead(actor, mode, args.repeats) for mode in MODES}
    finally:
        actor.close()
    reload_ms, reload_mb = (float("nan"), float("nan")), float("nan")
    if args.reloads:
        second = build_model(size, args.dtype, args.device)
        reload_ms, reload_mb = naive_reload(policy, second, engine, options, args.reloads)
    times = {mode: (cost["latency_ms"], cost["latency_min_ms"]) for mode, cost in costs.items()}
    return {
        "size": size,
        "engine": engine,
        "model_mb": model_mb,
        "to_train_ms": times["train"],
        "to_rollout_ms": times["rollout"],
        "new_mb": max(cost["mem_increase_mb"] for cost in costs.values()),
        "reload_ms": reload_ms,
        "reload_mb": reload_mb,
        "ratio": reload_ms[1] / max(fastest for _, fastest in times.values()),
    }


MODES: tuple[Any, ...] = ("train", "rollout")


def naive_reload(
    policy: Qwen2ForCausalLM,
    second: Qwen2ForCausalLM,
    engine: str,
    options: dict[str, Any],
    reloads: int,
) -> tuple[tuple[float, float], float]:
    """Median and fastest milliseconds, and megabytes of one, of loading and rebuilding."""

    def reload() -> Callable[[], None]:
        state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        second.load_state_dict(state)
        close = create_engine(engine, second, **options).close
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        return close

    times = []
    for _ in range(reloads + 1):  # the first one warms up
        gc.collect()
        started = time.perf_counter()
        close = reload()
        times.append(time.perf_counter() - started)
        close()
    with StorageCounter() as counter:
        close = reload()
    close()
    return (1e3 * statistics.median(times[1:]), 1e3 * min(times[1:])), counter.bytes / 1e6


if __name__ == "__main__":
    sys.exit(main())
