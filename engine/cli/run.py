"""One run: data and model in, a better model out, with a line a step.

What a step is lives in `engine.trainers.rl`; what was asked for, in `resolve`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from engine.cli.data import Prompts, read_prompts
from engine.cli.failures import error_details_file
from engine.cli.model_folders import make_output_folder, save_atomically
from engine.cli.ray_session import ray_session, require_shared
from engine.cli.settings import RunConfig
from engine.cli.step_line import step_line
from engine.config import RLConfig
from engine.console import human_time
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError
from engine.storage.locations import home
from engine.trainers.attempts import run_with_retries
from engine.trainers.rl import RLTrainer
from engine.trainers.rl_checks import check_config

if TYPE_CHECKING:
    from engine.tracking import StageRun


def run(config: RunConfig) -> Path:
    """Train, validate, save; return the folder of the last model.

    Raises an EngineError; what is wrong with the input is found before any worker starts.
    """
    if not config.model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path is missing; give a Hugging Face folder or hub id"
        )
    check_config(config.rl, config.data.max_response_length)
    folder = make_output_folder(output_folder(config))
    model = _local(config.model.path)
    prompts = read_prompts(config, load_tokenizer(model))
    config = _with_steps(config, len(prompts.loader))
    placement = config.rl.trainer.placement
    with error_details_file(folder), _tracked(config) as tracked, ray_session(placement):
        if placement != "local":
            require_shared([str(folder), *([model] if Path(model).is_dir() else [])])
        with _Log(config, folder, tracked) as log:
            return _train(config, model, prompts, folder, log)


def _train(config: RunConfig, model: str, prompts: Prompts, folder: Path, log: _Log) -> Path:
    started = time.monotonic()
    log.say(headline(config.rl, prompts))
    response = config.data.max_response_length
    begin = prompts.loader.state_dict()
    saved: list[Path] = []

    def make() -> RLTrainer:
        prompts.loader.load_state_dict(begin)
        return RLTrainer(
            model,
            config.rl,
            prompts.loader,
            max_response_length=response,
            max_model_len=prompts.longest + response,
            seed=config.seed,
            dtype=config.model.dtype,
            lora=config.model.lora,
        )

    def work(trainer: RLTrainer) -> None:
        def save(step: int) -> Path:
            return save_atomically(trainer.save, folder / f"step_{step}")

        def report(step: int, total: int, metrics: dict[str, float]) -> None:
            if prompts.validation and _due(step, total, config.rl.trainer.test_freq):
                metrics["validation/reward"] = trainer.validate(prompts.validation)
            log.step(step, total, metrics)
            if step < total and config.run.save_freq > 0 and step % config.run.save_freq == 0:
                log.say(f"rl: saved {save(step)}")

        if resumed := trainer.resume(checkpoints):
            log.say(f"rl: goes on from {resumed.folder}, step {trainer.step}")
        elif prompts.validation and config.run.val_before_train:
            log.start(trainer.validate(prompts.validation))
        trainer.on_step = report
        if not trainer.fit(checkpoint_dir=checkpoints):
            log.say(f"rl: all {trainer.step} steps are done already; nothing to train")
        saved.append(save(trainer.step))
        trainer.write_timeline(folder / "timeline.json")

    checkpoints = checkpoint_folder(config, folder)
    run_with_retries(make, work, checkpoints, config.rl.trainer.max_attempts)
    log.summary(saved[0], time.monotonic() - started)
    return saved[0]


def checkpoint_folder(config: RunConfig, folder: Path) -> Path:
    """Where this run's checkpoints go; with resume_mode=disable a new place each time."""
    if config.run.resume_mode == "auto":
        return folder / "checkpoints"
    return folder / f"checkpoints.{time.strftime('%Y%m%d-%H%M%S')}"


def output_folder(config: RunConfig) -> Path:
    """Where a run writes: `run.default_local_dir`, or a folder below the home of all outputs."""
    if config.run.default_local_dir:
        return Path(config.run.default_local_dir)
    return home() / "checkpoints" / config.run.project_name / config.run.experiment_name


def headline(config: RLConfig, prompts: Prompts) -> str:
    """What is about to run, in a line."""
    left_out = f" ({prompts.left_out} too long, left out)" if prompts.left_out else ""
    return (
        f"rl: {config.algorithm.adv_estimator} on {config.trainer.placement}, rollout by "
        f"{config.rollout.engine}, {config.trainer.train_batch_size} prompts × {config.rollout.n} "
        f"completions a step, {len(prompts.loader)} prompts{left_out}, "
        f"{len(prompts.validation)} for validation"
    )


@dataclass
class _Log:
    """Where the run's lines and metrics go; a context manager."""

    config: RunConfig
    folder: Path
    tracked: StageRun | None
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    _file: TextIO | None = None

    def __enter__(self) -> _Log:
        if "file" in self.config.run.logger:
            goes_on = checkpoint_folder(self.config, self.folder).exists()
            self._file = (self.folder / "metrics.jsonl").open("a" if goes_on else "w")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def start(self, validation: float) -> None:
        """The reward on the validation rows before the first step."""
        self.say(f"rl: validation {validation:.3f} before training")
        self._record(0, {"validation/reward": validation})

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        self.history.append(metrics)
        self._record(step, metrics)
        if "console" in self.config.run.logger:
            self.say(step_line(step, total, metrics, self.history))

    def summary(self, model: Path, seconds: float) -> None:
        """What became of it: rewards first → last, time, and where the model is."""
        rewards = [row["reward/mean"] for row in self.history]
        self.say(f"rl: done, {len(rewards)} steps in {human_time(seconds)}")
        if rewards:
            self.say(f"  reward      {_first_to_last(rewards)}")
        if self.validations:
            self.say(f"  validation  {_first_to_last(self.validations)}")
        self.say(f"  model       {model}")

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if "validation/reward" in metrics:
            self.validations.append(metrics["validation/reward"])
        if self.tracked:
            self.tracked.log_metrics(metrics, step)
        if self._file:
            self._file.write(json.dumps({"step": step} | dict(metrics)) + "\n")
            self._file.flush()


def _first_to_last(values: list[float]) -> str:
    return f"{values[0]:.3f} → {values[-1]:.3f}"


def _due(step: int, total: int, every: int) -> bool:
    return step == total or step % every == 0


def _with_steps(config: RunConfig, rows: int) -> RunConfig:
    """Turn `run.total_epochs`, if given, into steps."""
    if config.run.total_epochs is None:
        return config
    steps = max(1, config.run.total_epochs * rows // config.rl.trainer.train_batch_size)
    trainer = config.rl.trainer.model_copy(update={"total_training_steps": steps})
    return config.model_copy(update={"rl": config.rl.model_copy(update={"trainer": trainer})})


def _local(model: str) -> str:
    """A folder as an absolute path, for workers in other working directories; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.is_dir() else model


@contextlib.contextmanager
def _tracked(config: RunConfig) -> Iterator[StageRun | None]:
    """An MLflow run for the block where `run.logger` asks for one; the store is checked first."""
    if "mlflow" not in config.run.logger:
        yield None
        return
    from engine.tracking import Tracker

    tracker = Tracker(experiment=config.run.project_name)
    tracker.check()
    settings: dict[str, Any] = config.model_dump(mode="json")
    with tracker.stage(config.run.experiment_name, params=settings) as tracked:
        yield tracked
