"""What sending the changes of the weights costs and saves, beside sending the weights whole.

`python benchmarks/delta_sync.py --help`. A policy with float32 weights takes real update steps (the
actor's, with Adam, on random completions). After each, its weights go to a copy of the policy
twice, by the product's own sender and receiver: whole, as without trainer.delta_sync, and as a
delta.
Bytes are what crosses the network to each rollout process; times are of the work at both ends, in
this process, the network left out (`--clock cpu`: of all threads together, for a machine that does
other work too). `pays below` is the speed of a link, to all rollout processes
together, where the bytes saved take as long as the work added. The copy ends bit-equal, or the
benchmark fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rollout import SIZES, build_model
from transformers.utils import logging as transformers_logging

from engine import weight_transfer
from engine.batch import Batch
from engine.config import ActorConfig
from engine.console import command_line
from engine.data.collate import collate_completions
from engine.models import load_model
from engine.weight_transfer import WeightReceiver, WeightSender
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

DTYPES = ("float32", "bfloat16")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@command_line()
def main() -> None:
    args = parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    print(
        f"{args.threads} thread(s), {args.clock} time; medians of {args.steps} steps after "
        f"{args.warm}\n"
        f"{'model':<6}{'lr':>7} {'rollout':<9}{'changed':>8}{'whole MB':>10}{'delta MB':>10}"
        f"{'bytes':>8}{'send ms':>9}{'+delta':>9}{'load ms':>9}{'delta':>9}{'work':>7}"
        f"{'pays below':>13}"
    )
    rows = []
    for size in args.sizes:
        for lr in args.lrs:
            for row in measure(args, size, lr):
                rows.append(row)
                print(line(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"case": vars(args), "results": rows}, indent=2))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Bytes and time of a delta of the weights against the whole, after real steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-6, 1e-5])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--warm", type=int, default=2, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--rows", type=int, default=32, help="completions a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", default="", help="file for the figures")
    return parser.parse_args()


def line(row: dict[str, Any]) -> str:
    pays = row["pays_below_gbit_s"]
    return (
        f"{row['size']:<6}{row['lr']:>7.0e} {row['dtype']:<9}{row['changed']:>8.2%}"
        f"{row['whole_mb']:>10.2f}{row['delta_mb']:>10.3f}{row['bytes_ratio']:>8.3f}"
        f"{row['send_ms']:>9.1f}{row['send_delta_ms']:>9.1f}{row['load_ms']:>9.1f}"
        f"{row['load_delta_ms']:>9.1f}{row['work_ratio']:>6.1f}x"
        + (f"{pays:>8.1f} Gb/s" if pays is not None else f"{'any link':>13}")
    )


def measure(args: argparse.Namespace, size: str, lr: float) -> list[dict[str, Any]]:
    """Train once; after each step send to a copy of each dtype, both ways."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(size, std=0.02).save_pretrained(folder)
        actor = ActorWorker(
            WorkerContext("actor"),
            model_path=folder,
            config=ActorConfig.model_validate(
                {"use_kl_loss": False, "optim": {"lr": lr, "weight_decay": 0.0, "warmup_ratio": 0}}
            ),
            temperature=1.0,
            total_steps=10_000,  # the rate stays what it is
            seed=0,
        )
        copies = {dtype: Copy(folder, dtype, args.clock) for dtype in args.dtypes}
    for step in range(args.warm + args.steps):
        actor.update(completions(args.rows, SIZES[size][-1], step))
        for copy in copies.values():
            copy.follow(actor, measured=step >= args.warm)
    return [{"size": size, "lr": lr, **copy.figures()} for copy in copies.values()]


class Copy:
    """A rollout process's policy, twice: brought up to date whole, and by deltas."""

    def __init__(self, folder: str, dtype: str, clock: str) -> None:
        self.dtype, self.clock, cast = dtype, CLOCKS[clock], getattr(torch, dtype)
        self.models = [load_model(folder, dtype) for _ in range(2)]
        self.senders = [WeightSender(cast), WeightSender(cast, deltas=True)]
        self.receivers = [WeightReceiver(), WeightReceiver()]
        self.figured: list[dict[str, float]] = []

    def follow(self, actor: ActorWorker, measured: bool) -> None:
        """Bring both up to date; the first time both get the whole."""
        whole, by_delta = (dict(model.named_parameters()) for model in self.models)
        before = torch.cat(
            [weight_transfer.integer_view(p.detach()).clone() for p in by_delta.values()]
        )
        send_s, sent = self.timed(lambda: actor.policy.pack_weights(self.senders[0]))
        load_s, _ = self.timed(lambda: self.receivers[0].load(whole, sent))

        def both() -> tuple[Batch, Batch]:
            return actor.policy.pack_weights(self.senders[1]), self.senders[1].delta()

        send_delta_s, (first, changes) = self.timed(both)
        load_delta_s, _ = self.timed(
            lambda: self.receivers[1].load(by_delta, changes if "delta" in changes else first)
        )
        after = torch.cat([weight_transfer.integer_view(p.detach()) for p in by_delta.values()])
        wanted = torch.cat([weight_transfer.integer_view(p.detach()) for p in whole.values()])
        assert torch.equal(after, wanted), "the delta brought other weights than the whole"
        if measured:
            self.figured.append(
                {
                    "changed": float((before != after).double().mean()),
                    "whole_mb": nbytes(sent) / 1e6,
                    "delta_mb": nbytes(changes) / 1e6,
                    "send_ms": send_s * 1e3,
                    "send_delta_ms": send_delta_s * 1e3,
                    "load_ms": load_s * 1e3,
                    "load_delta_ms": load_delta_s * 1e3,
                }
            )

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        gc.collect()
        start = self.clock()
        result = call()
        return self.clock() - start, result

    def figures(self) -> dict[str, Any]:
        """Medians, and what they say."""
        found: dict[str, Any] = {
            name: statistics.median(step[name] for step in self.figured) for name in self.figured[0]
        }
        work = found["send_ms"] + found["load_ms"]
        work_delta = found["send_delta_ms"] + found["load_delta_ms"]
        saved = found["whole_mb"] - found["delta_mb"]
        return {
            "dtype": self.dtype,
            **found,
            "bytes_ratio": found["delta_mb"] / found["whole_mb"],
            "work_ratio": work_delta / work,
            # Megabytes a millisecond are gigabytes a second.
            "pays_below_gbit_s": 8 * saved / (work_delta - work) if work_delta > work else None,
        }


def nbytes(sent: Batch) -> int:
    return sum(tensor.nbytes for tensor in sent.as_dict().values())


def completions(rows: int, vocabulary: int, seed: int) -> Batch:
    """Random prompts and completions with advantages, as an update gets them."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=draw).tolist()

    source = Batch({"group_ids": torch.arange(rows)}, {"prompt_ids": [tokens(16)] * rows})
    likely = [[-float(torch.tensor(vocabulary).log())] * 32] * rows  # near-uniform samples
    batch = collate_completions(
        source, range(rows), [tokens(32) for _ in range(rows)], likely, pad_token_id=0
    )
    mask = batch["response_mask"]
    return batch | {
        "advantages": torch.randn(rows, 1, generator=draw) * mask,
        "old_log_probs": batch["rollout_log_probs"],
    }


if __name__ == "__main__":
    sys.exit(main())
