"""Our side of `vs_trl.py`.

    python our_side.py CASE [key=value …]

Arguments are settings of RLConfig, or of the section of SFT, DPO or the reward model, e.g.
`trainer.placement=local`, and `model.dtype`; what isn't named has its default. Each task imports
what it needs itself: memory is measured.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from case_folder import Case, read_case
from turns import Turn

from engine.config import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
)
from engine.config.text import deep_update
from engine.console import command_line, quiet
from engine.data.templates import encode_prompts, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, resolve_dtype, text_config

if TYPE_CHECKING:
    from engine.trainers.rl import RLTrainer

Rows = list[dict[str, Any]]

AS_TRL: dict[str, Any] = {"actor": {"use_kl_loss": False, "optim": {"warmup_ratio": 0.0}}}
"""Of the product's settings what TRL's defaults don't have."""


@command_line()
def main() -> None:
    quiet()
    folder, settings = Path(sys.argv[1]), nested(sys.argv[2:])
    case, rows = read_case(folder)
    wanted = settings.pop("model", {}).get("dtype", "auto")
    dtype = resolve_dtype(wanted, text_config(folder / "model").hidden_size)
    if case.task in ("dpo", "reward"):
        run_pairs(folder, case, settings, dtype)
    else:
        run = run_sft if case.task == "sft" else run_rl
        run(folder, case, rows, settings, dtype)


def nested(items: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1"]` → `{"a": {"b": 1}}`."""
    settings: dict[str, Any] = {}
    for item in items:
        path, _, value = item.partition("=")
        *sections, name = path.split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(value)
    return settings


def speed_settings(case: Case) -> dict[str, Any]:
    """What makes a step comparable: TRL's computation, weights that hardly change."""
    micro_batch = case.micro_batch * (case.max_prompt + case.max_new_tokens)
    optim = {"lr": case.lr, "weight_decay": 0.0, "warmup_ratio": 0.0}
    total = case.steps * case.turns
    return {
        "actor": {
            "optim": optim,
            "use_kl_loss": False,
            "max_tokens_per_micro_batch": micro_batch,
        },
        "rollout": {"n": case.n},
        "reward": {"name": "even_reward:even"},
        "trainer": {
            "train_batch_size": case.prompts,
            "timeline_steps": total,
            "start_timeout_s": 600.0,  # all contestants start at once
        },
    }


def run_rl(folder: Path, case: Case, rows: Rows, settings: dict[str, Any], dtype: str) -> None:
    """RL steps, `case.steps` a turn; phases are the seconds of each role's calls in a turn.

    The task "accuracy" has the product's settings but for `AS_TRL`, and saves the policy after
    each turn.
    """
    import pandas as pd

    from engine.data.loader import PromptLoader
    from engine.data.rows import rl_row
    from engine.trainers.rl import RLTrainer

    own = case.task == "accuracy"
    trainer_settings = {"total_training_steps": case.steps * case.turns, "threads": case.threads}
    base = AS_TRL if own else speed_settings(case)
    base = deep_update(base, {"trainer": trainer_settings})
    config = RLConfig.model_validate(deep_update(base, settings))
    frame = pd.DataFrame(
        [
            rl_row("bench", row["prompt"][0]["content"], row.get("ground_truth", "0"), {})
            for row in rows
        ]
    )
    turn, measured = Turn(), defaultdict[str, float](float)

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        completions = config.trainer.train_batch_size * config.rollout.n
        counted = {
            "tokens": metrics["response/length_mean"] * completions,
            "completions": float(completions),
        }
        for name, value in (counted | phases(trainer, step)).items():
            measured[name] += value
        if step % case.steps == 0:
            turn.done(measured, (lambda: trainer.save(folder / "ours")) if own else None)
            measured.clear()
            turn.wait()

    with RLTrainer(
        folder / "model",
        config,
        PromptLoader(frame, config.trainer.train_batch_size, case.seed),
        max_response_length=case.max_new_tokens,
        max_model_len=case.max_prompt + case.max_new_tokens,
        seed=case.seed,
        dtype=dtype,
        on_step=finished,
    ) as trainer:
        turn.wait()
        trainer.fit()


def phases(trainer: RLTrainer, step: int) -> dict[str, float]:
    """Seconds of a step by role and call, e.g. `rollout_s` and `actor.update_s`."""
    seconds: dict[str, float] = defaultdict(float)
    for span in trainer.spans:
        if span.step == step and span.rank == 0:
            name = "rollout" if span.role == "rollout" else f"{span.role}.{span.name}"
            seconds[f"{name}_s"] += (span.end_ns - span.start_ns) / 1e9
    return dict(seconds)


def run_sft(folder: Path, case: Case, rows: Rows, settings: dict[str, Any], dtype: str) -> None:
    """Steps of the warm start, `case.steps` of them a turn."""
    from engine.trainers.offline import SFTExample, SFTTrainer

    model = folder / "model"
    tokenizer = load_tokenizer(model)
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows], "bench")
    responses = [encode_response(tokenizer, row["completion"][0]["content"]) for row in rows]
    examples = [SFTExample(p, r) for p, r in zip(prompts, responses, strict=True)]
    turn = Turn()
    mean = sum(map(len, responses)) / len(responses)

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % case.steps == 0:
            turn.done({"tokens": mean * case.prompts * case.steps})
            turn.wait()

    config = SFTConfig.model_validate(deep_update(offline_settings(case), settings))
    trainer = SFTTrainer(
        load_model(model, dtype), tokenizer.pad_token_id or 0, config, seed=0, on_step=finished
    )
    turn.wait()
    trainer.fit(examples, [])


def run_pairs(folder: Path, case: Case, settings: dict[str, Any], dtype: str) -> None:
    """Steps of DPO or of a reward model, `case.steps` of them a turn, and the last one's loss."""
    from engine.data.training_examples import read_preferences, read_reward_pairs
    from engine.runtime.policy_runtime import StartModel
    from engine.trainers.preference_learning import PreferenceTrainer, RewardModelTrainer

    model, pairs = folder / "model", str(folder / "rows.jsonl")
    tokenizer = load_tokenizer(model)
    start, pad = StartModel(str(model), dtype), tokenizer.pad_token_id or 0
    values = deep_update(offline_settings(case), settings)
    turn, section = Turn(), "preference" if case.task == "dpo" else "reward_model"
    read = read_preferences if case.task == "dpo" else read_reward_pairs
    examples: list[Any] = list(read(pairs, tokenizer))
    total = sum(2 * len(e.prompt_ids) + sum(map(len, e.responses)) for e in examples)
    mean = total / len(examples)

    def finished(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % case.steps == 0:
            tokens = mean * case.prompts * case.steps
            turn.done({"tokens": tokens, "loss": metrics[f"{section}/loss"]})
            turn.wait()

    turn.wait()
    if case.task == "dpo":
        own = PreferenceTrainingConfig.model_validate(values)
        PreferenceTrainer(start, pad, own, seed=0, on_step=finished).fit(examples)
    else:
        scoring = RewardModelTrainingConfig.model_validate(values)
        RewardModelTrainer(start, pad, scoring, seed=0, on_step=finished).fit(examples)


def offline_settings(case: Case) -> dict[str, Any]:
    """What makes steps on rows comparable."""
    return {
        "max_steps": case.steps * case.turns,
        "train_batch_size": case.prompts,
        "threads": case.threads,
        "optim": {
            "lr": case.lr,
            "weight_decay": 0.0,
            "warmup_ratio": 0.0,
            "schedule": "constant",
        },
    }


if __name__ == "__main__":
    sys.exit(main())
