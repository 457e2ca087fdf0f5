"""Scheduled retraining: train the champion on new data, and promote the result if it is better.

    pyflyte run workflows/retraining.py retraining --kickoff "$(date -u +%Y-%m-%dT%H:%M:%S)" \\
        --path s3://bucket/problems

Training starts from the champion, with a replay of its own training data. A run with too little
new data ends as skipped, and a run may be late or repeated: see docs/retraining.md.
"""

from datetime import datetime
from types import SimpleNamespace
from typing import Any, get_type_hints

from flytekit import conditional, workflow
from flytekit.types.file import FlyteFile

from engine.stages import interfaces
from engine.stages.settings import RetrainingPlan
from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import finalize_skipped, trigger_retraining
from workflows import pipelines
from workflows.parts import FRONT

# What the sub-workflow gets of a plan, which flytekit can't hand on whole.
PLANNED = {
    name: kind
    for name, kind in get_type_hints(RetrainingPlan).items()
    if name not in ("proceed", "skip_reason")
}


def _retrain(**plan: object) -> Any:
    return pipelines.retrain_champion(FRONT, SimpleNamespace(**plan))


retrain_champion = workflow(
    interfaces.declare(
        _retrain,
        "retrain_champion",
        __name__,
        interfaces.signature(PLANNED, FlyteFile),
        "Train on the new data, evaluate, and promote by the rules.",
    )
)


@workflow(on_failure=failure.retraining_failed)
def retraining(
    kickoff: datetime,
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    path: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Train the champion on the problems that arrived since, and promote the better model.

    Args:
        kickoff: Scheduled time in UTC: files written later wait for the next run.
        config: Settings; data.source and the sections model and sft are not read.
        path: Folder or s3:// prefix of dated folders with new data; empty: retrain.path.
        seed: Seed of replay and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = trigger_retraining(config=config, at=kickoff, path=path, seed=seed, profile=profile)
    return (
        conditional("new_data")
        .if_(p.proceed.is_true())
        .then(retrain_champion(**{name: getattr(p, name) for name in PLANNED}))
        .else_()
        .then(finalize_skipped(run=p.run, reason=p.skip_reason))
    )
