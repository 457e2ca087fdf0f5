"""What the tasks that train on rows share: attempts, progress, metrics, the model to start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.context import echo

if TYPE_CHECKING:
    from engine.config import OfflineConfig
    from engine.console import Progress
    from engine.tracking.metric_logs import MetricLogs
    from engine.trainers.offline import OfflineTrainer
    from tasks.stage import Stage

Example = TypeVar("Example")


@dataclass
class TrainedOnRows:
    """What training left beside the model."""

    metrics: dict[str, float]  # of the last step
    steps: int
    history: dict[int, dict[str, float]] = field(default_factory=dict)  # of steps of this process

    def write_history(self, path: Path) -> None:
        """Write a row a step, as `engine.evaluation.policy_steps` reads them.

        Nothing where an attempt on another machine made some of the steps.
        """
        import pandas as pd

        if len(self.history) < self.steps:
            return
        rows = [{"step": step, **self.history[step]} for step in sorted(self.history)]
        frame = pd.DataFrame(rows)
        frame["model"] = frame["step"] == self.steps
        frame.to_parquet(path, index=False)


def train_on_rows(
    this: Stage,
    logs: MetricLogs,
    config: OfflineConfig,
    make: Callable[[], OfflineTrainer[Example, Any]],
    train: Sequence[Example],
    validation: Sequence[Example],
    tokenizer: Path,
) -> TrainedOnRows:
    """Train, in new attempts after lost workers, and write the model into the stage's folder.

    `make` gives a trainer of its own to each attempt. A stage that has checkpoints resumes from the
    newest. `tokenizer`: its folder.
    """
    from engine.console import progress
    from engine.trainers.attempts import run_with_retries

    checkpoints, name = this.checkpoints(), config.section
    this.record_origin(checkpoints)
    trained = TrainedOnRows({}, 0)

    def attempt(trainer: OfflineTrainer[Example, Any]) -> None:
        trained.steps = trainer.total_steps(len(train))
        losses: dict[str, float] = {}
        bar: Progress[None] = progress(trained.steps, name, unit="step")

        def report(step: int, total: int, metrics: dict[str, float]) -> None:
            trained.history[step] = metrics
            losses.update({k: v for k, v in metrics.items() if k.endswith(("loss", "accuracy"))})
            this.tracked.log_metrics(metrics, step)
            logs.log_metrics(metrics, step)
            shown = {k.removeprefix(f"{name}/"): v for k, v in losses.items()}
            bar.update(step - bar.count, **shown)

        trainer.on_step = report
        trainer.on_resume = lambda folder, step: echo(
            f"{name}: continues from {folder}, step {step}"
        )
        with bar:
            trained.metrics |= trainer.fit(
                train, validation, checkpoints.folder, checkpoints.previous
            )
        trainer.save(this.folder, tokenizer)

    run_with_retries(make, attempt, checkpoints.folder, config.max_attempts)
    return trained
