"""How near a smaller student comes to the model that RL made, by on-policy distillation.

    python benchmarks/distillation.py --teacher outputs/artifacts/rl/DIGEST --seeds 0,1

The student starts from the teacher's first two of three layers (`--layers`; empty: from scratch, of
the shape `--model`), with a short warm start on the default task's solutions, and then learns by
`algorithm.dataflow=distillation` on its training prompts. Its greedy pass@1 on the 512 held-out
problems is compared with the teacher's, on the same problems. Seeds are the student's: of batches
and samples, and of weights from scratch; data are the teacher's, of seed `--data-seed`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from our_side import nested
from pass_at_1 import DEFAULTS, Clock, gain, rate, reinforce, right, solutions
from transformers.utils import logging as transformers_logging
from vs_trl import machine

from engine.config import ModelConfig, RLConfig, SFTConfig
from engine.config.text import deep_update
from engine.console import command_line, quiet
from engine.data.sources import Splits, load_splits
from engine.data.tokenizer import load_tokenizer
from engine.models import build_model, load_model, save_model
from engine.models.small_models import keep_layers
from engine.trainers.offline import SFTTrainer

MODEL = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 2}
RL = {
    "algorithm": {"dataflow": "distillation", "distillation": {"loss": "forward_kl"}},
    "actor": {
        "use_kl_loss": False,
        "optim": {"lr": 1e-3, "schedule": "cosine"},
        "ppo_mini_batch_size": 128,
    },
    "rollout": {"n": 4},
    "trainer": {"train_batch_size": 256, "total_training_steps": 60},
}


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(machine(args.threads), flush=True)
    splits = load_splits(DEFAULTS.data, args.data_seed)
    teacher = Path(args.teacher)
    wanted = right(teacher, teacher, splits.test)
    print(f"teacher: {parameters(teacher)} parameters, greedy pass@1 {rate(wanted)}", flush=True)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as place:
            begin = Clock.start()
            start = warm_start(args, seed, splits, teacher, Path(place) / "start")
            before = right(start, start, splits.test)
            size = f"{parameters(start)} parameters"
            print(f"seed {seed}: student: {size}, warm start {rate(before)}; {begin}", flush=True)
            begin = Clock.start()
            distil(args, seed, splits, teacher, start, Path(place) / "student")
            after = right(Path(place) / "student", start, splits.test)
            print(
                f"seed {seed}: distilled: {rate(after)}; over the teacher {gain(wanted, after)}; "
                f"{begin}",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A smaller student of the model that RL made.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--teacher", required=True, metavar="FOLDER", help="the RL stage's artifact")
    add("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    add("--data-seed", type=int, default=0, help="of the run that made the teacher")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add(
        "--layers",
        type=lambda text: list(map(int, filter(None, text.split(",")))),
        default=[0, 1],
        help="of the teacher, that the student starts from; empty: a student from scratch",
    )
    add("--epochs", type=float, default=0.5, help="of the student's warm start; 0: none")
    add("--model", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the student")
    add("--rl", nargs="*", default=[], metavar="KEY=VALUE", help="settings of distillation")
    return parser.parse_args()


def warm_start(
    args: argparse.Namespace, seed: int, splits: Splits, teacher: Path, folder: Path
) -> Path:
    """A student that has seen the task's solutions."""
    tokenizer = load_tokenizer(teacher)
    if args.layers:
        model = keep_layers(load_model(teacher), args.layers)
    else:
        student = ModelConfig.model_validate(deep_update(MODEL, nested(args.model)))
        model = build_model(student, tokenizer, seed)
    if not args.epochs:
        return save_model(model, tokenizer, folder)
    values = DEFAULTS.sft.model_dump() | {"epochs": args.epochs, "threads": args.threads}
    config = SFTConfig.model_validate(values)
    SFTTrainer(model, tokenizer.pad_token_id or 0, config, seed=seed).fit(
        solutions(tokenizer, splits), []
    )
    return save_model(model, tokenizer, folder)


def distil(
    args: argparse.Namespace, seed: int, splits: Splits, teacher: Path, start: Path, out: Path
) -> None:
    """Move the student towards the teacher on what it samples; write it to `out`."""
    values = deep_update(DEFAULTS.rl.model_dump(), {"trainer": {"threads": args.threads}})
    values = deep_update(deep_update(values, RL), {"algorithm": {"teacher": str(teacher)}})
    config = RLConfig.model_validate(deep_update(values, nested(args.rl)))

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % 10 == 0:
            print(f"    step {step} of {total}: right {metrics['reward/correct']:.3f}", flush=True)

    reinforce(start, out, config, splits, seed, finished)


def parameters(folder: Path) -> int:
    """How many numbers a model has."""
    return sum(tensor.numel() for tensor in load_model(folder, "float32").parameters())


if __name__ == "__main__":
    sys.exit(main())
