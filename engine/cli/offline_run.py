"""The run of `main_sft`, `main_preference`, `main_reward_model`: data in, a trained model out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.cli.program import error_details_file, make_output_folder, save_atomically
from engine.cli.rl_run import open_trackers
from engine.cli.settings import (
    OfflineRunConfig,
    PreferenceRunConfig,
    RewardModelRunConfig,
    SFTRunConfig,
)
from engine.console import human_time, say
from engine.controller.launch import ray_session
from engine.data.preference_rows import Kind
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import (
    PreferenceExample,
    StepExample,
    read_preferences,
    read_reward_pairs,
    read_sft_pairs,
    read_steps,
)
from engine.errors import ConfigError, DataError
from engine.models import vocabulary_and_context
from engine.runtime.policy_runtime import StartModel
from engine.trainers.offline import OfflineTrainer, SFTExample, SFTTrainer, is_on_ray, total_steps
from engine.trainers.preference_learning import PreferenceTrainer
from engine.trainers.reward_training import (
    LikelihoodRewardTrainer,
    ProcessRewardTrainer,
    RewardModelTrainer,
)
from engine.workers.algorithm_options import check_preference_training

AnyExample = PreferenceExample | StepExample | SFTExample
E = TypeVar("E", bound=AnyExample)


def run(config: OfflineRunConfig, *, dry_run: bool = False) -> Path | None:
    """Train and save; return the folder of the model. A dry run stops before any of it: None.

    Raises an EngineError; what is wrong with settings and data is found before the model is loaded.
    """
    if isinstance(config, PreferenceRunConfig):
        check_preference_training(config.preference)
    train, validation = _read(config)
    steps = total_steps(config.training, len(train))
    name = config.training.section
    say(
        f"{name}: {_method(config)} from {config.model.path}, {len(train)} examples, "
        f"{len(validation)} held out, {steps} steps of {config.training.train_batch_size}"
    )
    if dry_run:
        say(f"{name}: dry run, nothing is trained; the model would be in {config.run.folder()}")
        return None
    folder = make_output_folder(config.run.folder())
    kept = folder / "checkpoints"
    if config.run.resume_mode == "disable":
        kept = folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        error_details_file(folder),
        ray_session("ray" if is_on_ray(config.training) else "local"),
        _trainer(config) as trainer,
    ):
        return _train(config, trainer, train, validation, folder, kept)


def _train(
    config: OfflineRunConfig,
    trainer: OfflineTrainer[Any, Any],
    train: Sequence[AnyExample],
    validation: Sequence[AnyExample],
    folder: Path,
    kept: Path,
) -> Path:
    started, name = time.monotonic(), config.training.section
    resumes = any(kept.glob("step_*"))
    settings = config.model_dump(mode="json")
    with open_trackers(config.run, settings, folder, resumes) as (tracked, logs):

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            if tracked is not None:
                tracked.log_metrics(metrics, step)
            logs.log_metrics(metrics, step)
            if "console" in config.run.logger:
                left = human_time((time.monotonic() - started) / step * (total - step))
                say(_line(name, step, total, metrics, left))

        trainer.on_step = on_step
        trainer.on_resume = lambda at, step: say(f"{name}: continues from {at}, step {step}")
        final = trainer.fit(train, validation, kept)
        total = trainer.total_steps(len(train))
        target = folder / f"step_{total}"
        model = save_atomically(lambda draft: trainer.save(draft, config.model.path), target)
    say(f"{name}: done, {total} steps in {human_time(time.monotonic() - started)}")
    for metric, value in sorted(final.items()):
        if "/validation_" in metric:
            say(f"  {metric.partition('/')[2]:<32} {value:.4f}")
    say(f"  {'model':<32} {model}")
    return model


def _trainer(config: OfflineRunConfig) -> OfflineTrainer[Any, Any]:
    model = config.model
    start = StartModel(_local(model.path), model.dtype, model.lora, config.seed)
    pad = int(load_tokenizer(model.path).pad_token_id or 0)
    if isinstance(config, PreferenceRunConfig):
        return PreferenceTrainer(start, pad, config.preference, seed=config.seed, start=model.path)
    if isinstance(config, SFTRunConfig):
        return SFTTrainer(start, pad, config.sft, seed=config.seed, start=model.path)
    if isinstance(config, RewardModelRunConfig):
        own = config.reward_model
        if own.head == "token":
            return ProcessRewardTrainer(start, pad, own, seed=config.seed, start=model.path)
        if own.head == "likelihood":
            return LikelihoodRewardTrainer(start, pad, own, seed=config.seed, start=model.path)
        return RewardModelTrainer(start, pad, own, seed=config.seed, start=model.path)
    raise ConfigError(f"there is no training for {type(config).__name__}")


def _read(
    config: OfflineRunConfig,
) -> tuple[Sequence[AnyExample], Sequence[AnyExample]]:
    data, tokenizer = config.data, load_tokenizer(config.model.path)
    limit = data.max_length or vocabulary_and_context(config.model.path)[1]
    options: dict[str, Any] = {
        "config": data.rows(),
        "max_length": limit,
        "too_long": data.too_long,
    }

    def read(files: Sequence[str]) -> Sequence[AnyExample]:
        if isinstance(config, PreferenceRunConfig):
            kind: Kind = "labels" if config.preference.loss == "kto" else "pairs"
            return read_preferences(files, tokenizer, kind, **options)
        if isinstance(config, RewardModelRunConfig) and config.reward_model.head == "token":
            return read_steps(
                files, tokenizer, separator=config.reward_model.step_separator, **options
            )
        if isinstance(config, SFTRunConfig):
            pairs = read_sft_pairs(files, tokenizer, **options)
            return [SFTExample(prompt, response) for prompt, response in pairs]
        if isinstance(config, RewardModelRunConfig) and config.reward_model.head == "likelihood":
            return read_preferences(files, tokenizer, **options)
        return read_reward_pairs(files, tokenizer, **options)

    train = read(data.train_files)
    if data.val_files:
        return train, read(data.val_files)
    return held_out(train, data.val_size, config.seed)


def held_out(examples: Sequence[E], size: int, seed: int) -> tuple[list[E], list[E]]:
    """Training examples, and `size` others or a few more: all examples of prompts drawn by seed.

    Raises DataError where that would leave nothing to learn from.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, example in enumerate(examples):
        by_prompt.setdefault(tuple(example.prompt_ids), []).append(i)
    groups = list(by_prompt.values())
    random.Random(seed).shuffle(groups)
    apart: set[int] = set()
    while len(apart) < size and groups:
        apart.update(groups.pop())
    if apart and len(apart) == len(examples):
        raise DataError(
            f"data.val_size={size} holds out all {len(examples)} examples, with those of the same "
            "prompts; lower it, or give data.val_files"
        )
    return (
        [example for i, example in enumerate(examples) if i not in apart],
        [example for i, example in enumerate(examples) if i in apart],
    )


def _method(config: OfflineRunConfig) -> str:
    if isinstance(config, RewardModelRunConfig) and config.reward_model.head == "token":
        return "process rewards"
    if isinstance(config, RewardModelRunConfig) and config.reward_model.head == "likelihood":
        return "Bradley-Terry of log-probs"
    if isinstance(config, SFTRunConfig):
        return "fine-tuning"
    return config.preference.loss if isinstance(config, PreferenceRunConfig) else "Bradley-Terry"


def _line(name: str, step: int, total: int, metrics: dict[str, float], left: str) -> str:
    shown = {
        "loss": "loss",
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "KL": "kl",
        "grad": "grad_norm",
        "held-out loss": "validation_loss",
        "held-out accuracy": "validation_accuracy",
    }
    facts = [
        f"{word} {metrics[f'{name}/{key}']:.4f}"
        for word, key in shown.items()
        if f"{name}/{key}" in metrics
    ]
    return " · ".join([f"{name} {step:>4}/{total}", *facts, f"{left} left"])


def _local(model: str) -> str:
    """A folder as an absolute path, for ranks in other working directories; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model
