"""The run of `main_sft`, `main_preference`, `main_reward_model`: data in, a trained model out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.cli.rl_run import open_trackers
from engine.cli.run_folder import (
    error_details_file,
    local_model,
    make_output_folder,
    save_atomically,
)
from engine.cli.settings import (
    OfflineRunConfig,
    PreferenceRunConfig,
    RewardModelRunConfig,
)
from engine.console import human_time, say
from engine.controller.launch import ray_session
from engine.data.tokenizer import load_tokenizer
from engine.data.training_examples import (
    PreferenceExample,
    StepExample,
    read_preferences,
    read_reward_pairs,
    read_sft_pairs,
    read_steps,
)
from engine.errors import DataError
from engine.models import vocabulary_and_context
from engine.runtime.policy_runtime import StartModel
from engine.trainers.offline import OfflineTrainer, SFTExample, SFTTrainer, is_on_ray, total_steps
from engine.trainers.preference_learning import (
    LikelihoodRewardTrainer,
    PreferenceTrainer,
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
    methods = {
        "sft": "fine-tuning",
        "sequence": "Bradley-Terry",
        "token": "process rewards",
        "likelihood": "Bradley-Terry of log-probs",
    }
    method = methods.get(_kind(config)) or getattr(config.training, "loss", "")
    say(
        f"{name}: {method} from {config.model.path}, {len(train)} examples, "
        f"{len(validation)} held out, {steps} steps of {config.training.train_batch_size}"
    )
    if dry_run:
        say(f"{name}: dry run, nothing is trained; the model would be in {config.run.folder()}")
        return None
    folder = make_output_folder(config.run.folder())
    checkpoints = folder / "checkpoints"
    if config.run.resume_mode == "disable":
        checkpoints = folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"
    with (
        error_details_file(folder),
        ray_session("ray" if is_on_ray(config.training) else "local"),
        _trainer(config) as trainer,
    ):
        return _train(config, trainer, train, validation, folder, checkpoints)


def _train(
    config: OfflineRunConfig,
    trainer: OfflineTrainer[Any, Any],
    train: Sequence[AnyExample],
    validation: Sequence[AnyExample],
    folder: Path,
    checkpoints: Path,
) -> Path:
    started, name = time.monotonic(), config.training.section
    resumes = any(checkpoints.glob("step_*"))
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
        final = trainer.fit(train, validation, checkpoints)
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
    path = config.model.path
    start = StartModel(local_model(path), config.model.dtype, config.model.lora, config.seed)
    trainers: dict[str, Any] = {
        "preference": PreferenceTrainer,
        "sft": SFTTrainer,
        "sequence": RewardModelTrainer,
        "token": ProcessRewardTrainer,
        "likelihood": LikelihoodRewardTrainer,
    }
    pad = int(load_tokenizer(path).pad_token_id or 0)
    trainer: OfflineTrainer[Any, Any] = trainers[_kind(config)](
        start, pad, config.training, seed=config.seed, start=path
    )
    return trainer


def _kind(config: OfflineRunConfig) -> str:
    """Name the training: preference, sft, or the head of a reward model."""
    if isinstance(config, RewardModelRunConfig):
        return config.reward_model.head
    return config.training.section


def _read(
    config: OfflineRunConfig,
) -> tuple[Sequence[AnyExample], Sequence[AnyExample]]:
    data, tokenizer, kind = config.data, load_tokenizer(config.model.path), _kind(config)
    options: dict[str, Any] = {
        "config": data.rows(),
        "max_length": data.max_length or vocabulary_and_context(config.model.path)[1],
        "too_long": data.too_long,
    }

    def read(files: Sequence[str]) -> Sequence[AnyExample]:
        if isinstance(config, PreferenceRunConfig):
            labels = config.preference.loss == "kto"
            return read_preferences(files, tokenizer, "labels" if labels else "pairs", **options)
        if isinstance(config, RewardModelRunConfig) and kind == "token":
            separator = config.reward_model.step_separator
            return read_steps(files, tokenizer, separator=separator, **options)
        if kind == "sft":
            pairs = read_sft_pairs(files, tokenizer, **options)
            return [SFTExample(prompt, response) for prompt, response in pairs]
        if kind == "likelihood":
            return read_preferences(files, tokenizer, **options)
        return read_reward_pairs(files, tokenizer, **options)

    train = read(data.train_files)
    if data.val_files:
        return train, read(data.val_files)
    return held_out(train, data.val_size, config.seed)


def held_out(examples: Sequence[E], size: int, seed: int) -> tuple[list[E], list[E]]:
    """Split off `size` or a few more examples: all examples of prompts drawn by seed.

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
