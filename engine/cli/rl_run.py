"""One RL run, for the command line and the Flyte task: data and model in, a better model out.

Reading data files for it is in `ppo_program`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.batch import Batch
from engine.checkpoint import CheckpointStore
from engine.checkpoint.run_lock import hold_lock
from engine.checkpoint.state_dict import StateDict
from engine.cli.settings import RunConfig, RunOutputConfig
from engine.config import LoRAConfig, RLConfig
from engine.console import human_time, say
from engine.controller.launch import ray_session
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError
from engine.redaction import presentable
from engine.registry import import_plugins
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.samples.sample_files import VALIDATION
from engine.samples.writer import RolloutLog
from engine.storage.json_rows import Row
from engine.tracking.metric_logs import MetricLogs, open_metric_logs
from engine.trainers.huggingface_export import resolve_checkpoint, write_policy
from engine.trainers.resume import SCORE, FinalModel, choose_final_model, run_with_retries
from engine.trainers.rl import Metrics, OnRollouts, RLTrainer
from engine.trainers.run_spec import resolve_placement

if TYPE_CHECKING:
    from engine.tracking import StageRun


_LONGEST = 200  # characters of a text that are printed

# What the line of a step shows of the metrics that the algorithm at hand measures, and how.
_FACTS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "actor/kl", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("accuracy", "actor/rewards/accuracies", "{:.3f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
)


def printed_completions(batch: Batch, count: int) -> list[str]:
    """Return the first `count` completions of a validation: score, end of the prompt, text."""

    def end(text: object) -> str:
        words = " ".join(str(text).split())
        return words if len(words) <= _LONGEST else f"…{words[-_LONGEST:]}"

    scores: list[float] = batch["token_level_scores"].sum(1).tolist()
    columns = batch.columns
    rows = zip(columns["prompt"], columns["completion"], scores, strict=True)
    return [
        presentable(f"rl: validation {score:.3f} | {end(prompt[-1]['content'])} | {end(text)}")
        for prompt, text, score in list(rows)[:count]
    ]


def step_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]],
) -> str:
    """Say how step `step` (1-based) went and, from the steps in `history`, how long is left."""
    seconds = sum(row["perf/step_s"] for row in history) / max(1, len(history))
    facts = {name: shown.format(metrics[key]) for name, key, shown in _FACTS if key in metrics}
    parts = [f"rl {step:>4}/{total}", *(f"{name} {shown}" for name, shown in facts.items())]
    parts += [
        f"{metrics['perf/tokens_per_s']:,.0f} tok/s",
        f"{metrics['perf/step_s']:.1f} s",
        f"{human_time(seconds * (total - step))} left",
    ]
    if "validation/reward" in metrics:
        parts.append(f"validation {metrics['validation/reward']:.3f}")
    return " · ".join(parts)


WriteModel = Callable[[str], None]  # writes a model's files into a folder


@dataclass(frozen=True, slots=True)
class RLRun:
    """A run: the model that is trained, its data, and where results go."""

    model: str | Path  # start model: a folder or a hub id
    config: RLConfig
    loader: PromptLoader
    validation: Sequence[Row]
    max_prompt_length: int  # in tokens: of both, and what environments may begin with
    max_response_length: int
    folder: Path  # of timeline.json
    checkpoints: str | Path  # a folder or s3://…
    save_model: Callable[[WriteModel, int], Path]  # a step's model folder, which it returns
    previous_checkpoints: str | Path | None = None  # of the attempt before
    rollouts: str | Path = ""  # samples of them: a folder or s3://…; empty: beside the checkpoints
    save_freq: int = 0  # steps between model folders; 0: none before the end
    keep_last: bool = False  # a model folder of the last step, too, where another is handed over
    validate_first: bool = False  # before the first step of a new run
    print_validations: int = 0  # completions of each validation that are printed
    seed: int = 0
    dtype: str = "auto"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    on_page: Callable[[str], None] | None = None  # the page of rollouts, as it is written again


class RunLog:
    """Progress lines, and a run's metrics in MLflow and elsewhere."""

    def __init__(
        self,
        tracked: StageRun | None = None,
        logs: MetricLogs | None = None,
        *,
        step_lines: bool = True,
    ) -> None:
        """Log to the run and to `logs`; `step_lines` says whether each step prints a line."""
        self.rewards: list[float] = []  # of this process's steps
        self.validations: list[float] = []
        self._tracked, self._logs, self._step_lines = tracked, logs or MetricLogs(), step_lines
        self._tracked_steps: set[int] = set()

    def say(self, line: str) -> None:
        """Print a line."""
        say(line)

    def resumed(self, folder: str, step: int) -> None:
        """Say that the run goes on after `step`, from a checkpoint in `folder`."""
        self.say(f"rl: continues from {folder}, step {step}")

    def validated_first(self, metrics: Metrics) -> None:
        """Record the metrics of the validation rows before the first step."""
        self.say(f"rl: validation {metrics[SCORE]:.3f} before training")
        self.validations.append(metrics[SCORE])
        self.track([{"step": 0.0} | metrics])

    def step(self, step: int, total: int, metrics: Metrics, history: Sequence[Metrics]) -> None:
        """Record a step and its metrics; `history` are the rows of the steps before."""
        self.rewards.append(metrics["reward/mean"])
        if SCORE in metrics:
            self.validations.append(metrics[SCORE])
        self.track([*history, {"step": float(step)} | metrics])
        if self._step_lines:
            self.say(step_line(step, total, metrics, [*history, metrics]))

    def hands_over(self, final: FinalModel) -> None:
        """Record which step's policy is the result of the run."""
        self.say(f"rl: hands over {final}")
        if self._tracked is not None:
            self._tracked.log_metrics(final.metrics(), final.last)

    def track(self, history: Sequence[Metrics]) -> None:
        """Track the rows that this process has not tracked; an earlier one had a run of its own."""
        for row in history:
            step = int(row["step"])
            if step in self._tracked_steps:
                continue
            self._tracked_steps.add(step)
            metrics = {name: value for name, value in row.items() if name != "step"}
            if self._tracked is not None:
                self._tracked.log_metrics(metrics, step)
            self._logs.log_metrics(metrics, step)

    def file(self, path: Path) -> None:
        """Track a file of the run's rollouts; called from another thread than the rest."""
        if self._tracked is not None:
            self._tracked.log_file(path, ROLLOUTS)


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """The result of a run."""

    folder: Path  # of the model that it hands over
    final: FinalModel  # which step that is
    history: list[Metrics]  # a row a step
    changed_settings: list[StateDict]  # of resumptions, see `engine.trainers.resume`


@contextlib.contextmanager
def placed(config: RLConfig, object_store_memory: int | None = None) -> Iterator[RLConfig]:
    """Return the settings with their placement chosen, and start Ray where they need it."""
    import_plugins(config.plugins)  # rollout sources and engines may be theirs
    config = resolve_placement(config)
    with ray_session(config.trainer.placement, object_store_memory):
        yield config


def train_policy(run: RLRun, log: RunLog) -> TrainedPolicy:
    """Train, in new attempts after lost workers; return the model and how it came about.

    A run that has checkpoints resumes from the newest. Raises an EngineError.
    """
    start = run.loader.state_dict()
    trained: list[TrainedPolicy] = []

    def make() -> RLTrainer:
        run.loader.load_state_dict(start)
        return _trainer(run)

    def attempt(trainer: RLTrainer) -> None:
        def on_step(step: int, total: int, metrics: Metrics) -> None:
            log.step(step, total, metrics, trainer.history)
            rollouts.step_done([*trainer.history, {"step": float(step)} | metrics])
            if step < total and run.save_freq > 0 and step % run.save_freq == 0:
                log.say(f"rl: saved {run.save_model(trainer.save, step)}")

        def on_resume(folder: str, step: int) -> None:
            log.resumed(folder, step)
            rollouts.resumed(step)

        trainer.on_resume, trainer.on_rollouts = on_resume, _listeners(run, log, rollouts)
        first = run.validation and run.validate_first and not run.config.trainer.resume_from
        if not trainer.resume(run.checkpoints):
            rollouts.resumed(0)
            if first:
                log.validated_first(trainer.validate(run.validation))
        trainer.on_step = on_step
        if not trainer.fit(checkpoint_dir=run.checkpoints, resume_from=run.previous_checkpoints):
            log.say(f"rl: all {trainer.step} steps are done already; nothing to train")
        log.track(trainer.history)  # also of a run that was finished before
        folder, final = _save_final(run, trainer, log)
        log.hands_over(final)
        trained.append(TrainedPolicy(folder, final, trainer.history, trainer.changed_settings))
        trainer.write_timeline(run.folder / "timeline.json")

    with hold_lock(run.checkpoints), _rollout_log(run, log) as rollouts:  # before workers start
        run_with_retries(make, attempt, run.checkpoints, run.config.trainer.max_attempts)
    return trained[-1]


def validate_policy(run: RLRun, log: RunLog) -> Metrics:
    """Validate the newest checkpoint, or the start model, and train nothing."""
    with _rollout_log(run, log) as rollouts, _trainer(run) as trainer:
        trainer.on_rollouts = _listeners(run, log, rollouts)
        trainer.on_resume = log.resumed
        if not trainer.resume(run.checkpoints) and run.config.trainer.resume_from:
            trainer.load_checkpoint(resolve_checkpoint(run.config.trainer.resume_from))
        metrics = trainer.validate(run.validation)
        log.track([{"step": float(trainer.step)} | metrics])
        rollouts.step_done([*trainer.history, {"step": float(trainer.step)} | metrics])
    return metrics


def prompt_room(config: RLConfig, longest: int, max_prompt_length: int) -> int:
    """Return the tokens that prompts may have: the rows' longest, with episodes at least
    `max_prompt_length`, as an environment may begin with messages of its own."""
    return max(longest, max_prompt_length * config.rollout.multi_turn.enable)


def _trainer(run: RLRun) -> RLTrainer:
    return RLTrainer(
        run.model,
        run.config,
        run.loader,
        max_response_length=run.max_response_length,
        max_model_len=run.max_prompt_length + run.max_response_length,
        seed=run.seed,
        dtype=run.dtype,
        lora=run.lora,
        validation=run.validation,
    )


def _listeners(run: RLRun, log: RunLog, rollouts: RolloutLog) -> OnRollouts:
    """Return what shows decoded batches in the files of samples, and on the terminal."""

    def show(split: str, step: int, batch: Batch) -> None:
        rollouts.rollouts(split, step, batch)
        if split == VALIDATION and run.print_validations:
            for line in printed_completions(batch, run.print_validations):
                log.say(line)

    return show


def _save_final(run: RLRun, trainer: RLTrainer, log: RunLog) -> tuple[Path, FinalModel]:
    """Write the model folder of the step that is handed over."""
    rule, history = run.config.trainer.final_model, trainer.history
    final = choose_final_model(rule, history, CheckpointStore(run.checkpoints))
    if not final.checkpoint:
        return run.save_model(trainer.save, trainer.step), final
    if run.keep_last:
        run.save_model(trainer.save, trainer.step)
    write = partial(write_policy, final.checkpoint, model=run.model)
    try:
        return run.save_model(write, final.step), final
    except CheckpointError as error:
        log.say(f"rl: {final} is lost, and the last step is handed over: {error}")
    final = choose_final_model("last", history, CheckpointStore(run.checkpoints))
    return run.save_model(trainer.save, trainer.step), final


def _rollout_log(run: RLRun, log: RunLog) -> RolloutLog:
    settings, previous = run.config.trainer, run.previous_checkpoints
    return RolloutLog(
        run.rollouts or f"{run.checkpoints}/{ROLLOUTS}",
        lambda: load_tokenizer(run.model),
        every=settings.log_rollouts_freq,
        rows=settings.log_rollouts_rows,
        last_step=settings.total_training_steps,
        previous=f"{previous}/{ROLLOUTS}" if previous else None,
        on_file=log.file,
        on_page=run.on_page,
    )


def headline(config: RLConfig) -> str:
    """Say in a line what is about to run."""
    return (
        f"rl: {config.algorithm.adv_estimator} on {config.trainer.placement}, rollout by "
        f"{config.rollout.engine}, {config.trainer.train_batch_size} prompts × {config.rollout.n} "
        "completions a step"
    )


@contextlib.contextmanager
def open_log(config: RunConfig, folder: Path, resumes: bool) -> Iterator[RunLog]:
    """Open the log for the block; a run in `folder` that resumes goes on in its file of metrics.

    Raises TrackingError where a tracker can't be reached, before the block.
    """
    settings = config.model_dump(mode="json")
    with open_trackers(config.run, settings, folder, resumes) as (tracked, logs):
        yield RunLog(tracked, logs, step_lines="console" in config.run.logger)


@contextlib.contextmanager
def open_trackers(
    output: RunOutputConfig, settings: dict[str, object], folder: Path, resumes: bool
) -> Iterator[tuple[StageRun | None, MetricLogs]]:
    """Open the MLflow run, if `output.logger` asks for one, and the other logs, as `open_log`."""
    with contextlib.ExitStack() as stack:
        tracked = None
        if "mlflow" in output.logger:
            from engine.tracking import Tracker

            tracker = Tracker(experiment=output.project_name)
            tracker.check()
            tracked = stack.enter_context(tracker.stage(output.experiment_name, params=settings))
        logs = open_metric_logs(
            output.logger,
            folder,
            project=output.project_name,
            run_name=output.experiment_name,
            settings=settings,
            keep=resumes,
        )
        yield tracked, stack.enter_context(logs)
