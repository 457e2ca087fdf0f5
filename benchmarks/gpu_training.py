"""The pieces of `gpu_proof.py` that train: an update with its MFU, a step of ours and of TRL, 7B's
shape as one rank of eight, QLoRA in 24 GB, and the memory of each phase.

Model FLOPs are those of the algorithm (PaLM's, arXiv:2204.02311, appendix B): two a matrix
parameter and token in a forward pass, three times that with the backward pass, attention on top; of
the head only completions' tokens. "MFU" counts each completion with its prompt; "of the hardware"
what is computed: a shared prompt once, and the head's logits twice. Both over the data sheet's
rate. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from gpu_proof import Figure
from our_side import phases
from rollout import SHAPES, build_model
from roofline import attention_flops, matrix_parameters
from vs_trl_cases import CHARACTERS, Size, character_tokenizer, save, set_mean_length

from engine.batch import Batch
from engine.config import (
    ActorConfig,
    LoRAConfig,
    OptimConfig,
    ParallelConfig,
    RLConfig,
    RolloutConfig,
)
from engine.data.collate import collate_completions, collate_prompts
from engine.data.loader import PromptLoader
from engine.data.rows import rl_row
from engine.kernels import triton_kernels
from engine.models import add_adapters
from engine.models.forward import LogProbReader
from engine.models.fused import is_fused
from engine.models.quantize import quantize_linears
from engine.models.vocabulary_head import chunked_statistics
from engine.parallel import process_groups
from engine.parallel.layout import Layout, ModelShape
from engine.planner.memory import estimate
from engine.planner.resources import gpu
from engine.planner.sizes import Candidate, Workload, sizes
from engine.rollout.protocol import SamplingParams, create_engine
from engine.runtime.sharded_model import ShardedModel, process_device, sharded_optimizer
from engine.trainers.rl import RLTrainer
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext
from engine.workers.rollout_worker import RolloutWorker

STEPS = 2  # of GRPO; the first is not counted
NEAR = (0.7, 1.6)  # planner's estimate over what was measured
SMALL = 128 << 20  # bytes that it may be off in any case


def update(args: argparse.Namespace) -> Iterator[Figure]:
    """Updates of short rows and of one long row, with kernels and without."""
    size = args.sizes[-1]
    shape = size_of(size)
    trainer = Trained(build_model(size, "bfloat16", args.device, std=0.02), args.micro_tokens)
    short = Rows.short(8 if args.tiny else 16, 8, args)
    long = Rows(1, 1, args.prompt_length, [args.micro_tokens - args.prompt_length])
    for name, rows in (("short rows", short), ("a long row", long)):
        batch = rows.batch(shape.vocabulary)
        seconds, peak = timed(lambda batch=batch: trainer.update(batch))
        yield from mfu(f"{size} update, {name}", rows, shape, seconds)
        if rows is short:
            yield Figure(f"{size} update, {name}, peak memory", peak, "GiB")
            for part, share in shares(lambda b=batch: trainer.update(b), seconds).items():
                yield Figure(f"{size} update, share of {part}", 100 * share, "%")
            count = sum(rows.lengths)
            yield Figure(f"{size} update, its head alone", 1e3 * head(trainer.model, count), "ms")
            seconds, _ = timed(lambda batch=batch: trainer.log_probs(batch))
            yield Figure(f"{size} log-probs, {name}", seconds, "s")
    takes, triton_kernels.takes = triton_kernels.takes, lambda tensor: False
    for module in filter(is_fused, trainer.model.modules()):
        del module.__dict__["forward"]
    batch = short.batch(shape.vocabulary)
    seconds, peak = timed(lambda: trainer.update(batch))
    triton_kernels.takes = takes
    yield from mfu(f"{size} update without kernels", short, shape, seconds)
    yield Figure(f"{size} update without kernels, peak memory", peak, "GiB")


def step(args: argparse.Namespace) -> Iterator[Figure]:
    """A GRPO step of ours, then one of TRL's with transformers' generate, after one to warm up.

    32 prompts × 8; each token may be a completion's last, so that lengths have a tail.
    """
    size, prompts, n = args.sizes[-1], args.step_prompts, args.n
    folder = write_model(args.folder / "model", size, args)
    ours, tokens = run_ours(folder, prompts, n, args)
    for name, seconds in ours.items():
        yield Figure(f"{size} GRPO step of ours, {name}", seconds, unit(name))
    yield Figure(f"{size} GRPO step of ours, completion tokens", tokens, "")
    theirs, counted = run_trl(folder, prompts, n, args)
    trl = "TRL's first GRPO step" if args.trl_cold else "TRL's GRPO step"
    for name, seconds in theirs.items():
        yield Figure(f"{size} {trl}, {name}", seconds, unit(name))
    yield Figure(f"{size} {trl}, completion tokens", counted, "")
    ratio = (tokens / ours["all"]) / (counted / theirs["all"])
    yield Figure(f"{size} GRPO, our tokens/s over TRL's", ratio, "x", "> 1.5", ratio > 1.5)


def run_ours(
    folder: Path, prompts: int, n: int, args: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """Seconds of the last step by phase, GiB at its peak, and its completion tokens."""
    settings = {
        "actor": {
            "optim": {"lr": 1e-7, "warmup_ratio": 0.0},
            "use_kl_loss": False,
            "max_tokens_per_micro_batch": args.micro_tokens,
        },
        "rollout": {"n": n, "cuda_graphs": True},
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
        if step < total:
            reset_peak()

    rows = [rl_row("check", text, "0", {}) for text in texts(prompts * (STEPS + 1), args)]
    with RLTrainer(
        folder,
        RLConfig.model_validate(settings),
        PromptLoader(pd.DataFrame(rows), prompts, 0),
        max_response_length=args.longest,
        max_model_len=args.prompt_length + args.longest,
        dtype="bfloat16",
        on_step=finished,
    ) as trainer:
        trainer.fit()
        found = phases(trainer, STEPS)
        peak = peak_gib()
    seconds = [after - before for before, after in pairwise(at)][-1]
    named = {"all": seconds, "rollout": found.get("rollout_s", 0.0)}
    named |= {"update": found.get("actor.update_s", 0.0)}
    named |= {"log-probs": found.get("actor.log_probs_s", 0.0)}
    named["rest"] = seconds - sum(value for name, value in named.items() if name != "all")
    gc.collect()
    empty_cache()
    return named | {"peak memory": peak}, lengths[-1] * prompts * n


def run_trl(
    folder: Path, prompts: int, n: int, args: argparse.Namespace
) -> tuple[dict[str, float], float]:
    """As `run_ours`; TRL's mixed precision: float32 weights under autocast."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl_side import COMMON, TakeTurns, grpo_trainer

    measured: dict[str, Any] = {}
    at: list[float] = []

    class Turn:
        def wait(self) -> None:
            reset_peak()
            at.append(time.perf_counter())

        def done(self, found: dict[str, Any], save: object) -> None:
            synchronize()
            measured.update(found, seconds=time.perf_counter() - at[-1])

    steps = 1 if args.trl_cold else STEPS
    case = {
        "task": "grpo", "prompts": prompts, "n": n, "max_new_tokens": args.longest,
        "micro_batch": min(8, prompts * n), "turns": steps, "steps": 1,
    }  # fmt: skip
    settings = COMMON | {
        "output_dir": str(args.folder / "trl"), "bf16": args.device == "cuda",
        "learning_rate": 1e-7, "max_steps": steps, "seed": 0, "use_cpu": args.device == "cpu",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [
        {"prompt": [{"role": "user", "content": text}]}
        for text in texts(prompts * (steps + 1), args)
    ]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    trainer, counts = grpo_trainer(model, tokenizer, Dataset.from_list(rows), case, settings, {})
    turn: Any = Turn()
    trainer.add_callback(TakeTurns(turn, 1, counts, lambda: None))
    trainer.train()
    rollout, before = measured["rollout_s"], measured["before_update_s"]
    named = {
        "all": measured["seconds"],
        "rollout": rollout,
        "log-probs": before - rollout,
        "update": measured["seconds"] - before,
    }
    return named | {"peak memory": peak_gib()}, measured["tokens"]


def sharded(args: argparse.Namespace) -> Iterator[Figure]:
    """7B's shape as rank 0 of fsdp 8 on torch's fake process group: all but communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = args.sizes[0] if args.tiny else "7B"
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    process_groups._set_timeout = lambda group: None  # it has no deadline
    shape = size_of(size)
    layout = Layout(fsdp=8)
    ranks = process_groups.Ranks.form(layout, args.device)
    # The last one takes more than some devices have.
    modes = {True: ", checkpointing", "selective": ", selective checkpointing", False: ""}
    for mode, suffix in modes.items():
        parallel = {"fsdp": 8, "activation_checkpointing": mode, "packing": True}
        config = ParallelConfig.model_validate(parallel)
        model = build_model(size, "bfloat16", args.device, std=0.02)
        trainer = Trained(model, args.micro_tokens, ranks, config)
        trainer.sharded._packing_checked = True  # what is gathered is not weights
        del model
        gc.collect()
        empty_cache()
        rows = Rows.short(8 if args.tiny else 16, 8, args)
        batch = rows.batch(shape.vocabulary)
        seconds, peak = timed(lambda trainer=trainer, b=batch: trainer.update(b, clip=False))
        name = f"{size} as rank 0 of fsdp 8{suffix}"
        yield from mfu(name, rows, shape, seconds, again=mode is True)
        yield Figure(f"{name}, peak memory", peak, "GiB")
        del trainer
        gc.collect()
        empty_cache()


def qlora(args: argparse.Namespace) -> Iterator[Figure]:
    """7B in 4 bits with adapters, on what a card of 24 GB has: an update, and a rollout."""
    size = args.sizes[0] if args.tiny else "7B"
    if args.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 24e9 / total))
    model = build_model(size, "bfloat16", args.device, std=0.02)
    quantize_linears(model, "nf4")
    add_adapters(model, LoRAConfig(rank=16, alpha=32.0, quantize="nf4"), 0)
    gc.collect()
    empty_cache()
    reset_peak()
    config = ParallelConfig(activation_checkpointing=True)
    trainer = Trained(model, min(4096, args.micro_tokens), config=config)
    rows = Rows.short(1 if args.tiny else 2, 8, args)
    batch = rows.batch(size_of(size).vocabulary)
    seconds, peak = timed(lambda: trainer.update(batch))
    tokens = rows.prompts * rows.prompt + sum(rows.lengths)
    yield Figure(f"{size} QLoRA update in 24 GB", tokens / seconds, "tokens/s")
    yield Figure(f"{size} QLoRA update in 24 GB, peak memory", peak, "GiB")
    gc.collect()
    empty_cache()
    asked = SamplingParams(n=8, max_new_tokens=8 if args.tiny else 64)
    for lora, count in (("merged", 16), ("adapter", 16), ("adapter", 128)):
        engine = create_engine("native", model, max_num_seqs=count, max_model_len=512, lora=lora)
        prompts = [list(range(5, 5 + 64))] * (count // 8)
        engine.generate(prompts, asked)
        begin = time.perf_counter()
        done = engine.generate(prompts, asked)
        rate = sum(len(one.token_ids) for one in done) / (time.perf_counter() - begin)
        name = f"{size} QLoRA rollout in 24 GB, {count} rows, {lora}"
        yield Figure(name, rate, "tokens/s")
        yield Figure(f"{name}, peak memory", peak_gib(), "GiB")
        reset_peak()


def memory(args: argparse.Namespace) -> Iterator[Figure]:
    """Peak memory of loading, rollout and update beside the planner's estimate."""
    size, prompts = args.sizes[0], max(1, args.prompts // 4)
    folder = str(write_model(args.folder / "model", size, args, tail=False))
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
    config = ActorConfig(use_kl_loss=False, max_tokens_per_micro_batch=args.micro_tokens)
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
    shape = ModelShape.of(build_model(size, "bfloat16", "meta").config)
    work = Workload(
        shape,
        prompts,
        args.n,
        args.prompt_length,
        args.new_tokens,
        weight_bytes=2.0,
        compute_bytes=2.0,
    )
    expected = estimate(work, Candidate(Layout(), tokens=args.micro_tokens), gpu=True)
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


class Rows:
    """Completions of prompts of one length: `lengths` [prompts · n]."""

    def __init__(self, prompts: int, n: int, prompt: int, lengths: Sequence[int]) -> None:
        self.prompts, self.n, self.prompt, self.lengths = prompts, n, prompt, list(lengths)

    @classmethod
    def short(cls, prompts: int, n: int, args: argparse.Namespace) -> Rows:
        """Lengths with a tail: geometric of mean `args.mean_length`, cut at `args.longest`."""
        draw = random.Random(0)
        lengths = [
            min(args.longest, 1 + int(draw.expovariate(1 / args.mean_length)))
            for _ in range(prompts * n)
        ]
        return cls(prompts, n, args.prompt_length, lengths)

    def batch(self, vocabulary: int) -> Batch:
        """Random tokens, advantages and log-probs."""
        draw = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(4, vocabulary) for _ in range(count)]

        prompts = [tokens(self.prompt) for _ in range(self.prompts)]
        made = collate_completions(
            collate_prompts([{"prompt": str(row)} for row in range(self.prompts)], prompts),
            [row for row in range(self.prompts) for _ in range(self.n)],
            [tokens(length) for length in self.lengths],
            [[-12.0] * length for length in self.lengths],
            pad_token_id=0,
        )
        advantages = torch.randn(made["response_mask"].shape) * made["response_mask"]
        return made | {"advantages": advantages, "old_log_probs": made["rollout_log_probs"]}

    def flops(self, shape: Size, *, again: bool = False) -> tuple[float, float]:
        """Of an update by the algorithm, and as computed; `again`: layers' forward pass twice."""
        matrices = 2 * (matrix_parameters(shape) - shape.vocabulary * shape.hidden)
        head = 2 * shape.vocabulary * shape.hidden
        nominal = computed = 0.0
        passes = 4 if again else 3
        for length in self.lengths:
            whole = self.prompt + length
            scores = attention_flops(shape, 1.0) * whole * whole / 2
            nominal += 3 * (whole * matrices + scores + length * head)
            computed += passes * (length * matrices + scores) + 4 * length * head
        return nominal, computed + passes * self.prompts * self.prompt * matrices


class Trained:
    """A model on one rank (or one of many), its optimizer, and GRPO's update."""

    def __init__(
        self,
        model: Any,
        micro_tokens: int,
        ranks: process_groups.Ranks | None = None,
        config: ParallelConfig | None = None,
    ) -> None:
        ranks, config = ranks or process_groups.Ranks(Layout()), config or ParallelConfig()
        self.sharded = ShardedModel(model, ranks, config, device=process_device())
        self.model, self._micro_tokens = self.sharded.module, micro_tokens
        optim = OptimConfig(lr=1e-7, weight_decay=0.0, warmup_ratio=0.0)
        self.optimizer = sharded_optimizer(self.sharded, optim, 1000)

    def update(self, batch: Batch, *, clip: bool = True) -> None:
        """`clip=False`: of gradients that may not be finite, as on a fake group; they are 0."""
        passes = self.sharded.micro_batches(batch, self._micro_tokens)
        micros = self.sharded.pad_passes([micro for _, micro in passes], batch)
        total = float(batch["response_mask"].sum())

        reader = LogProbReader(1.0, entropy=True, statistics=self.sharded.statistics())
        for micro in micros:
            with self.sharded.forward(micro, reader) as outputs:
                ratio = (outputs["log_probs"] - micro["old_log_probs"]).clamp(-1, 1).exp()
                tokens = ratio * micro["advantages"] * micro["response_mask"]
                (-tokens.sum() / total).backward()
        self.sharded.all_reduce_gradients()
        if not clip:
            self.optimizer.zero_gradients()
        self.optimizer.step()

    def log_probs(self, batch: Batch) -> None:
        passes = self.sharded.micro_batches(batch, self._micro_tokens)
        reader = LogProbReader(1.0, statistics=self.sharded.statistics())
        self.sharded.outputs(batch, passes, reader)


def mfu(
    name: str, rows: Rows, shape: Size, seconds: float, *, again: bool = False
) -> Iterator[Figure]:
    """Seconds and tokens a second, and MFU where the data sheet of the device is known."""
    yield Figure(name, seconds, "s")
    tokens = sum(rows.lengths) + len(rows.lengths) * rows.prompt
    yield Figure(f"{name}, of completions with their prompts", tokens / seconds, "tokens/s")
    nominal, computed = rows.flops(shape, again=again)
    sheet = data_sheet_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else 0.0
    if sheet:
        share = 100 * nominal / seconds / sheet
        goal = 40.0 if "7B" in name else 35.0
        yield Figure(f"{name}, MFU", share, "%", f"> {goal:g} %", share > goal)
        yield Figure(f"{name}, of the hardware", 100 * computed / seconds / sheet, "%")


def shares(run: Callable[[], object], seconds: float) -> dict[str, float]:
    """Shares of the time `seconds` that kernels of each kind take; idle is the rest."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        synchronize()
    times: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[kernel_kind(event.name)] += event.device_time_total / 1e6 / seconds
    for name, count in Counter(
        {e.key: e.self_device_time_total for e in profiled.key_averages()}
    ).most_common(25):
        print(f"{count / 1e3:9.2f} ms  {name[:120]}")
    return dict(times) | {"idle": 1.0 - times.total()}


def kernel_kind(name: str) -> str:
    name = name.lower()
    kinds = {
        "attention": ("flash", "fmha", "sdpa", "attention"),
        "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk"),
        "optimizer": ("adam", "multi_tensor", "lpnorm"),
    }
    found = (kind for kind, words in kinds.items() if any(word in name for word in words))
    return next(found, "other kernels")


def head(model: Any, count: int) -> float:
    """Seconds of the head's forward and backward pass over `count` tokens."""
    weight = model.lm_head.weight
    states = torch.randn(count, weight.shape[1], dtype=weight.dtype, device=weight.device)
    targets = torch.randint(0, len(weight), (count,), device=weight.device)

    def run() -> None:
        hidden = states.detach().requires_grad_()
        out = chunked_statistics(model.lm_head, hidden, targets, 1.0, entropy=True)
        out["log_probs"].sum().backward()
        weight.grad = None

    return timed(run)[0]


def timed(run: Callable[[], object], repeats: int = 2) -> tuple[float, float]:
    """Median seconds after a run to warm up, and GiB at the peak of the timed ones."""
    run()
    synchronize()
    reset_peak()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), peak_gib()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def unit(name: str) -> str:
    return "GiB" if "memory" in name else "s"


def write_model(folder: Path, size: str, args: argparse.Namespace, *, tail: bool = True) -> Path:
    """A model of that shape in bfloat16 with a token a character; with `tail`, its completions are
    `args.mean_length` long in the mean, else mostly as long as they may be."""
    tokenizer = character_tokenizer(SHAPES[size][-1])
    # Layers that add next to nothing leave the end token its probability.
    model = build_model(size, "bfloat16", args.device, std=0.0005 if tail else 0.002)
    if tail:
        model.config.eos_token_id = tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        set_mean_length(model, tokenizer.eos_token_id, args.mean_length)
    save(model, tokenizer, folder)
    del model
    gc.collect()
    empty_cache()
    return folder


def texts(count: int, args: argparse.Namespace) -> list[str]:
    """Prompts of `args.prompt_length` tokens, with the template's three."""
    draw = random.Random(0)
    return ["".join(draw.choices(CHARACTERS, k=args.prompt_length - 3)) for _ in range(count)]


def size_of(size: str) -> Size:
    return Size("qwen2", *SHAPES[size], prompts=0)


def data_sheet_flops(name: str) -> float:
    """Of a device by its CUDA name, such as "NVIDIA H100 80GB HBM3"; 0 where it isn't listed."""
    found = (gpu(word) for word in re.split(r"[ -]", name))
    return next((device.flops for device in found if device.name != "GPU"), 0.0)
