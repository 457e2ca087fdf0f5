"""What preference learning learns on the default task, with intervals.

    python benchmarks/preference_learning.py                  # reward model, DPO, KTO, PPO
    python benchmarks/preference_learning.py --tasks dpo --seeds 0,1,2

All begin at the warm start that the default task's SFT stage makes (kept in the cache folder). Its
own completions of the training prompts, scored by the task's rule, make the pairs and the labels.

- `reward`: a reward model learns from all pairs of a group, and ranks pairs of held-out prompts.
- `dpo`, `kto`: greedy pass@1 on the 512 held-out problems, and the gain over the warm start.
- `ppo`: PPO with that reward model as its only reward; whether the rule's pass@1 rises.

Settings are the defaults but for `SETTINGS`, which is what to start from with data of this kind.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from our_side import merged, nested
from time_to_accuracy import DEFAULTS, warm_start
from transformers.utils import logging as transformers_logging
from vs_trl import machine

from engine.config import (
    EvaluateConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
)
from engine.console import quiet
from engine.data.loader import PromptLoader
from engine.data.preference_examples import read_preferences, read_reward_pairs
from engine.data.scored_groups import (
    ScoredCompletion,
    ScoredGroup,
    labels_from_groups,
    pairs_from_groups,
)
from engine.data.sources import Splits, load_splits
from engine.data.templates import decode_response, encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.evaluation.decode import decode
from engine.evaluation.metrics import paired_bootstrap, wilson_interval
from engine.models import saved_dtype
from engine.rewards.answer_match import answer_match
from engine.runtime.save_policy import StartModel
from engine.trainers.preference import PreferenceTrainer
from engine.trainers.reward_model import RewardModelTrainer
from engine.trainers.rl import RLTrainer

TASKS = ("reward", "dpo", "kto", "ppo")
LONGEST = DEFAULTS.data.max_response_length
PPO = Path(__file__).parents[1] / "engine" / "config" / "presets" / "ppo.yaml"
SETTINGS: dict[str, dict[str, Any]] = {
    "reward": {"epochs": 3, "optim": {"lr": 2e-3}},
    "dpo": {"epochs": 3, "optim": {"lr": 3e-4}},
    "kto": {"loss": "kto", "epochs": 3, "optim": {"lr": 3e-4}},
    "ppo": {},
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What the tasks of a seed share."""

    seed: int
    threads: int
    start: Path  # the warm start
    splits: Splits
    folder: Path  # of this run's files
    settings: dict[str, dict[str, Any]]  # by task
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
    settings = {task: merged(SETTINGS[task], nested(getattr(args, task))) for task in TASKS}
    runs: dict[str, Callable[[Bench], None]] = {
        "reward": reward, "dpo": dpo, "kto": kto, "ppo": ppo
    }  # fmt: skip
    for seed in args.seeds:
        splits = load_splits(DEFAULTS.data, seed)
        start = warm_start(seed, splits)
        with tempfile.TemporaryDirectory() as place:
            begin = time.perf_counter()
            before = right(start, start, splits.test)
            bench = Bench(seed, args.threads, start, splits, Path(place), settings, before)
            say(bench, f"warm start: greedy pass@1 {rate(before)}", begin)
            write_rows(bench, args.prompts, args.n)
            for task in args.tasks:
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
    add("--n", type=int, default=8, help="completions of each")
    add("--threads", type=int, default=os.cpu_count() or 1)
    for task in TASKS:
        add(f"--{task}", nargs="*", default=[], metavar="KEY=VALUE", help=f"settings of {task}")
    return parser.parse_args()


def write_rows(bench: Bench, prompts: int, n: int) -> None:
    """Complete and score training and held-out prompts; write their pairs, and labels, as files."""
    begin = time.perf_counter()
    held_out = pd.concat([bench.splits.validation, bench.splits.test])
    for name, frame in (("train", bench.splits.train[:prompts]), ("held_out", held_out)):
        groups = scored_groups(bench, frame, n)
        pairs = pairs_from_groups(groups)
        kinds = {
            "pairs": pairs,
            "all_pairs": pairs_from_groups(groups, pairs_per_group=n),
            "labels": labels_from_groups(groups, per_group=1),
        }
        for kind, rows in kinds.items():
            lines = "\n".join(map(json.dumps, rows))
            (bench.folder / f"{name}_{kind}.jsonl").write_text(lines)
        say(bench, f"{name}: {len(frame)} prompts × {n}: {len(pairs)} pairs", begin)


def scored_groups(bench: Bench, frame: pd.DataFrame, n: int) -> list[ScoredGroup]:
    """The warm start's completions of each prompt, with the rule's scores."""
    tokenizer = load_tokenizer(bench.start)
    config = EvaluateConfig(k=1, samples=n, temperature=1.0)
    prompts = encode_prompts(tokenizer, frame["prompt"], "prompts")
    _, answers = decode(bench.start, prompts, config, max_response_length=LONGEST, seed=bench.seed)
    texts = [decode_response(tokenizer, one.token_ids) for one in answers]
    scores = rule(texts, [row for row in frame["reward_model"] for _ in range(n)])
    done = [
        ScoredCompletion(text, score, answer.truncated)
        for text, score, answer in zip(texts, scores, answers, strict=True)
    ]
    return [
        ScoredGroup(list(prompt), done[i * n : (i + 1) * n])
        for i, prompt in enumerate(frame["prompt"])
    ]


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


def offline(bench: Bench, task: str, **more: Any) -> dict[str, Any]:
    return merged({"threads": bench.threads} | more, bench.settings[task])


def reward(bench: Bench) -> None:
    """Train a reward model; print how it ranks held-out pairs, and by confidence."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(bench.start)
    train, held_out = (
        read_reward_pairs(str(bench.folder / f"{name}.jsonl"), tokenizer)
        for name in ("train_all_pairs", "held_out_pairs")
    )
    config = RewardModelTrainingConfig.model_validate(offline(bench, "reward"))
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
    confidence = 1 / (1 + np.exp(-abs(gaps)))
    edges = (0.5, 0.9, 0.99, 0.999, 1.0 + 1e-9)
    for low, high in pairwise(edges):
        inside = (confidence >= low) & (confidence < high)
        if inside.any():
            shown = rate((gaps[inside] > 0).astype(float))
            mean = confidence[inside].mean()
            print(f"    confidence {mean:.3f}: {inside.sum()} pairs, right {shown}", flush=True)


def dpo(bench: Bench) -> None:
    """DPO on the pairs."""
    prefer(bench, "dpo", "pairs")


def kto(bench: Bench) -> None:
    """KTO on the labels."""
    prefer(bench, "kto", "labels")


def prefer(bench: Bench, task: str, kind: Any) -> None:
    """Learn from the rows of `kind`; print the gain in greedy pass@1."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(bench.start)
    rows = read_preferences(str(bench.folder / f"train_{kind}.jsonl"), tokenizer, kind)
    config = PreferenceTrainingConfig.model_validate(offline(bench, task))
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
    """PPO of `engine/config/presets/ppo.yaml`, with the reward model in the rule's place."""
    begin = time.perf_counter()
    scored = {"name": "reward_model", "options": {"model": str(bench.folder / "reward")}}
    own = {"reward": scored, "trainer": {"threads": bench.threads}}
    values = merged(merged(yaml.safe_load(PPO.read_text())["rl"], own), bench.settings["ppo"])
    config, train = RLConfig.model_validate(values), bench.splits.train
    prompts = encode_prompts(load_tokenizer(bench.start), train["prompt"], "train")

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % 20 == 0 or step == 1:
            print(f"    step {step}: reward {metrics['reward/mean']:.2f}", flush=True)

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
