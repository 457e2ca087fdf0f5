"""The run of `main_sft`, `main_preference`, `main_reward_model`: data in, a trained model out."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from engine.checkpoint.run_lock import hold_lock
from engine.cli import run_folder
from engine.cli.rl_run import open_log
from engine.cli.settings import (
    OfflineRunConfig,
    PreferenceRunConfig,
    RewardModelRunConfig,
    SFTRunConfig,
)
from engine.console import human_time, say
from engine.controller.launch import ray_session
from engine.data import training_examples
from engine.data.training_examples import AnyExample
from engine.errors import ConfigError, DataError, counted
from engine.models import (
    high_learning_rate,
    resolve_dtype,
    resolve_lora,
    text_config,
    vocabulary_and_context,
)
from engine.parallel.layout import Layout
from engine.runtime.policy_runtime import StartModel, open_tokenizer
from engine.trainers import auto_placement, offline, preference_learning
from engine.workers.algorithm_options import check_preference_training

E = TypeVar("E", bound=AnyExample)

_METHODS: dict[str, tuple[str, Any]] = {  # what is said of a kind of training, and its trainer
    "sft": ("fine-tuning", offline.SFTTrainer),
    "preference": ("", preference_learning.PreferenceTrainer),
    "sequence": ("Bradley-Terry", preference_learning.RewardModelTrainer),
    "token": ("process rewards", preference_learning.ProcessRewardTrainer),
    "likelihood": ("Bradley-Terry of log-probs", preference_learning.LikelihoodRewardTrainer),
}


def run(config: OfflineRunConfig, *, dry_run: bool = False) -> Path | None:
    """Train and save; return the folder of the model. A dry run stops before any of it: None.

    Raises an EngineError; what is wrong with settings and data is found before the model is loaded.
    """
    training, model = config.training, config.model
    if isinstance(config, PreferenceRunConfig):
        check_preference_training(config.preference)
    tokenizer = open_tokenizer(model.path)
    train, validation = _read(config, tokenizer)
    name, steps = training.section, offline.total_steps(training, len(train))
    method, trainer_class = _METHODS[_kind(config)]
    if isinstance(config, SFTRunConfig):
        turns = "all turns" if config.sft.train_on == "all" else "the last turn"
        method = f"{method} on {turns} of the assistant (sft.train_on={config.sft.train_on})"
    say(
        f"{name}: {method or getattr(training, 'loss', '')} from {model.path}, {len(train)} "
        f"examples, {len(validation)} held out, {steps} steps of {training.train_batch_size}"
    )
    local = run_folder.local_model(model.path)
    if warning := high_learning_rate(local, training.optim, model.lora):
        say(f"{name}: {warning}")
    if dry_run:
        say(f"{name}: dry run, nothing is trained; the model would be in {config.run.folder()}")
        for line in _plan_lines(config, train, steps):
            say(line)
        return None
    folder = run_folder.make_output_folder(config.run.folder())
    checkpoints = run_folder.checkpoint_folder(folder, config.run.resume_mode)
    start = StartModel(local, model.dtype, model.lora, config.seed)
    pad = int(tokenizer.pad_token_id or 0)
    with (
        run_folder.error_details_file(folder),
        hold_lock(checkpoints),
        ray_session("ray" if offline.is_on_ray(training) else "local"),
        trainer_class(start, pad, training, seed=config.seed, start=model.path) as trainer,
        open_log(config, folder, checkpoints) as log,
    ):
        started = time.monotonic()

        def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
            log.track([{"step": float(step)} | metrics])
            if log.step_lines:
                left = human_time((time.monotonic() - started) / step * (total - step))
                say(_line(name, step, total, metrics, left))

        trainer.on_step = on_step
        trainer.on_resume = lambda at, step: say(f"{name}: continues from {at}, step {step}")
        final = trainer.fit(train, validation, checkpoints)
        target = folder / f"step_{steps}"
        saved = run_folder.save_atomically(lambda draft: trainer.save(draft, model.path), target)
    count = counted(steps, "step")
    say(f"{name}: done, {count} in {human_time(time.monotonic() - started)}")
    for metric, value in sorted(final.items()):
        if "/validation_" in metric:
            say(f"  {metric.partition('/')[2]:<32} {value:.4f}")
    say(f"  {'model':<32} {saved}")
    return saved


def _plan_lines(config: OfflineRunConfig, train: Sequence[AnyExample], steps: int) -> Iterator[str]:
    """Yield what the run would take: memory by its longest row, time by the mean one."""
    training, model = config.training, run_folder.local_model(config.model.path)
    lengths = [len(row.prompt_ids) + len(answer) for row in train for answer in row.responses]
    kind, ranks = auto_placement.local_gpu(), Layout.of(training.parallel).world_size
    seconds = None
    try:
        work = auto_placement.sft_workload(
            training,
            model_path=model,
            lora=resolve_lora(model, config.model.lora),
            dtype=resolve_dtype(config.model.dtype, text_config(model).hidden_size),
            max_response_length=1,
            max_model_len=max(lengths),
        )
    except ConfigError as error:
        yield f"estimate  none: {error}"
    else:
        has_reference = isinstance(config, PreferenceRunConfig)
        work = replace(work, completions=len(lengths) // len(train), passes=int(has_reference))
        layout = training.parallel, training.max_tokens_per_micro_batch
        machines = auto_placement.sft_candidate(*layout), ranks, ranks, kind
        longest = auto_placement.step_estimate(work, *machines)[1]
        mean = replace(work, prompt_length=sum(lengths) // len(lengths))
        seconds, usual = auto_placement.step_estimate(mean, *machines)
        yield f"estimate  for {ranks} × {kind or 'CPU'}; memory by the longest row"
        yield from [*longest[:-1], usual[-1]]
    settings = offline.run_settings(training, config.seed, config.model.path, len(train))
    yield from run_folder.plan_lines(
        config.run,
        steps,
        seconds,
        lambda saved: offline.changed_settings(training, saved, settings),
    )


def _kind(config: OfflineRunConfig) -> str:
    """Name the training: preference, sft, or the head of a reward model."""
    if isinstance(config, RewardModelRunConfig):
        return config.reward_model.head
    return config.training.section


def _read(
    config: OfflineRunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[AnyExample], Sequence[AnyExample]]:
    data, kind = config.data, _kind(config)
    options: dict[str, Any] = {
        "config": data.rows(),
        "max_length": data.max_length or vocabulary_and_context(config.model.path)[1],
        "too_long": data.too_long,
    }
    read: Callable[..., Sequence[Any]] = training_examples.read_reward_pairs
    if isinstance(config, PreferenceRunConfig):
        kind = "labels" if config.preference.loss == "kto" else "pairs"
        read, options["kind"] = training_examples.read_preferences, kind
    elif isinstance(config, RewardModelRunConfig) and kind == "token":
        read = training_examples.read_steps
        options["separator"] = config.reward_model.step_separator
    elif isinstance(config, SFTRunConfig):
        read, options["train_on"] = training_examples.read_sft_examples, config.sft.train_on
    elif kind == "likelihood":
        read = training_examples.read_preferences
    train, validation = (
        read(files, tokenizer, **options) if files else []
        for files in (data.train_files, data.val_files)
    )
    return (train, validation) if data.val_files else held_out(train, data.val_size, config.seed)


def held_out(examples: Sequence[E], size: int, seed: int) -> tuple[list[E], list[E]]:
    """Split off `size` or a few more examples, but not all: those of prompts drawn by seed."""
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
            f"data.val_size={size} holds out all {len(examples)} examples, as prompts stay whole; "
            "lower it"
        )
    return (
        [example for i, example in enumerate(examples) if i not in apart],
        [example for i, example in enumerate(examples) if i in apart],
    )


_SHOWN = {
    "loss": "loss",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
    "KL": "kl",
    "grad": "grad_norm",
    "held-out loss": "validation_loss",
    "held-out accuracy": "validation_accuracy",
}


def _line(name: str, step: int, total: int, metrics: dict[str, float], left: str) -> str:
    values = {word: metrics.get(f"{name}/{key}") for word, key in _SHOWN.items()}
    facts = [f"{word} {value:.4f}" for word, value in values.items() if value is not None]
    return " · ".join([f"{name} {step:>4}/{total}", *facts, f"{left} left"])
