"""Rollout speed: our engines beside transformers.generate, on one model, prompts and length mix.

`python benchmarks/rollout.py --help`; without options, the smallest model. `--all` runs every size
in float32 and bfloat16 on the long-tailed mix and ends with one table of ratios. The model is
Qwen2-shaped with random weights. Lengths are either fixed or long-tailed: stop tokens with a total
probability of 1/mean, cut at the limit. The contestants take turns within a repeat, so that a busy
machine slows all of them alike; the best repeat of each counts. A token is useful if it is part of
a completion: what is decoded after an end token, as static batches do, costs time and earns
nothing. Larger models get fewer prompts, and repeats end when `--limit-s` is over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from engine.console import command_line
from engine.rollout.protocol import SamplingParams, create_engine

# name: (hidden, intermediate, layers, heads, key heads, vocabulary)
SIZES = {
    "1M": (128, 384, 4, 4, 2, 512),
    "10M": (320, 960, 8, 10, 2, 4096),
    "100M": (768, 2304, 12, 12, 4, 16384),
    "135M": (576, 1536, 30, 9, 3, 49152),  # SmolLM2's
}
LARGE = {  # for a GPU: Qwen2.5's
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
}
SHAPES = SIZES | LARGE
DTYPES = ("float32", "bfloat16")
# About equally long for transformers.generate.
PROMPTS = {"1M": 64, "10M": 16, "100M": 4, "135M": 4}
Rollout = Callable[[int], int]  # seed → useful tokens


@command_line()
def main() -> None:
    args = parse_args()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    cases = every_case(args) if args.all else [args]
    table = []
    for case in cases:
        results = run(case)
        table.append({"case": vars(case), "results": results})
        report(case, results)
    if args.all:
        summary(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(table if args.all else table[0], file, indent=2)


def every_case(args: argparse.Namespace) -> list[argparse.Namespace]:
    """All sizes and dtypes on the long-tailed mix, an equal share of the time for each."""
    cases = []
    for size in args.sizes:
        for dtype in DTYPES:
            limit = args.limit_s / len(args.sizes) / len(DTYPES)
            changes = {"size": size, "dtype": dtype, "mix": "tail", "limit_s": limit}
            cases.append(argparse.Namespace(**(vars(args) | changes)))
    return cases


def run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One case: the engines' rates by name."""
    model, prompts, params = make_case(args)
    contestants: dict[str, Rollout] = {}
    engines = []
    try:
        for name in args.engines:
            if name == "transformers":
                contestants[name] = with_transformers(model, prompts, params, args.max_num_seqs)
                continue
            engine = create_engine(
                name.removesuffix("-graphs"),
                model,
                max_num_seqs=args.max_num_seqs,
                max_model_len=args.prompt_length * 2 + args.max_new_tokens,
                kv_cache_memory_mb=args.kv_cache_memory_mb,
                **({"cuda_graphs": True} if name.endswith("-graphs") else {}),
            )
            engines.append(engine)
            contestants[name] = with_engine(engine, prompts, params)
        return compete(contestants, args.repeats, args.limit_s)
    finally:
        for engine in engines:
            engine.close()


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokens per second of the rollout engines against transformers.generate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="every size, both dtypes, tail mix")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of --all")
    parser.add_argument("--size", choices=SHAPES, default="1M", help="model size")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--mix", choices=["tail", "fixed"], default="tail", help="length mix")
    parser.add_argument("--mean-length", type=int, default=20, help="mean length of a long tail")
    parser.add_argument("--prompts", type=int, default=0, help="0: 64, 16 or 4, by the size")
    parser.add_argument("--n", type=int, default=8, help="completions a prompt")
    parser.add_argument("--prompt-length", type=int, default=30, help="mean length, in tokens")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=512, help="rows decoded at once")
    parser.add_argument("--kv-cache-memory-mb", type=int, default=512, help="vLLM's KV cache")
    parser.add_argument("--device", default="cpu", help="cuda: large sizes, and native-graphs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats, after one untimed")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="no repeat but the first starts after this"
    )
    parser.add_argument("--json", default="", help="also write the figures to this file")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["native", "vllm", "transformers"],
        help="who takes part; native-graphs: with CUDA graphs",
    )
    return parser.parse_args(arguments)


def build_model(
    size: str, dtype: str = "float32", device: str = "cpu", std: float = 0.002
) -> Qwen2ForCausalLM:
    """A Qwen2-shaped model with random weights of standard deviation `std`.

    The default makes samples near-uniform, so that the stop tokens set the mean length; a
    pretrained model's is 0.02.
    """
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[size]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=size != "7B",
        initializer_range=std,
    )
    default = torch.get_default_dtype()
    try:
        if device == "cuda":  # where float32 weights may not fit
            torch.set_default_dtype(getattr(torch, dtype))
        with torch.device(device):  # filled there
            return Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval()
    finally:
        torch.set_default_dtype(default)


def make_case(
    args: argparse.Namespace,
) -> tuple[Qwen2ForCausalLM, list[list[int]], SamplingParams]:
    """Return the model, the prompts and how to sample."""
    model = build_model(args.size, args.dtype, args.device)
    vocabulary = SHAPES[args.size][-1]
    stops = round(vocabulary / args.mean_length) if args.mix == "tail" else 0
    low, high = args.prompt_length - args.prompt_length // 3, args.prompt_length * 4 // 3
    args.prompts = args.prompts or PROMPTS.get(args.size, 64)
    lengths = torch.randint(low, high + 1, (args.prompts,)).tolist()
    prompts = [torch.randint(stops, vocabulary, (length,)).tolist() for length in lengths]
    params = SamplingParams(
        n=args.n, max_new_tokens=args.max_new_tokens, stop_token_ids=tuple(range(stops))
    )
    return model, prompts, params


def with_engine(engine: Any, prompts: list[list[int]], params: SamplingParams) -> Rollout:
    def rollout(seed: int) -> int:
        seeded = SamplingParams(
            n=params.n,
            max_new_tokens=params.max_new_tokens,
            stop_token_ids=params.stop_token_ids,
            seed=seed,
        )
        return sum(len(c.token_ids) for c in engine.generate(prompts, seeded))

    return rollout


def with_transformers(
    model: Qwen2ForCausalLM, prompts: list[list[int]], params: SamplingParams, slots: int
) -> Rollout:
    """Static batches of `slots` rows, padded on the left."""
    stops = list(params.stop_token_ids) or None
    step = max(1, slots // params.n)

    def rollout(seed: int) -> int:
        torch.manual_seed(seed)
        useful = 0
        for start in range(0, len(prompts), step):
            batch = prompts[start : start + step]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in batch], device=model.device
            )
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                num_return_sequences=params.n,
                max_new_tokens=params.max_new_tokens,
                eos_token_id=stops,
                pad_token_id=0,
            )[:, width:]
            if stops is None:
                useful += output.numel()
                continue
            stopped = torch.isin(output, torch.tensor(stops, device=model.device)).long()
            useful += int(((stopped.cumsum(1) - stopped) == 0).sum())
        return useful

    return rollout


def compete(
    contestants: dict[str, Rollout], repeats: int, limit_s: float
) -> dict[str, dict[str, float]]:
    """Return the best wall-clock and CPU-time rates of each, in useful tokens a second."""
    best = {name: {"wall": 0.0, "cpu": 0.0, "tokens": 0.0} for name in contestants}
    started = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 1 and time.perf_counter() - started > limit_s:
            break
        for name, rollout in contestants.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = rollout(repeat)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if repeat:
                figures = best[name]
                figures["wall"] = max(figures["wall"], tokens / wall)
                figures["cpu"] = max(figures["cpu"], tokens / cpu)
                figures["tokens"] = tokens
    return best


def report(args: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    """Print one case."""
    print(
        f"Qwen2 shape, {args.size} parameters, {args.dtype}, {args.threads} thread(s); "
        f"{args.prompts} prompts × {args.n}, {args.mix} lengths up to {args.max_new_tokens}"
    )
    print(f"{'engine':<14}{'tokens':>9}{'tokens/s':>11}{'tokens/CPU s':>14}{'ratio':>8}")
    for name, figures in results.items():
        print(
            f"{name:<14}{figures['tokens']:>9.0f}{figures['wall']:>11.0f}"
            f"{figures['cpu']:>14.0f}{ratio(results, name):>7.2f}x",
            flush=True,
        )


def summary(table: list[dict[str, Any]]) -> None:
    """Print all cases side by side: tokens a CPU second, and the ratio to transformers' rate."""
    names = list(table[0]["results"])
    print("\nUseful tokens per CPU second, long-tailed lengths (ratio to transformers.generate)")
    print(f"{'model':<16}" + "".join(f"{name:>22}" for name in names))
    for entry in table:
        case, results = entry["case"], entry["results"]
        cells = (f"{results[n]['cpu']:.0f} ({ratio(results, n):.2f}x)" for n in names)
        print(f"{case['size'] + ' ' + case['dtype']:<16}" + "".join(f"{c:>22}" for c in cells))


def ratio(results: dict[str, dict[str, float]], name: str) -> float:
    """How many times faster `name` is than transformers, or than the first if it is not there."""
    base = results.get("transformers", next(iter(results.values())))
    return results[name]["cpu"] / base["cpu"]


if __name__ == "__main__":
    sys.exit(main())
