"""One RL run, for the command line and the Flyte task: data and model in, a better model out."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from engine.batch import Batch
from engine.checkpoint import CheckpointStore
from engine.checkpoint.run_lock import hold_lock
from engine.checkpoint.state_dict import StateDict
from engine.cli.settings import OfflineRunConfig, RunConfig
from engine.config import LoRAConfig, RLConfig
from engine.console import human_time, say
from engine.controller.launch import ray_session
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError, counted
from engine.evaluation import drift
from engine.registry import import_plugins
from engine.samples.sample_files import FOLDER as ROLLOUTS
from engine.samples.sample_files import VALIDATION
from engine.samples.writer import RolloutLog
from engine.storage.filesystem import write_atomically
from engine.storage.json_rows import Row
from engine.tracking import StageRun, Tracker
from engine.tracking.metric_logs import MetricLogs, open_metric_logs
from engine.trainers.huggingface_export import resolve_checkpoint, write_policy
from engine.trainers.resume import SCORE, FinalModel, choose_final_model, run_with_retries
from engine.trainers.rl import Metrics, RLTrainer
from engine.trainers.run_spec import resolve_placement

_LONGEST = 200  # characters of a text that are printed
_MLFLOW_RUN = "mlflow_run"  # file with the id of the run, beside the checkpoints

# What the line of a step shows of the metrics that the algorithm at hand measures, and how.
_FACTS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "actor/kl", "{:.4f}"),
    ("KL in reward", "reward/kl", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("accuracy", "actor/rewards/accuracies", "{:.3f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
)


def _print_completions(batch: Batch, count: int) -> None:
    """Print the first `count` completions of a validation: score, end of the prompt, text."""

    def end(text: object) -> str:
        words = " ".join(str(text).split())
        return words if len(words) <= _LONGEST else f"…{words[-_LONGEST:]}"

    scores: list[float] = batch["token_level_scores"].sum(1).tolist()
    rows = zip(batch.columns["prompt"], batch.columns["completion"], scores, strict=True)
    for prompt, text, score in islice(rows, count):
        say(f"rl: validation {score:.3f} | {end(prompt[-1]['content'])} | {end(text)}")


def _step_line(step: int, total: int, metrics: Metrics, history: Sequence[Metrics]) -> str:
    """Say how a step (from 1) went and, from the steps in `history`, how long is left."""
    seconds = sum(row["perf/step_s"] for row in history) / max(1, len(history))
    facts = [f"{name} {shown.format(metrics[k])}" for name, k, shown in _FACTS if k in metrics]
    left = human_time(seconds * (total - step))
    speed = [f"{metrics['perf/tokens_per_s']:,.0f} tok/s", f"{metrics['perf/step_s']:.1f} s"]
    parts = [f"rl {step:>4}/{total}", *facts, *speed, f"{left} left"]
    if SCORE in metrics:
        parts.append(f"validation {metrics[SCORE]:.3f}")
    return " · ".join(parts)


def _time_line(history: Sequence[Metrics]) -> str:
    """Say which calls of roles took the steps' time, which may overlap, and the GPU's memory."""
    calls = {name for row in history for name in row if name.startswith("perf/") and "." in name}
    seconds = {name: sum(row.get(name, 0.0) for row in history) for name in calls}
    total = sum(row["perf/step_s"] for row in history)
    shares = [
        f"{name.removeprefix('perf/').removesuffix('_s')} {seconds[name] / total:.0%}"
        for name in sorted(seconds, key=lambda name: -seconds[name])
        if seconds[name] >= 0.01 * total
    ]
    memory = max(row.get("perf/max_memory_allocated_gb", 0.0) for row in history)
    line = (
        f"rl: shares of the steps' time (calls may overlap): {', '.join(shares) or 'not recorded'}"
    )
    return line + f"; most GPU memory of a rank: {memory:.1f} GiB" * bool(memory)


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
        self.step_lines = step_lines
        self._tracked, self._logs = tracked, logs or MetricLogs()
        self._tracked_steps: set[int] = set()
        self._drifts: set[str] = set()  # signals of drift that were said

    def resumed(self, folder: str, step: int) -> None:
        say(f"rl: continues from {folder}, step {step}")

    def validated_first(self, metrics: Metrics) -> None:
        say(f"rl: validation {metrics[SCORE]:.3f} before training")
        self.validations.append(metrics[SCORE])
        self.track([{"step": 0.0} | metrics])

    def step(self, step: int, total: int, metrics: Metrics, history: Sequence[Metrics]) -> None:
        """Record a step and its metrics; `history` are the rows of the steps before."""
        self.rewards.append(metrics["reward/mean"])
        if SCORE in metrics:
            self.validations.append(metrics[SCORE])
        self.track([*history, {"step": float(step)} | metrics])
        if self.step_lines:
            say(_step_line(step, total, metrics, [*history, metrics]))
        if any(metrics.get(drift.PREFIX + name, 0) for name in drift.NAMES - self._drifts):
            self._warn_of_drift(step, [*history, metrics])

    def _warn_of_drift(self, step: int, history: Sequence[Metrics]) -> None:
        """Say and tag the signals that are raised for the first time."""
        for signal in drift.signals(history):
            if signal.raised and signal.name not in self._drifts:
                self._drifts.add(signal.name)
                say(f"rl: drift ({signal.name}): {signal.sentence}")
                if self._tracked is not None:
                    tag = {f"{drift.PREFIX}{signal.name}": f"step {step}: {signal.sentence}"}
                    self._tracked.set_tags(tag)

    def hands_over(self, final: FinalModel) -> None:
        say(f"rl: hands over {final}")
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
    """Train, from the newest checkpoint and in new attempts after lost workers; EngineError."""
    start = run.loader.state_dict()
    trained: list[TrainedPolicy] = []

    def make() -> RLTrainer:
        run.loader.load_state_dict(start)
        return _trainer(run, rollouts)

    def attempt(trainer: RLTrainer) -> None:
        def on_step(step: int, total: int, metrics: Metrics) -> None:
            log.step(step, total, metrics, trainer.history)
            rollouts.step_done([*trainer.history, {"step": float(step)} | metrics])
            if step < total and run.save_freq > 0 and step % run.save_freq == 0:
                say(f"rl: saved {run.save_model(trainer.save, step)}")

        def on_resume(folder: str, step: int) -> None:
            log.resumed(folder, step)
            rollouts.resumed(step)

        trainer.on_resume = on_resume
        if not trainer.resume(run.checkpoints):
            rollouts.resumed(0)
            if run.validation and run.validate_first and not run.config.trainer.resume_from:
                prompts = counted(len(run.validation), "prompt")
                say(f"rl: validates {prompts} before training (trainer.val_before_train)")
                log.validated_first(trainer.validate(run.validation))
        trainer.on_step = on_step
        trainer.fit(checkpoint_dir=run.checkpoints, resume_from=run.previous_checkpoints)
        log.track(trainer.history)  # also of a run that was finished before
        say(_time_line(trainer.history))
        folder, final = _save_final(run, trainer)
        log.hands_over(final)
        rollouts.model_step = float(final.step)
        trained.append(TrainedPolicy(folder, final, trainer.history, trainer.changed_settings))
        trainer.write_timeline(run.folder / "timeline.json")

    with hold_lock(run.checkpoints), _rollout_log(run, log) as rollouts:  # before workers start
        run_with_retries(make, attempt, run.checkpoints, run.config.trainer.max_attempts)
    return trained[-1]


def validate_policy(run: RLRun, log: RunLog) -> Metrics:
    """Validate the newest checkpoint, or the start model, and train nothing."""
    with _rollout_log(run, log) as rollouts, _trainer(run, rollouts) as trainer:
        trainer.on_resume = log.resumed
        if not trainer.resume(run.checkpoints) and run.config.trainer.resume_from:
            trainer.load_checkpoint(resolve_checkpoint(run.config.trainer.resume_from))
        metrics = trainer.validate(run.validation)
        row = {"step": float(trainer.step)} | metrics
        log.track([row])
        rollouts.step_done([*trainer.history, row])
    return metrics


def prompt_room(config: RLConfig, longest: int, max_prompt_length: int) -> int:
    """Return the tokens that prompts may have: an environment may begin with some of its own."""
    return max(longest, max_prompt_length * config.rollout.multi_turn.enable)


def _trainer(run: RLRun, rollouts: RolloutLog) -> RLTrainer:
    """Start a trainer whose decoded batches are shown in samples, and on the terminal."""

    def show(split: str, step: int, batch: Batch) -> None:
        rollouts.rollouts(split, step, batch)
        if split == VALIDATION:
            _print_completions(batch, run.print_validations)

    trainer = RLTrainer(
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
    trainer.on_rollouts = show
    return trainer


def _save_final(run: RLRun, trainer: RLTrainer) -> tuple[Path, FinalModel]:
    history, checkpoints = trainer.history, CheckpointStore(run.checkpoints)
    final = choose_final_model(run.config.trainer.final_model, history, checkpoints)
    if final.checkpoint:
        if run.keep_last:
            run.save_model(trainer.save, trainer.step)
        write = partial(write_policy, final.checkpoint, model=run.model)
        try:
            return run.save_model(write, final.step), final
        except CheckpointError as error:
            say(f"rl: {final} is lost, and the last step is handed over: {error}")
        final = choose_final_model("last", history, checkpoints)
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


def headline(config: RLConfig, prompts: int) -> str:
    return (
        f"rl: {config.algorithm.adv_estimator} on {config.trainer.placement}, rollout by "
        f"{config.rollout.engine}, {prompts} prompts × {config.rollout.n} completions a step"
    )


@contextlib.contextmanager
def open_log(
    config: RunConfig | OfflineRunConfig, folder: Path, checkpoints: Path
) -> Iterator[RunLog]:
    """Open a log for the block, or go on with that of `checkpoints`; or raise TrackingError."""
    output, settings, tracked = config.run, config.model_dump(mode="json"), None
    resumes, trains = any(checkpoints.glob("step_*")), not getattr(output, "val_only", False)
    with contextlib.ExitStack() as stack:
        if "mlflow" in output.logger:
            tracker = Tracker(experiment=output.project_name)
            tracker.check()
            known = checkpoints / _MLFLOW_RUN
            earlier = known.read_text() if resumes and trains and known.is_file() else ""
            stage = tracker.stage(output.experiment_name, params=settings, earlier_run=earlier)
            tracked = stack.enter_context(stage)
            if trains:
                checkpoints.mkdir(parents=True, exist_ok=True)
                write_atomically(known, [tracked.run_id.encode()])
        opened = open_metric_logs(
            output.logger,
            folder,
            project=output.project_name,
            run_name=output.experiment_name,
            settings=settings,
            keep=resumes,
        )
        logs = stack.enter_context(opened)
        yield RunLog(tracked, logs, step_lines="console" in output.logger)
