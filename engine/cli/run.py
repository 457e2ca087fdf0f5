"""The run of `python -m engine.main_ppo`: reads its data, trains, and prints a summary."""

from __future__ import annotations

import time
from pathlib import Path

from engine.cli.data import Prompts, read_prompts
from engine.cli.failures import error_details_file
from engine.cli.loggers import open_log
from engine.cli.model_folders import make_output_folder, save_atomically
from engine.cli.ranks import gpu_pools
from engine.cli.rl_run import (
    RLRun,
    RunLog,
    TrainedPolicy,
    headline,
    placed,
    prompt_room,
    train_policy,
    validate_policy,
)
from engine.cli.settings import RunConfig
from engine.console import human_time
from engine.controller.ray_session import require_shared
from engine.data.tokenizer import load_tokenizer
from engine.models import vocabulary_and_context
from engine.models.override import check_overrides, link_model
from engine.rollouts.files import FOLDER as ROLLOUTS
from engine.trainers.rl_checks import check_config


def run(config: RunConfig) -> Path:
    """Train, validate, save; return the folder of the model that the run hands over.

    With `run.val_only` it validates alone, and the folder is that of the run. Raises an
    EngineError; what is wrong with the input is found before any worker starts, and what it names
    by `check_names` before this module is loaded.
    """
    check_config(config.rl, config.data.max_response_length)
    folder = make_output_folder(config.run.folder())
    model = overridden(local_model(config.model.path), config, folder / "start_model")
    context = vocabulary_and_context(model)[1]
    prompts = read_prompts(config, load_tokenizer(model), context)
    config = with_steps(config, len(prompts.loader))
    resumes = any(checkpoint_folder(config, folder).glob("step_*"))
    with (
        error_details_file(folder),
        open_log(config, folder, resumes) as log,
        placed(config.rl) as rl,
    ):
        rl = gpu_pools(config.model_copy(update={"rl": rl}))
        config = config.model_copy(update={"rl": rl})
        if rl.trainer.placement != "local":
            require_shared([str(folder), *([model] if Path(model).is_dir() else [])])
        return _train(config, model, prompts, folder, log)


def _train(config: RunConfig, model: str, prompts: Prompts, folder: Path, log: RunLog) -> Path:
    started = time.monotonic()
    left_out = prompts.left_out
    done = "left out" if config.data.control_tokens == "drop" else "kept as plain text"
    if left_out.control_tokens:
        log.say(f"rl: {left_out.control_tokens} rows spell control tokens of the model; {done}")
    for sentence in left_out.bad:
        log.say(f"rl: {sentence}")
    long = f" ({left_out.long} too long, left out)" if left_out.long else ""
    log.say(
        f"{headline(config.rl)}, {len(prompts.loader)} prompts{long}, "
        f"{len(prompts.validation)} for validation"
    )
    run = RLRun(
        model,
        config.rl,
        prompts.loader,
        prompts.validation,
        prompt_room(config.rl, prompts.longest, config.data.max_prompt_length),
        config.data.max_response_length,
        folder,
        checkpoint_folder(config, folder),
        lambda write, step: save_atomically(write, folder / f"step_{step}"),
        rollouts=config.run.rollout_data_dir or folder / ROLLOUTS,
        save_freq=config.run.save_freq,
        keep_last=True,
        validate_first=config.run.val_before_train,
        print_validations=config.run.log_val_generations,
        seed=config.seed,
        dtype=config.model.dtype,
        lora=config.model.lora,
    )
    if config.run.val_only:
        metrics = validate_policy(run, log)
        for name, value in metrics.items():
            log.say(f"  {name:<28} {value:.4f}")
        return folder
    trained = train_policy(run, log)
    _print_summary(log, trained, time.monotonic() - started)
    return trained.folder


def checkpoint_folder(config: RunConfig, folder: Path) -> Path:
    """Where this run's checkpoints go; but with resume_mode=auto a new place each time."""
    if config.run.resume_mode == "auto":
        return folder / "checkpoints"
    # With resume_path, too: what lies in "checkpoints" would come before the one that is named.
    return folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"


def _print_summary(log: RunLog, trained: TrainedPolicy, seconds: float) -> None:
    """Rewards first → last, time, and where the model is."""
    log.say(f"rl: done, {len(log.rewards)} steps in {human_time(seconds)}")
    if log.rewards:
        log.say(f"  reward      {_first_to_last(log.rewards)}")
    if log.validations:
        log.say(f"  validation  {_first_to_last(log.validations)}")
    log.say(f"  model       {trained.folder} ({trained.final})")


def _first_to_last(values: list[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}"


def with_steps(config: RunConfig, rows: int) -> RunConfig:
    """Turn `run.total_epochs`, if given, into steps."""
    if config.run.total_epochs is None:
        return config
    steps = max(1, config.run.total_epochs * rows // config.rl.trainer.train_batch_size)
    trainer = config.rl.trainer.model_copy(update={"total_training_steps": steps})
    return config.model_copy(update={"rl": config.rl.model_copy(update={"trainer": trainer})})


def overridden(model: str, config: RunConfig, folder: Path) -> str:
    """The model with `model.override_config`, in `folder`; without any as it is."""
    if not config.model.override_config:
        return model
    changes = check_overrides(model, config.model.override_config)
    return str(save_atomically(lambda to: link_model(model, changes, Path(to)), folder).absolute())


def local_model(model: str) -> str:
    """A folder as an absolute path, for workers in other working directories; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model
