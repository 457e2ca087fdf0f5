"""Retraining on Flyte 2: every night, or when new data are published as an artifact.

    flyte run --local workflows/flyte2/retraining.py retraining \
        --kickoff "$(date -u +%Y-%m-%dT%H:%M:%S)" --path s3://bucket/problems

See docs/retraining.md. Flyte 2 starts a night's run even while another one is running.
"""

from datetime import UTC, datetime
from functools import partial
from typing import Any

import flyte
from flyte.io import Dir, File

from workflows import pipelines
from workflows.flyte2 import entry
from workflows.flyte2.entry import FRONT
from workflows.flyte2.host import Settings

NIGHTLY: dict[str, Any] = {"preset": "nightly", "ends": True, "profile": "8xA100"}
PROBLEMS = "hybridflyte-problems"  # the artifact of Flyte whose new versions start a run


def run(**inputs: Any) -> File:
    plan = partial(FRONT.trigger_retraining, **inputs)
    return entry.recorded("retraining", inputs["config"], plan, train_or_skip)


def train_or_skip(p: entry.RetrainingPlan) -> File:
    if p.proceed:
        return pipelines.retrain_champion(FRONT, p)
    return FRONT.finalize_skipped(run=p.run, reason=p.skip_reason)


# At 2 in the morning, UTC. Files written until then belong to this run.
NIGHT = entry.trigger(
    "nightly_retraining", flyte.Cron("0 2 * * *"), kickoff=flyte.TriggerTime, **NIGHTLY
)
ON_ARRIVAL = {"arrived": flyte.TriggeredArtifact, **NIGHTLY}
ARRIVAL = entry.trigger("retraining_on_arrival", flyte.OnArtifact(PROBLEMS), **ON_ARRIVAL)


@entry.entry(NIGHT)
def retraining(
    kickoff: datetime,
    config: Settings = Settings(),  # noqa: B008 (frozen)
    path: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> File:
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
    return run(config=config, at=kickoff, path=path, seed=seed, profile=profile)


@entry.entry(ARRIVAL)
def retraining_on_arrival(
    arrived: Dir,
    config: Settings = Settings(),  # noqa: B008 (frozen)
    seed: int = -1,
    profile: str = "laptop",
) -> File:
    """Retrain the champion as soon as data are published.

    Args:
        arrived: Folder of dated folders with new data: a version of hybridflyte-problems.
        config: As for `retraining`, as all other inputs.

    Returns:
        The run's summary.json.
    """
    at = flyte.ctx().run_start_time or datetime.now(UTC)
    return run(config=config, at=at, path=arrived.path, seed=seed, profile=profile)
