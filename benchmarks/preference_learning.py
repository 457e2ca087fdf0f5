"""What preference learning learns on the default task, with intervals and seconds.

    python benchmarks/preference_learning.py                  # reward model, DPO, KTO, PPO
    python benchmarks/preference_learning.py --tasks dpo --seeds 0,1,2
    python benchmarks/preference_learning.py --tasks reward --policy outputs/artifacts/rl/DIGEST

The settings are those of `pyflyte run workflows/preference.py`: `preference` for `dpo` and `kto`,
`classic_rlhf` for `reward` and `ppo`. All begin at the warm start that the default task's SFT stage
makes (kept in the cache folder). Its own completions of the training prompts, ranked by the task's
rule, make the pairs and the labels. The warm start and these completions have their seconds apart;
CPU seconds are those of all threads of this process.

- `reward`: a reward model learns from pairs, and ranks pairs of held-out prompts; by whether both
  answers show their steps. With `--policy` that one writes them, and it starts from that one.
- `dpo`, `kto`: greedy pass@1 on the 512 held-out problems, and the gain over the warm start.
- `ppo`: PPO with that reward model as its only reward; whether the rule's pass@1 rises.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from our_side import nested
from pass_at_1 import DEFAULTS, LONGEST, Clock, gain, load, rate, reinforce, right
from time_to_accuracy import warm_start
from transformers.utils import logging as transformers_logging
from vs_trl import machine

from engine.config import (
    PairsConfig,
    PipelineConfig,
    PreferenceTrainingConfig,
    RewardConfig,
    RewardModelTrainingConfig,
    RLConfig,
    load_config,
)
from engine.config.base import Section
from engine.config.text import deep_update
from engine.console import command_line, quiet
from engine.data.preference_rows import Kind
from engine.data.sources import Splits, load_splits
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import read_preferences, read_reward_pairs
from engine.evaluation.policy_steps import MODEL_REWARD
from engine.preferences import by_reward_model, rank_rollouts
from engine.trainers.preference_learning import (
    LikelihoodRewardTrainer,
    PreferenceTrainer,
    RewardModelTrainer,
)

TASKS = ("reward", "dpo", "kto", "ppo")
SECTIONS = (*TASKS, "pairs")  # which the command line sets
CLASSIC = "preset:classic_rlhf"
WORKED = "<<"  # is in answers that show their steps
ROWS = {"reward": "reward", "dpo": "pairs", "kto": "labels", "ppo": "reward"}  # what a task reads


@dataclass(frozen=True, slots=True)
class Bench:
    """What the tasks of a seed share."""

    seed: int
    threads: int
    start: Path  # the warm start
    policy: Path  # writes the reward model's pairs, which starts from it
    splits: Splits
    folder: Path  # of this run's files
    classic: PipelineConfig  # of the workflow classic_rlhf
    tasks: tuple[str, ...]
    prompts: int  # that are completed, at most, of training and of held-out ones
    settings: dict[str, dict[str, Any]]  # by section, those of the command line
    before: np.ndarray  # [512] whether the warm start's greedy answers are right


@command_line()
def main() -> None:
    args = parse_args()
    quiet()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(machine(args.threads), flush=True)
    settings = {name: nested(getattr(args, name)) for name in SECTIONS}
    runs = dict(zip(TASKS, (reward, dpo, kto, ppo), strict=True))
    tasks, classic = tuple(args.tasks), load_config(CLASSIC)
    for seed in args.seeds:
        splits = load_splits(DEFAULTS.data, seed)
        start = warm_start(seed, splits)
        with tempfile.TemporaryDirectory() as place:
            begin = Clock.start()
            before = right(start, start, splits.test)
            bench = Bench(
                seed=seed,
                threads=args.threads,
                start=start,
                policy=Path(args.policy) if args.policy else start,
                splits=splits,
                folder=Path(place),
                before=before,
                classic=classic,
                tasks=tasks,
                prompts=args.prompts,
                settings=settings,
            )
            say(bench, f"warm start: greedy pass@1 {rate(before)}", begin)
            write_rows(bench)
            for task in tasks:
                runs[task](bench)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What preference learning learns on the default task.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tasks", type=lambda text: text.split(","), default=list(TASKS), help="ppo needs reward")
    add("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    add("--policy", default="", metavar="FOLDER", help="of the reward model, e.g. RL's; see above")
    add("--prompts", type=int, default=DEFAULTS.data.train_size, help="that are completed")
    add("--threads", type=int, default=os.cpu_count() or 1)
    for name in SECTIONS:
        add(f"--{name}", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings of {name}")
    return parser.parse_args()


def write_rows(bench: Bench) -> None:
    """Complete and rank training and held-out prompts; write pairs, and labels, as files."""
    held_out = pd.concat([bench.splits.validation, bench.splits.test], ignore_index=True)
    kinds: dict[str, tuple[Kind, Path, PairsConfig]] = {
        "pairs": ("pairs", bench.start, DEFAULTS.pairs),
        "labels": ("labels", bench.start, DEFAULTS.pairs),
        "reward": ("pairs", bench.policy, bench.classic.pairs),
    }
    asked = dict.fromkeys(ROWS[task] for task in bench.tasks)
    given = {"reward": RewardConfig()} | bench.settings["pairs"]
    for name, frame in (("train", bench.splits.train), ("held_out", held_out)):
        for kind in asked:
            rows, policy, base = kinds[kind]
            begin, config = Clock.start(), PairsConfig.model_validate(base.model_dump() | given)
            prompts = frame[: bench.prompts]
            ranked, metrics = rank_rollouts(
                policy, prompts, config, rows, max_response_length=LONGEST, seed=bench.seed
            )
            ranked.to_parquet(bench.folder / f"{name}_{kind}.parquet", index=False)
            made = f"{len(prompts)} prompts × {config.n}: {len(ranked)} {rows}"
            say(bench, f"{name}, for {kind}: {made}, {metrics['correct']:.1%} right", begin)


def offline(bench: Bench, task: str, base: Section) -> dict[str, Any]:
    """The settings of `base` with those of the command line."""
    return deep_update(base.model_dump() | {"threads": bench.threads}, bench.settings[task])


def reward(bench: Bench) -> None:
    """Train a reward model; print how it ranks held-out pairs, and which kinds of them."""
    begin = Clock.start()
    tokenizer = load_tokenizer(bench.start)
    values = offline(bench, "reward", bench.classic.reward_model)
    config = RewardModelTrainingConfig.model_validate(values)
    by_log_prob = config.head == "likelihood"
    read: Callable[..., Any] = read_preferences if by_log_prob else read_reward_pairs
    kind: Any = LikelihoodRewardTrainer if by_log_prob else RewardModelTrainer
    train, held_out = (
        read(str(bench.folder / f"{name}_reward.parquet"), tokenizer)
        for name in ("train", "held_out")
    )
    start, pad = load(bench.policy), tokenizer.pad_token_id or 0
    with kind(start, pad, config, seed=bench.seed) as trainer:
        trainer.fit(train)
        found = trainer.validate(held_out)
        gaps = np.subtract(*trainer.scores(held_out).double().numpy().T)
        trainer.save(bench.folder / "reward", bench.start)
    say(
        bench,
        f"reward model: {len(train)} pairs; of {len(held_out)} held-out ones it ranks right "
        f"{found['accuracy']:.1%} ({found['accuracy_low']:.1%} to {found['accuracy_high']:.1%}), "
        f"loss {found['loss']:.3f}, calibration error {found['calibration_error']:.3f}",
        begin,
    )
    texts = pd.read_parquet(bench.folder / "held_out_reward.parquet")[["chosen", "rejected"]]
    worked = texts.map(lambda text: "worked" if WORKED in text else "bare")
    for (chosen, rejected), rows in worked.groupby(["chosen", "rejected"]).groups.items():
        shown = rate((gaps[rows] > 0).astype(float))
        print(
            f"    right and {chosen}, wrong and {rejected}: {len(rows)} pairs, {shown}", flush=True
        )


def dpo(bench: Bench) -> None:
    """DPO on the pairs."""
    prefer(bench, "dpo", DEFAULTS.preference)


def kto(bench: Bench) -> None:
    """KTO on the labels."""
    prefer(bench, "kto", DEFAULTS.preference.model_copy(update={"loss": "kto"}))


def prefer(bench: Bench, task: str, base: PreferenceTrainingConfig) -> None:
    """Learn from the task's rows; print the gain in greedy pass@1."""
    begin = Clock.start()
    tokenizer, kind = load_tokenizer(bench.start), ROWS[task]
    path = str(bench.folder / f"train_{kind}.parquet")
    rows = read_preferences(path, tokenizer, "labels" if kind == "labels" else "pairs")
    config = PreferenceTrainingConfig.model_validate(offline(bench, task, base))
    trainer = PreferenceTrainer(
        load(bench.start), tokenizer.pad_token_id or 0, config, seed=bench.seed
    )
    with trainer:
        last = trainer.fit(rows)
        trainer.save(bench.folder / task, bench.start)
    shown = ", ".join(
        f"{name.rpartition('/')[2]} {value:.3f}"
        for name, value in last.items()
        if "rewards/" in name or name.endswith("/loss")
    )
    print(f"    {task}: {len(rows)} rows, last step: {shown}", flush=True)
    say(bench, f"{task}: {against(bench, bench.folder / task)}", begin)


def ppo(bench: Bench) -> None:
    """PPO as in classic RLHF, with the reward model in the rule's place."""
    begin = Clock.start()
    values = deep_update(bench.classic.rl.model_dump(), {"trainer": {"threads": bench.threads}})
    asked = RLConfig.model_validate(deep_update(values, bench.settings["ppo"]))
    config = by_reward_model(asked, str(bench.folder / "reward"))

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % 10 == 0 or step == 1:
            model, true = metrics[f"reward/{MODEL_REWARD}"], metrics["reward/correct"]
            print(f"    step {step}: reward model {model:.2f}, true reward {true:.3f}", flush=True)

    reinforce(bench.start, bench.folder / "ppo", config, bench.splits, bench.seed, finished)
    say(bench, f"ppo with the reward model: {against(bench, bench.folder / 'ppo')}", begin)


def against(bench: Bench, folder: Path) -> str:
    """E.g. `greedy pass@1 61.1% (56.8% to 65.3%), gain 14.8 points (11.1 to 18.6)`."""
    after = right(folder, bench.start, bench.splits.test)
    return f"greedy pass@1 {rate(after)}, gain {gain(bench.before, after)}"


def say(bench: Bench, text: str, begin: Clock) -> None:
    print(f"seed {bench.seed}: {text}; {begin}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
