"""What preference learning learns on the default task, with intervals and seconds.

    python benchmarks/preference_learning.py                  # reward model, DPO, KTO, PPO
    python benchmarks/preference_learning.py --tasks dpo --seeds 0,1,2

The settings are those of `pyflyte run workflows/preference.py`: `preference` for `dpo` and `kto`,
`classic_rlhf` for `reward` and `ppo`. All begin at the warm start that the default task's SFT stage
makes (kept in the cache folder). Its own completions of the training prompts, ranked by the task's
rule, make the pairs and the labels.

- `reward`: a reward model learns from pairs, and ranks pairs of held-out prompts; by whether both
  answers show their steps.
- `dpo`, `kto`: greedy pass@1 on the 512 held-out problems, and the gain over the warm start.
- `ppo`: PPO with that reward model as its only reward; whether the rule's pass@1 rises.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from our_side import merged, nested
from time_to_accuracy import DEFAULTS, warm_start
from transformers.utils import logging as transformers_logging
from vs_trl import machine

from engine.config import (
    EvaluateConfig,
    PairsConfig,
    PipelineConfig,
    PreferenceTrainingConfig,
    RewardConfig,
    RewardModelTrainingConfig,
    RLConfig,
    load_config,
)
from engine.config.base import Section
from engine.console import quiet
from engine.data.loader import PromptLoader
from engine.data.preference_examples import read_preferences, read_reward_pairs
from engine.data.preference_rows import Kind
from engine.data.sources import Splits, load_splits
from engine.data.templates import decode_response, encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.evaluation.decode import decode
from engine.evaluation.metrics import paired_bootstrap, wilson_interval
from engine.evaluation.overoptimisation import MODEL_REWARD
from engine.models import saved_dtype
from engine.preferences.from_rollouts import rank_rollouts
from engine.preferences.learned_reward import by_reward_model
from engine.rewards.answer_match import answer_match
from engine.runtime.save_policy import StartModel
from engine.trainers.preference import PreferenceTrainer
from engine.trainers.reward_model import RewardModelTrainer
from engine.trainers.rl import RLTrainer

TASKS = ("reward", "dpo", "kto", "ppo")
SECTIONS = (*TASKS, "pairs")  # which the command line sets
LONGEST = DEFAULTS.data.max_response_length
CLASSIC = "preset:classic_rlhf"
WORKED = "<<"  # is in answers that show their steps
ROWS = {"reward": "reward", "dpo": "pairs", "kto": "labels", "ppo": "reward"}  # what a task reads


@dataclass(frozen=True, slots=True)
class Bench:
    """What the tasks of a seed share."""

    seed: int
    threads: int
    start: Path  # the warm start
    splits: Splits
    folder: Path  # of this run's files
    classic: PipelineConfig  # of the workflow classic_rlhf
    tasks: tuple[str, ...]
    prompts: int  # that are completed, at most, of training and of held-out ones
    settings: dict[str, dict[str, Any]]  # by section, those of the command line
    before: np.ndarray  # [512] whether the warm start's greedy answers are right

    def model(self) -> StartModel:
        """The warm start, to be loaded."""
        return StartModel(str(self.start), saved_dtype(self.start))


def main() -> None:
    args = parse_args()
    quiet()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    print(machine(args.threads).partition("; TRL")[0], flush=True)
    settings = {name: nested(getattr(args, name)) for name in SECTIONS}
    runs = dict(zip(TASKS, (reward, dpo, kto, ppo), strict=True))
    tasks, classic = tuple(args.tasks), load_config(CLASSIC)
    for seed in args.seeds:
        splits = load_splits(DEFAULTS.data, seed)
        start = warm_start(seed, splits)
        with tempfile.TemporaryDirectory() as place:
            begin = time.perf_counter()
            before = right(start, start, splits.test)
            bench = Bench(
                seed=seed,
                threads=args.threads,
                start=start,
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
    add("--prompts", type=int, default=DEFAULTS.data.train_size, help="that are completed")
    add("--threads", type=int, default=os.cpu_count() or 1)
    for name in SECTIONS:
        add(f"--{name}", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings of {name}")
    return parser.parse_args()


def write_rows(bench: Bench) -> None:
    """Complete and rank training and held-out prompts; write pairs, and labels, as files."""
    held_out = pd.concat([bench.splits.validation, bench.splits.test], ignore_index=True)
    kinds: dict[str, tuple[Kind, PairsConfig]] = {
        "pairs": ("pairs", DEFAULTS.pairs),
        "labels": ("labels", DEFAULTS.pairs),
        "reward": ("pairs", bench.classic.pairs),
    }
    for kind in dict.fromkeys(ROWS[task] for task in bench.tasks):
        rows, base = kinds[kind]
        given = {"reward": RewardConfig()} | bench.settings["pairs"]
        config = PairsConfig.model_validate(base.model_dump() | given)
        for name, frame in (("train", bench.splits.train), ("held_out", held_out)):
            begin = time.perf_counter()
            ranked = rank_rollouts(
                bench.start,
                frame[: bench.prompts],
                config,
                rows,
                max_response_length=LONGEST,
                seed=bench.seed,
            )
            ranked.rows.to_parquet(bench.folder / f"{name}_{kind}.parquet", index=False)
            made = f"{ranked.prompts} prompts × {config.n}: {len(ranked.rows)} {rows}"
            say(bench, f"{name}, for {kind}: {made}", begin)


def rule(texts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """1 for right answers, 0 for others."""
    return answer_match([""] * len(texts), texts, ground_truth=[r["ground_truth"] for r in rows])


def right(folder: Path, tokens: Path, frame: pd.DataFrame) -> np.ndarray:
    """Which greedy answers `[N]` of the model in `folder` are right."""
    tokenizer = load_tokenizer(tokens)
    prompts = encode_prompts(tokenizer, frame["prompt"], "test")
    config = EvaluateConfig(k=1, samples=1)
    greedy, _ = decode(folder, prompts, config, max_response_length=LONGEST, seed=0)
    texts = [decode_response(tokenizer, one.token_ids) for one in greedy]
    return np.array(rule(texts, list(frame["reward_model"])))


def offline(bench: Bench, task: str, base: Section) -> dict[str, Any]:
    """The settings of `base` with those of the command line."""
    return merged(base.model_dump() | {"threads": bench.threads}, bench.settings[task])


def reward(bench: Bench) -> None:
    """Train a reward model; print how it ranks held-out pairs, and which kinds of them."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(bench.start)
    train, held_out = (
        read_reward_pairs(str(bench.folder / f"{name}_reward.parquet"), tokenizer)
        for name in ("train", "held_out")
    )
    values = offline(bench, "reward", bench.classic.reward_model)
    config = RewardModelTrainingConfig.model_validate(values)
    trainer = RewardModelTrainer(
        bench.model(), tokenizer.pad_token_id or 0, config, seed=bench.seed
    )
    with trainer:
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
    begin = time.perf_counter()
    tokenizer, kind = load_tokenizer(bench.start), ROWS[task]
    path = str(bench.folder / f"train_{kind}.parquet")
    rows = read_preferences(path, tokenizer, "labels" if kind == "labels" else "pairs")
    config = PreferenceTrainingConfig.model_validate(offline(bench, task, base))
    trainer = PreferenceTrainer(bench.model(), tokenizer.pad_token_id or 0, config, seed=bench.seed)
    with trainer:
        last = trainer.fit(rows)
        trainer.save(bench.folder / task, bench.start)
    shown = ", ".join(
        f"{name.rpartition('/')[2]} {value:.3f}"
        for name, value in last.items()
        if "rewards/" in name or name.endswith("/loss")
    )
    print(f"    {task}: {len(rows)} rows, last step: {shown}", flush=True)
    say(bench, f"{task}: {gain(bench, bench.folder / task)}", begin)


def ppo(bench: Bench) -> None:
    """PPO as in classic RLHF, with the reward model in the rule's place."""
    begin = time.perf_counter()
    values = merged(bench.classic.rl.model_dump(), {"trainer": {"threads": bench.threads}})
    asked = RLConfig.model_validate(merged(values, bench.settings["ppo"]))
    config, train = by_reward_model(asked, str(bench.folder / "reward")), bench.splits.train
    prompts = encode_prompts(load_tokenizer(bench.start), train["prompt"], "train")

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % 10 == 0 or step == 1:
            model, true = metrics[f"reward/{MODEL_REWARD}"], metrics["reward/correct"]
            print(f"    step {step}: reward model {model:.2f}, true reward {true:.3f}", flush=True)

    with RLTrainer(
        bench.start,
        config,
        PromptLoader(train, config.trainer.train_batch_size, bench.seed),
        max_response_length=LONGEST,
        max_model_len=max(map(len, prompts)) + LONGEST,
        seed=bench.seed,
        dtype=saved_dtype(bench.start),
        on_step=finished,
    ) as trainer:
        trainer.fit()
        trainer.save(bench.folder / "ppo")
    say(bench, f"ppo with the reward model: {gain(bench, bench.folder / 'ppo')}", begin)


def gain(bench: Bench, folder: Path) -> str:
    """E.g. `greedy pass@1 61.1% (56.8% to 65.3%), gain 14.8 points (11.1 to 18.6)`."""
    after = right(folder, bench.start, bench.splits.test)
    found = paired_bootstrap(bench.before, after, 0.95, 10000, 0)
    points = f"{100 * found.mean:.1f} points ({100 * found.low:.1f} to {100 * found.high:.1f})"
    return f"greedy pass@1 {rate(after)}, gain {points}"


def rate(outcomes: np.ndarray) -> str:
    """A share of right ones with its 95 % interval."""
    found = wilson_interval(outcomes, 0.95)
    return f"{found.mean:.1%} ({found.low:.1%} to {found.high:.1%})"


def say(bench: Bench, text: str, begin: float) -> None:
    print(f"seed {bench.seed}: {text}; {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
