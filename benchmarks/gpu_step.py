"""The pieces of `gpu_check.py` that train: a GRPO step with its MFU, and the memory of each phase.

Model FLOPs are those of the algorithm (PaLM's, arXiv:2204.02311, appendix B): two a matrix
parameter and token in a forward pass, three times that with the backward pass, attention on top; of
the head only completions' tokens. MFU is their rate over the data sheet's, and beside it over the
rate of a large matrix product here.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gpu_report import Figure
from our_side import phases
from rollout import SHAPES, build_model
from roofline import attention_flops, matrix_parameters
from vs_trl_cases import CHARACTERS, Size, character_tokenizer, save

from engine.config import ActorConfig, RLConfig, RolloutConfig
from engine.data.collate import collate_prompts
from engine.data.loader import PromptLoader
from engine.data.rows import rl_row
from engine.parallel.layout import Layout, ModelShape
from engine.planner.memory import estimate
from engine.planner.resources import gpu
from engine.planner.sizes import Candidate, Workload, sizes
from engine.trainers.rl import RLTrainer
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext
from engine.workers.rollout_worker import RolloutWorker

MICRO_TOKENS = 16384
STEPS = 3  # the first is not counted
NEAR = (0.7, 1.6)  # planner's estimate over what was measured
SMALL = 128 << 20  # bytes that it may be off in any case


def step(args: argparse.Namespace) -> Iterator[Figure]:
    """GRPO steps with the native engine on one device."""
    size, prompts = args.sizes[0], max(1, args.prompts // 4)
    model = write_model(args.folder / "model", size)
    settings = {
        "actor": {
            "optim": {"lr": 1e-7},
            "use_kl_loss": False,
            "max_tokens_per_micro_batch": MICRO_TOKENS,
        },
        "rollout": {"n": args.n},
        "reward": {"name": "even_reward:even", "isolation": "none"},
        "trainer": {
            "total_training_steps": STEPS,
            "train_batch_size": prompts,
            "timeline_steps": STEPS,
            "placement": "local",
        },
    }
    at, lengths = [time.perf_counter()], list[float]()

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        at.append(time.perf_counter())
        lengths.append(metrics["response/length_mean"])

    rows = [rl_row("check", text, "0", {}) for text in texts(prompts * (STEPS + 1), args)]
    with RLTrainer(
        model,
        RLConfig.model_validate(settings),
        PromptLoader(pd.DataFrame(rows), prompts, 0),
        max_response_length=args.new_tokens,
        max_model_len=args.prompt_length + args.new_tokens,
        dtype="bfloat16",
        on_step=finished,
    ) as trainer:
        trainer.fit()
        times = [phases(trainer, number) for number in range(2, STEPS + 1)]
    seconds = statistics.median(after - before for before, after in pairwise(at[1:]))
    response = statistics.mean(lengths[1:])
    completions = prompts * args.n
    yield Figure(f"{size} GRPO step, {prompts} × {args.n} × {response:.0f} tokens", seconds, "s")
    for name in ("rollout_s", "actor.update_s"):
        taken = statistics.median(one.get(name, 0.0) for one in times)
        yield Figure(f"{size} step, {name.removesuffix('_s')}", taken, "s")
    tokens = completions * (args.prompt_length + response)
    yield Figure(f"{size} step", tokens / seconds, "tokens/s")
    shape = size_of(size)
    flops = 3 * forward_flops(shape, completions, args.prompt_length, response)
    rate = flops / statistics.median(one["actor.update_s"] for one in times)
    yield Figure(f"{size} update", rate / 1e12, "Tflop/s")
    sheet = data_sheet_flops(torch.cuda.get_device_name())
    if sheet:
        yield Figure(f"{size} update, MFU", 100 * rate / sheet, "%")
    yield Figure(f"{size} update, of a matrix product's rate", 100 * rate / gemm_flops(), "%")


def memory(args: argparse.Namespace) -> Iterator[Figure]:
    """Peak memory of loading, rollout and update beside the planner's estimate."""
    size, prompts = args.sizes[0], max(1, args.prompts // 4)
    folder = str(write_model(args.folder / "model", size))
    length = args.prompt_length + args.new_tokens
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    peaks = dict[str, float]()

    def peak(phase: str) -> None:
        torch.cuda.synchronize()
        peaks[phase] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    context, common = WorkerContext("actor"), {"model_path": folder, "seed": 0, "dtype": "bfloat16"}
    config = ActorConfig(use_kl_loss=False, max_tokens_per_micro_batch=MICRO_TOKENS)
    actor = ActorWorker(context, config=config, temperature=1.0, total_steps=4, **common)
    peak("loading")
    rollout = RolloutWorker(
        WorkerContext("rollout", process=context.process),
        config=RolloutConfig(n=args.n),
        max_response_length=args.new_tokens,
        max_model_len=length,
        **common,
    )
    lines = texts(prompts, args)
    tokens = [[5 + ord(letter) % 64 for letter in line] for line in lines]
    batch = rollout.generate(collate_prompts([{"prompt": line} for line in lines], tokens))
    advantages = torch.randn_like(batch["response_mask"]) * batch["response_mask"]
    batch |= {"advantages": advantages, "old_log_probs": batch["rollout_log_probs"]}
    actor.update(batch)  # makes the moments
    torch.cuda.reset_peak_memory_stats()
    actor.update(batch)
    peak("training")
    rollout.generate(collate_prompts([{"prompt": line} for line in lines], tokens))
    peak("rollout")
    rollout.close()
    actor.close()
    shape = ModelShape.of(build_config(size))
    work = Workload(
        shape,
        prompts,
        args.n,
        args.prompt_length,
        args.new_tokens,
        weight_bytes=2.0,
        compute_bytes=2.0,
    )
    expected = estimate(work, Candidate(Layout(), tokens=MICRO_TOKENS), gpu=True)
    masters = 4.0 * sizes(shape).total  # float32, which an actor makes after it has loaded
    planned = {
        "loading": expected.loading + masters,
        "training": expected.training,
        "rollout": expected.sampling,
    }
    low, high = NEAR
    for phase, measured in peaks.items():
        share = planned[phase] / measured
        yield Figure(f"{size} {phase}, peak", measured / 2**30, "GiB")
        limit = f"{low} to {high}, or {SMALL >> 20} MiB off"
        near = low <= share <= high or abs(planned[phase] - measured) < SMALL
        yield Figure(f"{size} {phase}, planned over peak", share, "x", limit, near)


def write_model(folder: Path, size: str) -> Path:
    """A model of that shape in bfloat16 with a token a character, whose texts have odd lengths."""
    save(build_model(size, "bfloat16", "cuda"), character_tokenizer(SHAPES[size][-1]), folder)
    gc.collect()
    torch.cuda.empty_cache()
    return folder


def texts(count: int, args: argparse.Namespace) -> list[str]:
    """Prompts of `args.prompt_length` tokens, with the template's three."""
    draw = random.Random(0)
    return ["".join(draw.choices(CHARACTERS, k=args.prompt_length - 3)) for _ in range(count)]


def build_config(size: str) -> Any:
    """The model's configuration, without its weights."""
    return build_model(size, "bfloat16", "meta").config


def size_of(size: str) -> Size:
    return Size("qwen2", *SHAPES[size], prompts=0)


def forward_flops(shape: Size, completions: int, prompt: float, response: float) -> float:
    """Of a forward pass over completions, each with its prompt."""
    length = prompt + response
    head = shape.vocabulary * shape.hidden
    layers = 2 * (matrix_parameters(shape) - head) + attention_flops(shape, length / 2)
    return completions * (length * layers + response * 2 * head)


def data_sheet_flops(name: str) -> float:
    """Of a device by its CUDA name, such as "NVIDIA H100 80GB HBM3"; 0 where it isn't listed."""
    found = (gpu(word) for word in re.split(r"[ -]", name))
    return next((device.flops for device in found if device.name != "GPU"), 0.0)


def gemm_flops() -> float:
    """A second, of the product of two bfloat16 matrices.

    They are 4096 wide, and narrower where that would take long, as without hardware for bfloat16.
    """
    side = 512
    while True:
        a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            a @ b
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        if side == 4096 or min(times) > 0.1:
            return 2 * side**3 / min(times)
        side *= 2
