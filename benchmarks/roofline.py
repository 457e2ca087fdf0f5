"""What the machine can do, and how near to that prefill, decoding and the update come.

    python benchmarks/roofline.py --sizes 1M,10M
    python benchmarks/roofline.py --growth

The machine: the rate of a large matrix product (GEMM) and the bandwidth of reading memory, in
float32 and bfloat16, measured here. A phase's bound is the longer of two times: its matrix products
at that rate, and the bytes that it must read at that bandwidth. Counted is what the algorithm
needs, not what is computed: a group's prompt once, no padding, and the head and what follows the
last layer's attention for the tokens that predict a response's. Of a training phase there is also
what its products alone take, each at the rate that the library reaches at that very shape, and
which share of the phase that is. The update is the actor's call in a GRPO step of `vs_trl_cases`
(forward, backward, AdamW), sft a whole step of the warm start; prefill and decoding are the native
engine alone. At the end stands which kernels this machine has chosen. `--growth` shows instead how
a step's time grows with prompts, length, parameters and ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from case_folder import read_case
from machine_rates import Peak, best, measure_peak, product_rates, product_seconds
from vs_trl import STEPS, contestant, machine
from vs_trl_cases import (
    PROMPT,
    SIZES,
    Size,
    build_model,
    character_tokenizer,
    write_grpo_case,
    write_sft_case,
)

from engine.console import command_line, quiet
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.kernels.choices import known_choices
from engine.rollout.protocol import SamplingParams, create_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Phase:
    """What was measured of a phase, and what it needs at least."""

    name: str  # prefill, decode, update or sft
    tokens: int
    seconds: float
    flops: float
    bytes: float
    products: float = 0.0
    """Seconds of its matrix products alone, of a training phase."""

    def bound(self, peak: Peak) -> float:
        """Seconds that it takes at least."""
        return max(self.flops / peak.flops, self.bytes / peak.bytes)


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    torch.set_num_threads(args.threads)
    print(machine(args.threads), flush=True)
    if args.growth:
        growth(args)
        return
    peaks = {dtype: measure_peak(DTYPES[dtype]) for dtype in args.dtypes}
    for dtype, peak in peaks.items():
        print(f"{dtype}: GEMM {peak.flops / 1e9:.0f} Gflop/s, read {peak.bytes / 1e9:.1f} GB/s")
    for size in args.sizes if "products" in args.phases else []:
        for dtype in args.dtypes:
            print(f"\nGflop/s of a layer's products, {size}, {dtype}: forward, ∂input, ∂weight")
            print("\n".join(f"  {line}" for line in product_rates(SIZES[size], DTYPES[dtype])))
    if args.phases == ["products"]:
        return
    print(
        f"\n{'model':<7}{'dtype':<10}{'phase':<9}{'ms':>9}{'tokens/s':>10}{'Gflop/s':>9}"
        f"{'of GEMM':>9}{'bound ms':>10}{'of bound':>9}{'products ms':>13}{'of those':>10}"
    )
    for size in args.sizes:
        for dtype in args.dtypes:
            for phase in phases(args, size, dtype):
                rate, bound = phase.flops / phase.seconds, phase.bound(peaks[dtype])
                print(
                    f"{size:<7}{dtype:<10}{phase.name:<9}{phase.seconds * 1e3:>9.1f}"
                    f"{phase.tokens / phase.seconds:>10.0f}{rate / 1e9:>9.1f}"
                    f"{rate / peaks[dtype].flops:>9.1%}{bound * 1e3:>10.1f}"
                    f"{bound / phase.seconds:>9.1%}"
                    + f"{phase.products * 1e3:>13.1f}{phase.products / phase.seconds:>10.1%}"
                    * bool(phase.products),
                    flush=True,
                )
    print_choices(args.sizes)


def print_choices(sizes: Iterable[str]) -> None:
    """Print which kernels run at the widths of these models, as this machine has measured them."""
    widths = {SIZES[size].hidden for size in sizes}
    print("\nkernel, rows and widths, threads: the times of both → what runs")
    for choice in known_choices():
        if choice.shape[1] in widths:
            print(f"  {choice}")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measured rates against the machine's, by phase; and how a step's time grows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=["1M", "10M"])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    names = ["products", "rollout", "update", "sft"]
    parser.add_argument("--phases", type=lambda text: text.split(","), default=names)
    parser.add_argument("--growth", action="store_true", help="how a step's time grows instead")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--mix", default="short", help="short or tail, of the update")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded of each completion")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    args.ours, args.trl = [], []
    return args


def phases(args: argparse.Namespace, size: str, dtype: str) -> Iterator[Phase]:
    """Those of `--phases` at one size, as they are measured."""
    if "rollout" in args.phases:
        yield from rollout_phases(args, SIZES[size], dtype)
    if "update" in args.phases:
        yield update_phase(args, size, dtype)
    if "sft" in args.phases:
        yield sft_phase(args, size, dtype)


def rollout_phases(args: argparse.Namespace, shape: Size, dtype: str) -> list[Phase]:
    """Prompts that differ, so that each is computed; then groups, from the second token on."""
    model = build_model(shape, character_tokenizer(shape.vocabulary), 79).to(DTYPES[dtype])
    rows, new = shape.prompts * args.n, args.new_tokens
    prompts = torch.randint(4, shape.vocabulary, (rows, PROMPT)).tolist()
    engine = create_engine(
        "native", model, max_num_seqs=512, max_model_len=PROMPT + new, kv_cache_memory_mb=256
    )

    def seconds(groups: list[list[int]], n: int, tokens: int) -> float:
        params = SamplingParams(n=n, max_new_tokens=tokens)
        return best(lambda: engine.generate(groups, params), args.repeats)

    try:
        prefill = seconds(prompts, 1, 1)
        groups = prompts[: shape.prompts]
        decode = seconds(groups, args.n, new) - seconds(groups, args.n, 1)
    finally:
        engine.close()
    weights, width = matrix_parameters(shape), DTYPES[dtype].itemsize
    tokens, decoded, context = rows * PROMPT, rows * (new - 1), PROMPT + new / 2
    cache = 2 * shape.layers * shape.kv_heads * shape.hidden // shape.heads * width  # of a token
    prefill_flops = (2 * weights + attention_flops(shape, PROMPT / 2)) * tokens
    decode_flops = (2 * weights + attention_flops(shape, context)) * decoded
    decode_bytes = (new - 1) * (weights * width + rows * context * cache)
    return [
        Phase("prefill", tokens, prefill, prefill_flops, weights * width),
        Phase("decode", decoded, decode, decode_flops, decode_bytes),
    ]


def update_phase(args: argparse.Namespace, size: str, dtype: str) -> Phase:
    """The actor's update in a GRPO step."""
    shape = SIZES[size]
    turns = run_ours(args, size, args.mix, [f"model.dtype={dtype}"])
    length = statistics.mean(turn["tokens"] / turn["completions"] for turn in turns)
    seconds = statistics.median(turn["actor.update_s"] for turn in turns)
    rows = shape.prompts * args.n
    tokens = shape.prompts * (PROMPT + args.n * (length - 1))
    flops = training_flops(shape, tokens, rows * length, (PROMPT + length) / 2)
    alone = product_seconds(shape, DTYPES[dtype], round(tokens), round(rows * length))
    return Phase("update", round(tokens), seconds, flops, adamw_bytes(shape), alone)


def sft_phase(args: argparse.Namespace, size: str, dtype: str) -> Phase:
    """A step of the warm start: rows of the default task."""
    shape = SIZES[size]
    args.ours = [f"model.dtype={dtype}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = write_sft_case(folder, size, STEPS[size], args.repeats + 1, args.threads)
        with contestant(args, "ours", case, folder, None) as one:
            turns = [one.turn() for _ in range(args.repeats + 1)][1:]
        tokenizer, (_, rows) = load_tokenizer(folder / "model"), read_case(folder)
        prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows], "bench")
    prompt = statistics.mean(map(len, prompts))
    response = statistics.mean(turn["tokens"] for turn in turns) / case.prompts / case.steps
    seconds = statistics.median(turn["seconds"] for turn in turns) / case.steps
    tokens = case.prompts * (prompt + response - 1)
    flops = training_flops(shape, tokens, case.prompts * response, (prompt + response) / 2)
    alone = product_seconds(shape, DTYPES[dtype], round(tokens), round(case.prompts * response))
    return Phase("sft", round(tokens), seconds, flops, adamw_bytes(shape), alone)


def training_flops(shape: Size, tokens: float, read: float, context: float) -> float:
    """Forward and backward of `tokens`, `read` of which predict a token."""
    head = shape.vocabulary * shape.hidden
    late = shape.hidden**2 + 3 * shape.hidden * shape.intermediate  # behind a layer's attention
    products = (matrix_parameters(shape) - head) * tokens - late * (tokens - read) + head * read
    return 3 * (2 * products + attention_flops(shape, context) * tokens)


def adamw_bytes(shape: Size) -> int:
    """It reads weights, gradients and two moments, and writes all but the gradients."""
    return 4 * 7 * matrix_parameters(shape)


def matrix_parameters(shape: Size) -> int:
    """Parameters of the layers' matrices and the head."""
    kv = shape.hidden // shape.heads * shape.kv_heads
    attention = 2 * shape.hidden * (shape.hidden + kv)
    mlp = 3 * shape.hidden * shape.intermediate
    return shape.layers * (attention + mlp) + shape.vocabulary * shape.hidden


def attention_flops(shape: Size, context: float) -> float:
    """Of one token that looks at `context` others: scores and their weighted sum."""
    return 4 * shape.layers * shape.hidden * context


def run_ours(
    args: argparse.Namespace, size: str, mix: str, settings: list[str], factor: float = 1
) -> list[dict[str, Any]]:
    """Timed turns of our side alone."""
    with tempfile.TemporaryDirectory() as name:
        folder, prompts = Path(name), max(1, round(SIZES[size].prompts * factor))
        case = write_grpo_case(folder, size, mix, args.n, args.repeats + 1, args.threads, prompts)
        args.ours = settings
        with contestant(args, "ours", case, folder, None) as one:
            return [one.turn() for _ in range(args.repeats + 1)][1:]


def growth(args: argparse.Namespace) -> None:
    """Print how the seconds of a step grow from a base case."""
    base = args.sizes[-1]
    smaller = list(SIZES)[max(0, list(SIZES).index(base) - 1)]
    cases: dict[str, tuple[str, str, list[str], float]] = {
        f"base: {base} short": (base, "short", [], 1),
        "half the prompts": (base, "short", [], 0.5),
        "twice the prompts": (base, "short", [], 2),
        "four times the prompts": (base, "short", [], 4),
        "long tail": (base, "tail", [], 1),
        f"{smaller} parameters": (smaller, "short", [], 1),
        "two ranks (fsdp=2)": (base, "short", ["actor.parallel.fsdp=2"], 1),
        "two ranks (dp=2)": (base, "short", ["actor.parallel.dp=2"], 1),
    }
    first = 0.0
    print(f"{'':<26}{'s/step':>8}{'rollout':>9}{'update':>8}{'× base':>8}{'tokens/s':>10}")
    for name, (size, mix, settings, factor) in cases.items():
        turns = run_ours(args, size, mix, settings, factor)
        seconds = statistics.median(turn["seconds"] for turn in turns)
        rollout = statistics.median(turn["rollout_s"] for turn in turns)
        update = statistics.median(turn["actor.update_s"] for turn in turns)
        rate = sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns)
        first = first or seconds
        print(
            f"{name:<26}{seconds:>8.2f}{rollout:>9.2f}{update:>8.2f}{seconds / first:>8.2f}"
            f"{rate:>10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
